// What nodes keep of their inputs.
#include <ATen/SavedTensorHooks.h>
#include <ATen/ops/as_strided.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/PyInterpreter.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/object_ptr.h>
#include <torch/csrc/utils/pybind.h>

#include <cstring>
#include <typeinfo>

#include "room.h"

namespace hfnn::node {
namespace ag = torch::autograd;

// Whether a node is a torch.autograd.Function. Its class is not exported, but the name is known.
static bool in_python(const Node& node) {
  static std::atomic<const std::type_info*> known{nullptr};
  const std::type_info& type = typeid(node);
  if (&type == known) return true;
  if (std::strcmp(type.name(), "N5torch8autograd6PyNodeE") != 0) return false;
  known = &type;
  return true;
}

Mark::Mark(const Tensor& x) : counter(ag::impl::version_counter(x)), version(x._version()) {}

Tensor viewed(const Tensor& x) {
  auto* meta = ag::impl::get_autograd_meta(x);
  if (!meta || !meta->is_view_) return x;
  auto* view = static_cast<ag::DifferentiableViewMeta*>(meta);
  if (!x.requires_grad() || !view->has_bw_view()) return {};
  const Tensor& base = view->get_backward_view().base_;
  const bool plain = base.scalar_type() == x.scalar_type() && !x.is_neg() && !x.is_conj();
  // Not after `x.data = ...`.
  return plain && graph_of(base) && x.storage().is_alias_of(base.storage()) ? base : Tensor();
}

bool Kept::take(const Tensor& x) {
  Room::decide(x);
  const Tensor whole = state().recipes ? viewed(x) : Tensor();
  auto* meta = whole.defined() ? graph_of(whole) : nullptr;
  auto* room = meta ? dynamic_cast<Room*>(meta->grad_fn_.get()) : nullptr;
  if (!room || meta->output_nr_ != 0 || !room->gives(whole)) return false;
  if (!whole.is_same(x)) {
    const int64_t offset = x.storage_offset() - whole.storage_offset();
    view_ = std::make_unique<View>(View{{}, {}, offset, ag::impl::gradient_edge(x)});
    view_->sizes.assign(x.sizes().begin(), x.sizes().end());
    view_->strides.assign(x.strides().begin(), x.strides().end());
  }
  producer_ = room;
  steps_ = producer_->steps_;
  ++room->tokens_;
  ++state().taken;
  ++state().alive;
  defined_ = source_ = true;
  dtype_ = x.scalar_type();
  mark_ = Mark(x);
  return true;
}

void Kept::share(const Kept& other) {
  TORCH_INTERNAL_ASSERT(other.defined_ && !other.released_ && (other.producer_ || other.held_.defined()));
  held_ = other.held_;
  producer_ = other.producer_;
  if (other.view_) view_ = std::make_unique<View>(*other.view_);
  mark_ = other.mark_;
  impl_ = other.impl_;
  data_ = other.data_;
  dtype_ = other.dtype_;
  steps_ = other.steps_;
  defined_ = true;
  source_ = other.source_;
  if (!producer_) return;
  ++producer_->tokens_;
  ++state().taken;
  ++state().alive;
}

bool Kept::takes(const Tensor& x) {
  const Tensor whole = viewed(x);
  auto* meta = whole.defined() ? graph_of(whole) : nullptr;
  if (!meta) return false;
  auto* room = dynamic_cast<Room*>(meta->grad_fn_.get());
  return room && room->carries_;
}

void keeps_whole(const Tensor& x) {
  auto* meta = graph_of(x);
  if (!meta || !in_python(*meta->grad_fn_) || meta->grad_fn_->name() != "_PiecewiseBackward") return;
  if (hooked()) return;  // what the consumer keeps is what they make of x
  if (!THPObjectPtr(PyObject_CallOneArg(python().keeps_whole, py::cast(x).ptr()))) throw python_error();
}

void Kept::save(const Tensor& x, bool source) {
  if (!x.defined()) return;
  keeps_whole(x);
  defined_ = true;
  dtype_ = x.scalar_type();
  if (!x.is_inference()) mark_ = Mark(x);
  source_ = (source || x.requires_grad()) && !x.is_inference();
  saved_ = ag::SavedVariable(fault(kCutOff) ? x.detach().requires_grad_(x.requires_grad()) : x, false);
  if (fault(kKeptForEver)) (new variable_list)->push_back(x);
  hooked_ = saved_.has_hooks();
  if (hooked_ || is_fake(x)) return;
  impl_ = x.unsafeGetTensorImpl();
  data_ = impl_->data();
}

void Kept::hold(const Tensor& x, bool source) {
  if (!x.defined()) return;
  defined_ = true;
  dtype_ = x.scalar_type();
  held_ = x;
  if (!x.is_inference()) mark_ = Mark(x);
  source_ = (source || x.requires_grad()) && !x.is_inference();
  if (is_fake(x)) return;
  impl_ = x.unsafeGetTensorImpl();
  data_ = impl_->data();
}

void Kept::copy_of(const Tensor& x) {
  if (x.is_inference()) return;
  original_ = Mark(x);
  copied_ = true;
}

Tensor Kept::own() {
  const Tensor x = get();
  if (copied_ && !original_.holds()) throw_written_to(x.options(), x.sizes(), {}, original_);
  return x;
}

bool Kept::intact() const {
  if (fault(kSourcesNotCompared)) return true;
  if (!defined_) return true;
  return mark_.holds() && (!impl_ || impl_->data() == data_) && (!producer_ || producer_->intact());
}

// Guards every `unpacked_`. Not held while a hook runs or a tensor is freed, because either may wait for the GIL.
static std::mutex& unpacking() {
  static auto* mutex = new std::mutex;
  return *mutex;
}

Tensor Kept::unpack() {
  if (!hooked_) return saved_.unpack();
  const int now = task();
  {
    std::lock_guard<std::mutex> lock(unpacking());
    if (unpacked_in_ == now && unpacked_.defined()) return unpacked_;
  }
  AboveAutograd above;
  Tensor y = saved_.unpack(), before = y;
  std::lock_guard<std::mutex> lock(unpacking());
  std::swap(unpacked_, before);
  unpacked_in_ = now;
  return y;
}

void Kept::forget() {
  Tensor before;
  std::lock_guard<std::mutex> lock(unpacking());
  std::swap(unpacked_, before);
}

thread_local Batch* Batch::now = nullptr;

bool Kept::checked(ScalarType dtype) const {
  if (!producer_) return false;
  TORCH_CHECK(!released_, ag::ERR_BACKWARD_TWICE);
  if (dtype == dtype_ && !mark_.holds()) {
    const auto like = at::TensorOptions().dtype(dtype_).device(producer_->input_metadata(0).device());
    throw_written_to(like, producer_->sizes_, {producer_->getptr(), 0}, mark_);
  }
  return true;
}

Tensor Kept::get(ScalarType dtype) {
  if (!defined_) return {};
  Tensor* asked = Batch::now ? Batch::now->asked(this) : nullptr;
  if (!asked) return found(dtype);
  if (!asked->defined()) *asked = found(dtype);
  return *asked;
}

Tensor Kept::found(ScalarType dtype) {
  TORCH_CHECK(!released_, ag::ERR_BACKWARD_TWICE);
  if (held_.defined()) {
    if (!intact()) throw_written_to(held_.options(), held_.sizes(), {}, mark_);
    return held_;
  }
  if (!taken()) return unpack();
  checked(dtype);
  return rebuilt(dtype, true);
}

Tensor Kept::rebuilt(ScalarType dtype, bool last) {
  const Tensor y = producer_->rebuild(*this, dtype, last);
  if (!view_) return y;
  const at::AutoGradMode no_grad(false);
  const BelowAutograd below;
  Tensor x = y.detach().as_strided(view_->sizes, view_->strides, y.storage_offset() + view_->offset);
  if (y.requires_grad()) ag::impl::set_gradient_edge(x, view_->edge);
  return x;
}

Tensor Kept::part(ScalarType dtype, bool last) {
  if (fault(kFirstSource) && producer_) return producer_->kept().front().part(last);
  if (!defined_ || released_ || !taken()) return get(dtype);
  return rebuilt(dtype, last);
}

void Kept::release() {
  if (producer_) {
    Room* room = producer_;
    producer_ = nullptr;
    --state().alive;
    Tensor shared, left;
    std::lock_guard<std::mutex> lock(room->sharing_);
    if (served_in_ >= 0 && served_in_ == room->task_) --room->served_;
    if (--room->tokens_ == 0) {
      std::swap(shared, room->shared_);
      std::swap(left, room->left_);
    }
  }
  saved_.reset_data();
  held_.reset();
  impl_ = nullptr;
  if (hooked_) forget();
  released_ = true;
}

}  // namespace hfnn::node
