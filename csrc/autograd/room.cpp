#include "room.h"

#include <ATen/SavedTensorHooks.h>
#include <ATen/ops/_fw_primal.h>
#include <ATen/ops/_make_dual.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/DynamicTypes.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/PyInterpreter.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/object_ptr.h>
#include <torch/csrc/utils/pybind.h>

#include <thread>
#include <unordered_map>

#include "written.h"

namespace hfnn::node {
namespace ag = torch::autograd;

State& state() {
  static State* all = new State;
  return *all;
}

Python& python() {
  static Python* functions = new Python;
  return *functions;
}

int task() { return ag::get_current_graph_task_id(); }

static std::optional<c10::SafePyObject> hooks_now() {
  const auto& stack = at::SavedTensorDefaultHooks::get_tls_state().stack;
  if (stack.empty()) return std::nullopt;
  auto top = at::SavedTensorDefaultHooks::get_hooks(true);
  return top ? std::optional(top->first) : std::nullopt;
}

bool hooked() { return hooks_now().has_value(); }

static bool same(const std::optional<c10::SafePyObject>& a, const std::optional<c10::SafePyObject>& b) {
  if (!a || !b) return !a == !b;
  return a->ptr(getPyInterpreter()) == b->ptr(getPyInterpreter());
}

static std::optional<c10::Stream> stream_of(const Tensor& x) {
  if (is_fake(x) || !x.is_cuda()) return std::nullopt;
  return c10::impl::VirtualGuardImpl(x.device().type()).getStream(x.device());
}

// Room

void Room::finish(const NodePtr& self, Tensor& y, ag::edge_list&& edges, bool carries, bool writes) {
  set_next_edges(std::move(edges));
  if (writes) {
    add_input_metadata(y);
    ag::impl::rebase_history(y, {self, 0});
  } else {
    ag::set_history(y, self);
  }
  dtype_ = y.scalar_type();
  fake_mode_ = fake_mode();
  if (!carries || !state().recipes) return;
  for (Kept& input : kept()) {
    if (!input.source()) return;
    steps_ += input.steps();
  }
  if (steps_ > kLongest && !fault(kNoBound)) return;
  version_ = y._version();
  data_ = address(y);
  sizes_.assign(y.sizes().begin(), y.sizes().end());
  strides_.assign(y.strides().begin(), y.strides().end());
  made_on_ = stream_of(y);
  hooks_ = hooks_now();
  carries_ = true;
}

namespace {
template <class T>
std::weak_ptr<T> weakly(const std::shared_ptr<T>& node) {
  return node;
}
template <class T>
c10::weak_intrusive_ptr<T> weakly(const c10::intrusive_ptr<T>& node) {
  return c10::weak_intrusive_ptr<T>(node);
}

// Of each thread, its last offer. Guarded by the GIL.
auto& offers() {
  static auto* all = new std::unordered_map<std::thread::id, decltype(weakly(NodePtr()))>;
  return *all;
}
}  // namespace

void Room::offer(const NodePtr& self) {
  offered_ = true;
  if (!carries_) return let_go();
  offers().insert_or_assign(std::this_thread::get_id(), weakly(self));
}

void Room::decide(at::ArrayRef<Tensor> read) {
  if (offers().empty()) return;
  const auto offer = offers().extract(std::this_thread::get_id());
  const NodePtr node = offer ? offer.mapped().lock() : NodePtr();
  if (!node) return;
  for (const Tensor& x : read) {
    const Tensor y = viewed(x);
    auto* meta = y.defined() ? graph_of(y) : nullptr;
    if (meta && meta->grad_fn_ == node) return;
  }
  auto* self = static_cast<Room*>(node.get());
  if (self->tokens_ == 0) self->let_go();
}

// Also the sources of offers that only this one read.
void Room::let_go() {
  carries_ = false;
  for (Kept& source : kept()) source.release();
  for (const auto& edge : next_edges()) {
    auto* source = dynamic_cast<decltype(this)>(edge.function.get());
    if (source && source->offered_ && source->tokens_ == 0) source->let_go();
  }
}

bool Room::gives(const Tensor& y) {
  return carries_ && !released_ && y._version() == version_ && address(y) == data_ && y.scalar_type() == dtype_ &&
         y.sizes() == at::IntArrayRef(sizes_) && y.strides() == at::IntArrayRef(strides_) && made_on_ == stream_of(y) &&
         intact() && (same(hooks_, hooks_now()) || fault(kHooksNotCompared));
}

bool Room::intact() {
  if (released_) {
    std::lock_guard<std::mutex> lock(sharing_);
    return left_.defined();
  }
  for (Kept& input : kept())
    if (!input.intact()) return false;
  return true;
}

static Tensor watched(const Tensor& y) {
  if (python().watch) {
    pybind11::gil_scoped_acquire gil;
    py::handle(python().watch)(y);
  }
  return y;
}

Tensor Room::built(ScalarType dtype) {
  const InMode mode(fake_mode_);
  at::AutoGradMode no_grad(false);
  const BelowAutograd below;
  return as(as(watched(build(dtype)), fault(kNotWidened) ? at::kBFloat16 : dtype), dtype);
}

Tensor Room::rebuild(Kept& consumer, ScalarType dtype, bool last) {
  const bool grad = at::GradMode::is_enabled();
  const int now = task();
  Tensor y, before;
  {
    std::lock_guard<std::mutex> lock(sharing_);
    if (task_ != now) {
      task_ = now;
      served_ = 0;
      std::swap(before, shared_);
    }
    if (left_.defined()) {
      y = left_;
    } else if (!grad && shared_.defined() && shared_.scalar_type() == dtype && stream_ == stream_of(shared_)) {
      y = shared_;
    }
  }
  if (!y.defined()) {
    TORCH_CHECK(!released_, ag::ERR_BACKWARD_TWICE);
    y = built(grad ? dtype_ : dtype);
    ++state().rebuilt;
  }
  if (grad) {
    Tensor again = y.detach();
    ag::impl::set_gradient_edge(again, {getptr(), 0});
    y = again;
  }
  bool clears = false;
  {
    std::lock_guard<std::mutex> lock(sharing_);
    if (last && consumer.served_in_ != now) {
      consumer.served_in_ = now;
      ++served_;
    }
    if (!grad && !left_.defined()) {
      before = served_ >= tokens_ ? Tensor() : y;
      std::swap(before, shared_);
      clears = shared_.defined();
      if (clears) stream_ = stream_of(y);
    }
  }
  if (clears) clear_at_the_end();
  return as(y, dtype);
}

// A partial backward may never reach the last consumer, but it always reaches its end.
void Room::clear_at_the_end() {
  const int now = task();
  if (now < 0 || callback_.exchange(now) == now) return;
  auto self = getptr();
  ag::Engine::get_default_engine().queue_callback([self] { static_cast<Room*>(self.get())->forget(); });
}

void Room::forget() {
  for (Kept& input : kept())
    if (input.hooked_) input.forget();
  Tensor before;
  std::lock_guard<std::mutex> lock(sharing_);
  std::swap(before, shared_);
}

// Materialises zeros without memory (forward AD, second derivatives) and lazily negated tensors.
static Tensor in_memory(const Tensor& dy) {
  const Tensor y = dy._is_zerotensor() ? dy.clone() : dy;
  return y.is_neg() ? y.resolve_neg() : y;
}

variable_list Room::apply(variable_list&& dys) {
  if (!dys[0].defined()) return variable_list(num_outputs());
  const InMode mode(fake_mode_);
  const Tensor dy = in_memory(dys[0]);
  if (!dy.unsafeGetTensorImpl()->has_storage()) return batched(dy);
  for (Kept& input : kept())
    if (input.hooked_) clear_at_the_end();
  try {
    if (dy._fw_grad(0).defined()) return with_tangents(dy);
    if (at::GradMode::is_enabled()) return differentiable(dy);
    const BelowAutograd below;
    variable_list found = gradients(dy);
    if (fault(kWritesToDy)) dy.zero_();
    if (fault(kGraphCleared)) release_variables();
    return found;
  } catch (const c10::Error& error) {
    throw_explained(getptr(), error);
  }
}

variable_list Room::one(const Tensor& dy) {
  if (at::GradMode::is_enabled()) return differentiable(dy);
  const BelowAutograd below;
  return one_of_many(dy);
}

// Forward AD of backward. Gradients are linear in dy, so their tangents are the gradients of dy's tangent.
variable_list Room::with_tangents(const Tensor& dy) {
  Batch batch(kept());
  variable_list found = one(dy._fw_primal(0));
  const variable_list tangents = one(in_memory(dy._fw_grad(0)));
  for (size_t i = 0; i < found.size(); ++i)
    if (found[i].defined()) found[i] = at::_make_dual(found[i], tangents[i], 0);
  return found;
}

void Room::release_variables() {
  int compiled = kCompiled;  // in compiled autograd, the graph is released before it runs
  if (compiled_.compare_exchange_strong(compiled, kReleasedLater) || fault(kRecipesKept)) return;
  bool waiting;
  {
    std::lock_guard<std::mutex> lock(sharing_);
    waiting = !released_ && tokens_ > (task_ == task() ? served_ : 0) && !left_.defined();
  }
  if (waiting) {
    Tensor y;
    try {
      y = built(dtype_);
    } catch (const c10::Error&) {  // a source was written to: the consumer's backward raises the error
    }
    std::lock_guard<std::mutex> lock(sharing_);
    left_ = y;
  }
  released_ = true;
  hooks_.reset();
  for (Kept& input : kept()) input.release();
}

void Room::release_resources() {
  for (Kept& input : kept()) input.release();  // before the edges, which hold the producers
  [](auto* node) {
    using Base = std::remove_pointer_t<decltype(node)>;
    if constexpr (requires { node->Base::release_resources(); }) node->Base::release_resources();
  }(static_cast<Node*>(this));
}

variable_list Room::batched(const Tensor& dy) {
  pybind11::gil_scoped_acquire gil;
  auto one = py::cpp_function([this](const Tensor& each) {
    variable_list found = this->one(each);
    py::tuple out(found.size());
    for (size_t i = 0; i < found.size(); ++i) out[i] = found[i].defined() ? py::cast(found[i]) : py::none();
    return out;
  });
  Batch batch(kept());
  py::tuple found = py::handle(python().batched)(one, dy);
  variable_list out(found.size());
  for (size_t i = 0; i < out.size(); ++i)
    if (!found[i].is_none()) out[i] = py::cast<Tensor>(found[i]);
  return out;
}

}  // namespace hfnn::node
