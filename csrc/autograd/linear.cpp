// Linear maps that keep a recipe of their input. hfnn/ops/linear.py describes what is torch's.
#include <ATen/TensorUtils.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/ones.h>
#include <ATen/record_function.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/python_variable.h>

#include "rooms.h"

namespace hfnn::node {
namespace ag = torch::autograd;

struct LinearTable {
  explicit LinearTable(py::dict floors) {
    const char* names[kPrefers] = {"auto", "memory", "speed"};
    for (int i = 0; i < kPrefers; ++i) {
      const double floor = py::cast<double>(floors[names[i]]);
      this->floors[i] = floor > 1e18 ? std::numeric_limits<int64_t>::max() : int64_t(floor);
    }
  }
  int64_t floors[kPrefers];  // under autocast: elements from which not keeping casts pays
};

static Tensor rows(const Tensor& x) { return x.dim() > 1 ? x.flatten(0, -2) : x.unsqueeze(0); }
static Tensor product(const Tensor& x, const Tensor& weight, const Tensor& bias, ScalarType dtype) {
  c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  return at::linear(as(x, dtype), as(weight, dtype), as(bias, dtype));
}

// a b + beta * out, in the dtype of out. 16-bit operands give no intermediate 16-bit result.
static void product_into(Tensor& out, const Tensor& a, const Tensor& b, double beta) {
  if (out.scalar_type() == a.scalar_type() || !a.is_cuda()) {
    at::addmm_out(out, out, as(a, out.scalar_type()), as(b, out.scalar_type()), beta);
  } else {
    at::addmm_out(out, out, a, b, out.scalar_type(), beta);
  }
}
static Tensor product_as(const Tensor& a, const Tensor& b, ScalarType dtype) {
  if (a.scalar_type() == dtype) return at::mm(a, b);
  return a.is_cuda() ? at::mm(a, b, dtype) : at::mm(as(a, dtype), as(b, dtype));
}

// Rows of ones, never freed, because a recorded graph may read them. Undefined while a graph is being recorded.
static Tensor ones(const Tensor& like, ScalarType dtype, int64_t count) {
  static auto& made = *new std::vector<Tensor>;  // under the GIL; never destroyed, because the GPU runtime ends first
  for (const Tensor& row : made)
    if (row.size(1) >= count && row.scalar_type() == dtype && row.device() == like.device()) return row;
  if (capturing(like) || fake_mode()) return {};
  return made.emplace_back(at::ones({1, 2 * count}, like.options().dtype(dtype)));
}

// The gradient, accumulated in this backward, of an input that several products read. The engine holds it.
struct Sum {
  WeakTensor total{Tensor().getIntrusivePtr()};
  const Node* producer = nullptr;
  uint32_t output = 0;
  int task = -1;
  std::optional<c10::Stream> stream;
};

namespace {
struct LastCast {
  WeakTensor x{Tensor().getIntrusivePtr()}, low{Tensor().getIntrusivePtr()};
  uint32_t version = 0;
};
}  // namespace

Tensor shared_cast(const Tensor& x, ScalarType dtype) {
  if (x.scalar_type() == dtype) return x;
  if (!graph_of(x)) return x.to(dtype);
  static thread_local LastCast last;
  if (last.x._unsafe_get_target() == x.unsafeGetTensorImpl() && (last.version == x._version() || fault(kStaleCast))) {
    auto low = last.low.lock();
    if (low && c10::typeMetaToScalarType(low->dtype()) == dtype) return Tensor(std::move(low));
  }
  Tensor low = x.to(dtype);
  last = {WeakTensor(x.getIntrusivePtr()), WeakTensor(low.getIntrusivePtr()), uint32_t(x._version())};
  return low;
}

bool in_checkpoint() {
  const auto hooks = at::SavedTensorDefaultHooks::get_hooks(true);
  if (!hooks) return false;
  auto module = THPObjectPtr(PyObject_GetAttrString(hooks->first.ptr(getPyInterpreter()), "__module__"));
  if (!module) PyErr_Clear();
  return module && PyUnicode_Check(module.get()) &&
         PyUnicode_CompareWithASCIIString(module.get(), "torch.utils.checkpoint") == 0;
}

void Kept::refer(const Tensor& weight) {
  using Hooks = at::SavedTensorDefaultHooks;
  if (in_checkpoint()) return save(weight, true);
  struct Restored {
    at::impl::SavedTensorDefaultHooksTLS now = Hooks::get_tls_state();
    ~Restored() { Hooks::set_tls_state(now); }
  } restored;
  Hooks::set_tls_state({});
  save(weight, true);
}

Tensor unpacked_weight(Kept& weight, ScalarType dtype, const char* module) {
  try {
    return weight.get();
  } catch (const c10::Error& error) {
    const std::string text = error.what_without_backtrace();
    if (dtype == at::kFloat || text.find("modified by an inplace operation") == std::string::npos) throw;
    TORCH_CHECK(
        false, text, "\nUnder autocast ", module,
        " keeps its weight, where torch keeps a 16-bit copy: call backward before the weight is written to (an "
        "optimizer's step, load_state_dict), or leave this module to torch with hfnn.convert(model, skip=...).");
  }
}

namespace {
// Whether a dispatch mode may read values: it must see every op, and see it once. Needs the GIL.
bool watching() {
  if (!c10::impl::TorchDispatchModeTLS::any_modes_set(true)) return false;
  auto answer = THPObjectPtr(PyObject_CallNoArgs(python().watched));
  if (!answer) throw python_error();
  return answer.get() == Py_True;
}
}  // namespace

struct LinearRoom : Room {
  Kept inputs[3];  // x, weight (out, in), with recompute also the bias
  ScalarType dtype;
  ScalarType of[3];  // the dtypes in which products give the gradients of x, weight, bias
  Tensor row_of_ones;
  int64_t width;
  bool by_rows, by_columns;  // layouts of the weight and of x

  std::span<Kept> kept() override { return inputs; }
  std::string name() const override { return "_LinearBackward"; }

  Tensor build(ScalarType) override {
    const Tensor x = inputs[0].part(dtype), weight = inputs[1].get(), bias = inputs[2].get();
    // torch has no such product, so no counter of FLOPs may see it.
    at::RecordFunctionGuard records(at::isRecordFunctionEnabled() && !profiles_flops());
    const WithoutModes unseen;
    return product(x, weight, bias, dtype);
  }

  variable_list gradients(const Tensor& dy) override { return gradients(dy, of, true); }

  variable_list one_of_many(const Tensor& dy) override { return gradients(dy, of, false); }

  // Every op is torch's own and differentiable.
  variable_list differentiable(const Tensor& dy) override {
    const ScalarType low[] = {dtype, dtype, dtype};
    return gradients(dy, low, false);
  }

 private:
  variable_list gradients(const Tensor& dy, const ScalarType (&of)[3], bool adds_up) {
    const Tensor dy_RO = rows(dy);
    Tensor dx, dweight, dbias;
    if (wanted(1)) {  // first, so that what is rebuilt for it is freed before dx is allocated
      const Tensor x_RI = rows(as(inputs[0].get(dtype), dtype));
      dweight = by_rows ? product_as(dy_RO.t(), x_RI, of[1]) : product_as(x_RI.t(), dy_RO, of[1]).t();
    }
    if (wanted(0)) {
      const Tensor weight = as(unpacked_weight(inputs[1], dtype, "hfnn.Linear"), dtype);
      auto shape = dy.sizes().vec();
      shape.back() = width;
      if (by_columns) {
        dx = product_as(weight.t(), dy_RO.t(), of[0]).t().view(shape);
      } else if (of[0] != dtype && adds_up) {
        dx = added_up(dy_RO, weight, shape);
      } else {
        dx = product_as(dy_RO, weight, of[0]).view(shape);
      }
    }
    if (next_edges().size() > 2 && wanted(2)) {
      dbias = row_of_ones.defined() && adds_up && dy_RO.is_contiguous()
                  ? product_as(row_of_ones.narrow(1, 0, dy_RO.size(0)), dy_RO, of[2]).squeeze(0)
                  : dy_RO.sum(0);
    }
    variable_list grads{dx, dweight, dbias};
    grads.resize(next_edges().size());
    return grads;
  }

  // dy W, or an undefined tensor if the product was added to the gradient of x that another room returned, which waits
  // in the engine. If nobody else holds that gradient, the engine has not replaced it.
  Tensor added_up(const Tensor& dy_RO, const Tensor& weight, at::IntArrayRef shape) {
    thread_local std::array<Sum, 4> sums;
    thread_local size_t next = 0;
    const auto& edge = next_edge(0);
    const int task = torch::autograd::get_current_graph_task_id();
    const bool may = task >= 0 && post_hooks().empty();
    for (Sum& sum : sums) {
      if (!may || sum.task != task || sum.producer != edge.function.get() || sum.output != edge.input_nr) continue;
      Tensor total(sum.total.lock());
      if (!total.defined() || total.use_count() != 2 || total.sizes() != shape || sum.stream != stream()) continue;
      Tensor total_RI = rows(total);
      product_into(total_RI, dy_RO, weight, 1);
      return {};
    }
    Tensor dx = at::empty(shape, dy_RO.options().dtype(of[0]));
    Tensor dx_RI = rows(dx);
    product_into(dx_RI, dy_RO, weight, 0);
    if (may)
      sums[next++ % sums.size()] = {WeakTensor(dx.getIntrusivePtr()), edge.function.get(), edge.input_nr, task,
                                    stream()};
    return dx;
  }
};

// torch's op on plain tensors. Calling it from here is faster than from Python. None for other tensors.
static PyObject* of_torch(const Tensor* x, PyObject* const* args) {
  const Tensor *weight = plain(args[1]), *bias = plain_or_none(args[2]);
  if (!x || !weight || !bias || !plain_context()) Py_RETURN_NONE;
  const bool turned = args[5] != Py_False;
  if (turned && (!bias->defined() || weight->dim() != 2 || x->dim() == 0 || !PyLong_Check(args[5]) ||
                 weight->size(1) != PyLong_AsLongLong(args[5])))
    Py_RETURN_NONE;
  Tensor y;
  if (at::GradMode::is_enabled() && weight->requires_grad()) keeps_whole(*x);
  {
    pybind11::gil_scoped_release no_gil;
    if (turned) {  // the ops of transformers' Conv1D
      auto sizes = x->sizes().vec();
      sizes.back() = weight->size(1);
      y = at::addmm(*bias, x->view({-1, x->size(-1)}), *weight).view(sizes);
    } else {
      y = at::linear(*x, *weight, bias->defined() ? std::optional(*bias) : std::nullopt);
    }
  }
  return THPVariable_Wrap(y);
}

// (input, weight, bias, recompute, prefer, columns, exact, whole, casts): columns: False, or `out` for a weight (in,
// out). whole: calls torch's op if there is nothing to gain. casts: the module casts weight and bias to x's dtype.
static PyObject* linear(PyObject* self, PyObject* const* args, Py_ssize_t) {
  HANDLE_TH_ERRORS
  auto& table = table_of<LinearTable>(self);
  const Tensor* x = plain(args[0]);
  const auto nothing = [&] { return args[7] == Py_True ? of_torch(x, args) : Py_NewRef(Py_None); };
  if (!at::GradMode::is_enabled()) return nothing();
  const Prefer prefer = prefer_of(args[4]);
  if (!x || prefer == kPrefers) Py_RETURN_NOTIMPLEMENTED;
  // All that a call costs if there is nothing to gain.
  if (args[3] != Py_True && !Kept::takes(*x) &&
      !((args[8] == Py_True || at::autocast::is_autocast_enabled(x->device().type())) &&
        x->numel() >= table.floors[prefer]))
    return nothing();
  const Tensor *given = plain(args[1]), *bias = plain_or_none(args[2]);
  const bool turned = args[5] != Py_False;
  if (!given || !bias || given->dim() != 2 || x->dim() == 0 || x->size(-1) != given->size(turned ? 0 : 1) ||
      !plain_context())
    Py_RETURN_NOTIMPLEMENTED;
  if (turned) {  // Conv1D's view may raise an error
    const int64_t width = x->size(-1), sizes[] = {width ? x->numel() / width : 0, width};
    if (!width || !at::detail::computeStride(x->sizes(), x->strides(), at::IntArrayRef(sizes))) Py_RETURN_NONE;
  }
  const auto device = x->device();
  const bool autocast = at::autocast::is_autocast_enabled(device.type());
  const ScalarType dtype = autocast ? at::autocast::get_autocast_dtype(device.type()) : x->scalar_type();
  bool casts = false;
  for (const Tensor* t : {x, given, bias}) {
    if (!t->defined()) continue;
    if (!at::isFloatingType(t->scalar_type()) || t->device() != device || (autocast && t->scalar_type() == at::kDouble))
      Py_RETURN_NONE;  // torch's op raises an error, or works in float64, which autocast leaves alone
    casts = casts || t->scalar_type() != dtype;
  }
  // Else torch's op raises an error, or the module and autocast round to different dtypes.
  const bool own = args[8] == Py_True;
  if (casts && (autocast ? own && x->scalar_type() != dtype && x->scalar_type() != at::kFloat : !own)) Py_RETURN_NONE;
  // Only if x is in the graph. A weight that may be resharded would have to be copied.
  const bool recompute = args[3] == Py_True && x->requires_grad() && !sharded_parameters() && !watching();
  const bool to_weight = given->requires_grad();
  const bool grad = x->requires_grad() || to_weight || (bias->defined() && bias->requires_grad());
  auto node = grad ? make_node<LinearRoom>() : nullptr;
  const bool taken = grad && (to_weight || recompute) && node->inputs[0].take(*x);
  const bool worth = casts && (x->requires_grad() || to_weight) && x->numel() >= table.floors[prefer];
  if (!grad || (!taken && !worth && !recompute)) return nothing();

  const Tensor low = taken ? Tensor() : shared_cast(*x, dtype);
  const Tensor lasts = lasting(*given, args[1], dtype);
  given = &lasts;
  const Tensor weight = turned ? given->t() : *given;
  const auto save = [&] {
    if (!taken && (to_weight || recompute)) node->inputs[0].save(recompute ? *x : low);
    if (x->requires_grad() || recompute) {
      Kept& kept = node->inputs[1];
      weight.scalar_type() == dtype ? kept.save(weight, is_source(args[1])) : kept.refer(weight);
    }
    if (recompute) node->inputs[2].save(*bias, is_source(args[2]));
  };
  // A checkpoint's second forward ends at the last tensor that is saved: as in torch, before the product, which a
  // profiler counts nevertheless.
  const bool late = profiles_flops();
  if (!late) save();
  Tensor y;
  bool by_columns;
  {
    pybind11::gil_scoped_release no_gil;
    const BelowAutograd below;
    const Tensor x_low = taken ? as(*x, dtype) : low;
    by_columns = !x_low.is_contiguous() && x_low.size(-1) > 1 && rows(x_low).stride(0) == 1;
    y = product(x_low, weight, *bias, dtype);
  }
  if (late) save();
  node->dtype = dtype;
  // Only the size decides, not whether a recipe was taken: no bit of a gradient may depend on that.
  const bool wide = worth && autocast && args[6] != Py_True && (on_gpu(*x) || state().wide_on_cpu);
  const Tensor* leaves[] = {x, given, bias};
  for (int i = 0; i < 3; ++i)
    node->of[i] = wide && leaves[i]->defined() && leaves[i]->scalar_type() == at::kFloat ? at::kFloat : dtype;
  if (node->of[2] != dtype && bias->requires_grad() && y.numel()) node->row_of_ones = ones(*x, dtype, rows(y).size(0));
  node->width = x->size(-1);
  node->by_rows = weight.stride(0) == weight.size(1) && weight.stride(1) == 1;
  node->by_columns = by_columns;
  auto edges = bias->defined() ? ag::collect_next_edges(*x, weight, *bias) : ag::collect_next_edges(*x, weight);
  node->finish(node, y, std::move(edges), recompute);
  return THPVariable_Wrap(y);
  END_HANDLE_TH_ERRORS
}

void bind_linear(py::module_& m) {
  static PyMethodDef method = fast_method("linear", linear);
  m.def("linear", [](py::dict floors) { return bound(&method, new LinearTable(std::move(floors))); });
}

}  // namespace hfnn::node
