// Batch norm, followed by a sum and an activation. hfnn/ops/batch_norm.py describes what is torch's.
#include "../batch_norm.h"

#include <ATen/Context.h>
#include <ATen/Dispatch.h>
#include <ATen/ops/add.h>
#include <ATen/ops/batch_norm.h>
#include <ATen/ops/hardswish.h>
#include <ATen/ops/leaky_relu.h>
#include <ATen/ops/relu.h>
#include <ATen/ops/relu6.h>
#include <ATen/ops/silu.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/python_variable.h>

#include "rooms.h"

namespace hfnn::node {
namespace ag = torch::autograd;

struct BatchNormKernel {
  explicit BatchNormKernel(py::handle module) {
    load(module, "hfnn::BatchNorm", forward, &BatchNorm::forward, "forward");
    load(module, "hfnn::BatchNorm", rebuild, &BatchNorm::rebuild, "rebuild");
    load(module, "hfnn::BatchNorm", backward, &BatchNorm::backward, "backward");
    const auto* functions = functions_of<BatchNorm>(module, "hfnn::BatchNorm");
    partials.load(module, functions ? functions->partials : nullptr);
    whole_bytes = !functions;
  }
  Launch<In, In, In, In, In, In, In, In, In, In, In, double, double, int64_t, double> forward;
  Launch<In, In, In, In, In, In, In, In, int64_t, double> rebuild;
  Launch<In, In, In, In, In, In, In, In, In, In, In, In, bool, int64_t, double> backward;
  Partials<int64_t, int64_t, int64_t> partials;
  bool whole_bytes;  // with channels last, whether each row of flags starts a byte
};

struct BatchNormTable : Table<BatchNormKernel> {
  BatchNormTable(py::object op, py::object second, int64_t piecewise, int64_t least_plane, int64_t least_last,
                 const py::list& floors)
      : Table(std::move(op)),
        second(std::move(second)),
        piecewise(piecewise),
        least_plane(least_plane),
        least_last(least_last) {
    for (py::handle of : floors) apart.emplace_back(py::reinterpret_borrow<py::dict>(of));
  }
  py::object second;        // gradients by differentiable ops
  const int64_t piecewise;  // the last activation that may follow a sum
  const int64_t least_plane, least_last;
  std::vector<Floors> apart;  // for each activation's own room
};

// How kernels see a tensor: (planes, channels, elements of a plane). With channels last, a plane has one element.
struct Layout {
  at::MemoryFormat format = at::MemoryFormat::Contiguous;
  std::array<int64_t, 3> shape;

  explicit Layout(const Tensor& x) {
    const int64_t channels = x.size(1), planes = x.size(0);
    if (is_last(x)) format = x.dim() == 4 ? at::MemoryFormat::ChannelsLast : at::MemoryFormat::ChannelsLast3d;
    shape = last() ? std::array{x.numel() / channels, channels, int64_t(1)}
                   : std::array{planes, channels, x.numel() / (planes * channels)};
  }
  bool last() const { return format != at::MemoryFormat::Contiguous; }
  bool rows() const { return shape[2] == 1; }
  Shaped of(const Tensor& x) const { return {x, shape}; }
  Tensor dense(const Tensor& x) const { return x.defined() ? x.contiguous(format) : x; }

 private:
  // As `suggested` of hfnn/ops/layout.py.
  static bool is_last(const Tensor& x) {
    if (x.is_contiguous() || x.dim() < 4 || x.dim() > 5) return false;
    int64_t least = 0;
    for (int64_t i = 0; i < x.dim(); ++i) {
      const int64_t d = i == 0             ? 1
                        : i + 1 == x.dim() ? 0
                                           : x.dim() - i;  // channels, the last dimension, ..., the batch
      if (x.stride(d) < least || x.stride(d) == 0 || (d == 0 && least == x.stride(1))) return false;
      least = x.stride(d) * x.size(d);
    }
    return true;
  }
};

// The arguments of a call that fits.
struct BatchNormCall {
  const Tensor *x, *running_mean, *running_var, *weight, *bias, *residual;
  bool training;
  double momentum, eps, slope;
  int64_t kind;
};

static ScalarType statistics_dtype(const Tensor& x) {
  return x.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
}

// 1 / sqrt(var + eps), computed in float64.
static Tensor reciprocal(const Tensor& var, double eps, const at::TensorOptions& wide) {
  if (!var.is_cpu() || fake_mode()) return at::add(var.to(at::kDouble), eps).rsqrt_().to(wide);
  Tensor rstd = at::empty(var.sizes(), wide);
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, var.scalar_type(), "batch_norm", [&] {
    const scalar_t* from = var.const_data_ptr<scalar_t>();
    const auto fill = [&](auto* to) {
      for (int64_t i = 0; i < var.numel(); ++i) to[i] = 1 / std::sqrt(double(from[i]) + eps);
    };
    if (rstd.scalar_type() == at::kDouble) {
      fill(rstd.mutable_data_ptr<double>());
    } else {
      fill(rstd.mutable_data_ptr<float>());
    }
  });
  return rstd;
}

struct BatchNormRoom : Room {
  enum { kX, kWeight, kBias, kMean, kRstd, kFlags, kInputs };
  Kept inputs[kInputs];
  BatchNormTable* table;
  const BatchNormKernel* kernel;
  std::optional<Layout> layout;
  std::optional<ScalarType> bias_dtype;
  bool training;
  double momentum, eps, slope;
  int64_t kind;

  std::span<Kept> kept() override { return inputs; }
  std::string name() const override { return "_BatchNormBackward"; }

  Tensor build(ScalarType) override {
    const Tensor x = layout->dense(inputs[kX].part()), none;
    Tensor y = at::empty_like(x);
    kernel->rebuild(x, layout->of(x), inputs[kWeight].get(), inputs[kBias].get(), none, layout->of(y), none,
                    inputs[kMean].get(), inputs[kRstd].get(), kind, slope);
    return y;
  }

  variable_list gradients(const Tensor& given) override {
    const Tensor x = layout->dense(inputs[kX].get()), dy = layout->dense(given);
    const Tensor weight = inputs[kWeight].own(), bias = kind ? inputs[kBias].own() : Tensor();
    const Tensor mean = inputs[kMean].get(), rstd = inputs[kRstd].get(), flags = inputs[kFlags].get();
    const auto& [planes, channels, size] = layout->shape;
    Tensor dx, dweight, dbias, dresidual, partials;
    if (wanted(0)) dx = at::empty_like(x);
    if (wanted(1)) dweight = at::empty_like(weight);
    if (wanted(2)) dbias = at::empty({channels}, x.options().dtype(*bias_dtype));
    if (wanted(3)) dresidual = flags.defined() ? at::empty_like(x) : given;
    if (wanted(1) || wanted(2) || (wanted(0) && training))
      partials = at::empty({2, kernel->partials(planes, channels, size), channels}, mean.options());
    kernel->backward(x, layout->of(dy), layout->of(x), weight, bias, flags, mean, rstd, layout->of(dx),
                     layout->of(flags.defined() ? dresidual : flags), dweight, dbias, partials, training, kind, slope);
    if (wanted(3) && flags.defined() && !dy.is_same(given))
      dresidual = laid(dresidual, result_strides(dresidual, given));
    return {dx, dweight, dbias, dresidual};
  }

  variable_list differentiable(const Tensor& dy) override {
    Tensor x = inputs[kX].get(), weight = inputs[kWeight].own(), bias = kind ? inputs[kBias].own() : Tensor();
    Tensor mean = inputs[kMean].get(), rstd = inputs[kRstd].get(), flags = inputs[kFlags].get(), residual;
    if (flags.defined() && next_edge(3).is_valid()) {
      // Stands for the residual, which is not kept.
      residual = dy.new_empty_strided(dy.sizes(), std::vector<int64_t>(size_t(dy.dim()), 0));
      torch::autograd::impl::set_gradient_edge(residual, next_edge(3));
    }
    pybind11::gil_scoped_acquire gil;
    return differentiated(table->second,
                          py::make_tuple(dy, py::make_tuple(wanted(0), wanted(1), wanted(2), wanted(3)), maybe(x),
                                         maybe(weight), maybe(bias), maybe(mean), maybe(rstd), maybe(flags),
                                         py::make_tuple(training, momentum, eps, kind, slope), layout->last(),
                                         bias_dtype ? dtype_object(*bias_dtype) : py::none(), maybe(residual)));
  }
};

// The numbers of hfnn/ops/batch_norm.py.
enum { kRelu = 1, kLeakyRelu, kRelu6, kSilu, kHardswish };

static bool is_number(PyObject* x) { return PyFloat_CheckExact(x) || PyLong_CheckExact(x); }

// Reads the arguments of `batch_norm` below. False if Python must be asked.
static bool read(const BatchNormTable& table, PyObject* const* args, BatchNormCall& call) {
  const Tensor** tensors[] = {&call.running_mean, &call.running_var, &call.weight, &call.bias};
  for (int i = 0; i < 4; ++i)
    if (!(*tensors[i] = plain_or_none(args[1 + i]))) return false;
  call.residual = plain_or_none(args[8]);
  if (!call.residual || !PyBool_Check(args[5]) || !is_number(args[6]) || !is_number(args[7]) || !is_number(args[10]))
    return false;
  call.training = args[5] == Py_True;
  call.momentum = PyFloat_AsDouble(args[6]);
  call.eps = PyFloat_AsDouble(args[7]);
  call.kind = PyLong_AsLongLong(args[9]);
  call.slope = PyFloat_AsDouble(args[10]);
  if (PyErr_Occurred()) throw python_error();

  const Tensor &x = *call.x, &mean = *call.running_mean, &var = *call.running_var, &residual = *call.residual;
  if (x.dim() < 2 || x.numel() == 0 || mean.defined() != var.defined() || !(mean.defined() || call.training))
    return false;
  if (call.training && (x.numel() == x.size(1) || !(call.eps > 0))) return false;
  const ScalarType like = call.weight->defined() ? call.weight->scalar_type() : x.scalar_type();
  for (const Tensor* t : {&mean, &var, call.weight, call.bias}) {
    const bool statistics = t == &mean || t == &var;
    if (!t->defined()) continue;
    if (t->dim() != 1 || t->size(0) != x.size(1) || !t->is_contiguous() || t->device() != x.device()) return false;
    if (statistics && (t->scalar_type() != like || t->requires_grad())) return false;
  }
  if (!goes_with(x, {call.weight, call.bias})) return false;
  return !residual.defined() || (residual.sizes() == x.sizes() && residual.scalar_type() == x.scalar_type() &&
                                 residual.device() == x.device() && call.kind <= table.piecewise);
}

// torch's own ops, for a call below every room's size limit: called from Python, they would take longer than they run.
// An undefined tensor if Python must call them, because they raise errors or the arguments are not plain tensors.
static Tensor in_torch(const BatchNormTable& table, const Tensor& x, PyObject* const* args, Prefer prefer) {
  const Tensor* given[5];
  const int places[] = {1, 2, 3, 4, 8};
  for (int i = 0; i < 5; ++i)
    if (!(given[i] = plain_or_none(args[places[i]]))) return {};
  const auto& [mean, var, weight, bias, residual] = given;
  if (!PyBool_Check(args[5]) || !is_number(args[6]) || !is_number(args[7]) || !is_number(args[10])) return {};
  const bool training = args[5] == Py_True, sum = residual->defined();
  const int64_t kind = PyLong_AsLongLong(args[9]);
  const double momentum = PyFloat_AsDouble(args[6]), eps = PyFloat_AsDouble(args[7]);
  const double slope = PyFloat_AsDouble(args[10]);
  if (PyErr_Occurred()) throw python_error();
  if (x.dim() < 2 || x.numel() == 0 || (training && x.numel() == x.size(1))) return {};
  if ((kind || sum) && x.numel() >= table.apart.at(size_t(kind)).of(x, prefer)) return {};
  if (sum && (residual->sizes() != x.sizes() || residual->scalar_type() != x.scalar_type())) return {};
  if (sum && residual->device() != x.device()) return {};

  if (x.requires_grad()) keeps_whole(x);
  pybind11::gil_scoped_release no_gil;
  const auto maybe = [](const Tensor& t) { return t.defined() ? std::optional(t) : std::nullopt; };
  Tensor y = at::batch_norm(x, maybe(*weight), maybe(*bias), maybe(*mean), maybe(*var), training, momentum, eps,
                            at::globalContext().userEnabledCuDNN());
  // Nobody else has y, and its node does not keep it, so it may be overwritten if the layout stays the same.
  if (sum) y = y.strides() == residual->strides() && !ambiguous(y) ? y.add_(*residual) : at::add(y, *residual);
  const bool copies = ambiguous(y);
  switch (kind) {
    case kRelu:
      return copies ? at::relu(y) : y.relu_();
    case kLeakyRelu:  // torch has no gradient of it in place for another slope
      return copies || !(slope > 0) ? at::leaky_relu(y, slope) : at::leaky_relu_(y, slope);
    case kRelu6:
      return copies ? at::relu6(y) : at::relu6_(y);
    case kSilu:
      return at::silu(y);
    case kHardswish:
      return at::hardswish(y);
    default:
      return y;
  }
}

// Whether such a call is left to torch although a kernel exists. prefer: as given by Python.
static bool is_torchs(const BatchNormTable& table, const BatchNormKernel& kernel, const BatchNormCall& call,
                      const Layout& layout, Prefer prefer) {
  const Tensor& x = *call.x;
  if (ambiguous(x)) return true;  // the layouts of torch's result and gradient depend on more
  if (on_gpu(x) && !call.training && layout.last() && x.requires_grad()) return true;
  // torch asks cuDNN only with weight and bias; its own kernel keeps the order of x's dimensions.
  const bool affine = call.weight->defined() && call.bias->defined();
  if (on_gpu(x) && !affine && !x.is_contiguous(layout.format)) return true;
  if (!call.residual->defined()) return false;
  if (call.kind && x.size(1) % 8 && kernel.whole_bytes && layout.rows()) return true;
  if (on_gpu(x) || prefer == kMemory || forced) return false;
  if (layout.last()) return x.numel() < table.least_last;
  return layout.shape[2] < table.least_plane || x.element_size() == 2;
}

// (input, running_mean, running_var, weight, bias, training, momentum, eps, residual, kind, slope, prefer)
static PyObject* batch_norm(PyObject* self, PyObject* const* args, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  auto& table = table_of<BatchNormTable>(self);
  BatchNormCall call;
  call.x = plain(args[0]);
  if (!table.worth(call.x, args[count - 1])) {
    if (!plain_context()) Py_RETURN_NONE;
    const Tensor y = in_torch(table, *call.x, args, prefer_of(args[count - 1]));
    if (!y.defined()) Py_RETURN_NONE;
    return THPVariable_Wrap(y);
  }
  if (!call.x || !plain_context() || !read(table, args, call)) Py_RETURN_NOTIMPLEMENTED;
  const Tensor& x = *call.x;
  BatchNormKernel* kernel = table.choose(x, x.scalar_type(), 1, x.scalar_type());
  if (!kernel) Py_RETURN_NOTIMPLEMENTED;
  const Layout layout(x);
  if (is_torchs(table, *kernel, call, layout, prefer_of(args[count - 1]))) Py_RETURN_NOTIMPLEMENTED;

  const bool grad = ag::compute_requires_grad(x, *call.weight, *call.bias, *call.residual);
  const bool flagged = grad && call.residual->defined() && call.kind;
  const auto& [planes, channels, size] = layout.shape;
  Tensor y, mean, rstd, flags;
  {
    pybind11::gil_scoped_release no_gil;
    const BelowAutograd below;
    const Tensor dense = layout.dense(x), residual = layout.dense(*call.residual);
    y = at::empty_like(dense);
    if (flagged) {
      const auto bytes = x.options().dtype(at::kByte);
      flags = layout.rows() ? at::empty({(x.numel() + 7) / 8}, bytes)
                            : at::empty({planes, channels, (size + 7) / 8}, bytes);
    }
    const auto wide = x.options().dtype(statistics_dtype(x));
    if (call.training) {
      const Tensor both = at::empty({2, channels}, wide);
      mean = both.select(0, 0);
      rstd = both.select(0, 1);
      const Tensor partials = at::empty({3, kernel->partials(planes, channels, size), channels}, wide);
      kernel->forward(dense, layout.of(dense), *call.weight, *call.bias, layout.of(residual), layout.of(y), flags, mean,
                      rstd, *call.running_mean, *call.running_var, partials, FreshReal{call.momentum}, call.eps,
                      call.kind, call.slope);
    } else {
      // Copies, so that changes to the running statistics before backward do not affect this call.
      mean = call.running_mean->to(wide, false, true);
      rstd = reciprocal(*call.running_var, call.eps, wide);
      kernel->rebuild(dense, layout.of(dense), *call.weight, *call.bias, layout.of(residual), layout.of(y), flags, mean,
                      rstd, call.kind, call.slope);
    }
  }
  if (grad) {
    auto node = make_node<BatchNormRoom>();
    node->inputs[BatchNormRoom::kX].take_or_save(x);
    keep_parameter(node->inputs[BatchNormRoom::kWeight], *call.weight, is_source(args[3]), &Kept::save);
    // Without an activation, only rebuilding y reads the bias, so it may be written to before backward.
    Kept& bias = node->inputs[BatchNormRoom::kBias];
    if (call.kind) {
      keep_parameter(bias, *call.bias, is_source(args[4]), &Kept::save);
    } else if (!call.residual->defined()) {
      keep_parameter(bias, *call.bias, is_source(args[4]), &Kept::hold);
    }
    node->inputs[BatchNormRoom::kMean].save(mean, true);
    node->inputs[BatchNormRoom::kRstd].save(rstd, true);
    if (fault(kFlagsTurned) && flags.defined()) flags.bitwise_not_();
    node->inputs[BatchNormRoom::kFlags].save(flags, true);
    node->table = &table;
    node->module = table.chosen;
    node->kernel = kernel;
    node->layout = layout;
    if (call.bias->defined()) node->bias_dtype = call.bias->scalar_type();
    node->training = call.training;
    node->momentum = call.momentum;
    node->eps = call.eps;
    node->slope = call.slope;
    node->kind = call.kind;
    node->finish(node, y, ag::collect_next_edges(x, *call.weight, *call.bias, *call.residual),
                 !call.residual->defined());
  }
  return THPVariable_Wrap(y);
  END_HANDLE_TH_ERRORS
}

void bind_batch_norm(py::module_& m) {
  static PyMethodDef method = fast_method("batch_norm", batch_norm);
  m.def("batch_norm",
        [](py::object op, py::object second, int64_t piecewise, int64_t plane, int64_t last, const py::list& floors) {
          return bound(&method, new BatchNormTable(std::move(op), std::move(second), piecewise, plane, last, floors));
        });
}

}  // namespace hfnn::node
