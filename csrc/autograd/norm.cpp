// Layer norm and RMS norm. See hfnn/ops/layer_norm.py, hfnn/ops/rms_norm.py.
#include <torch/csrc/DynamicTypes.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/python_variable.h>

#include "../add_norm.h"
#include "../layer_norm.h"
#include "../rms_norm.h"
#include "rooms.h"

namespace hfnn::node {
namespace ag = torch::autograd;

// Both norms as one. Without a centre (RMS norm) there is no bias or mean, and the weight has an offset.
struct NormKernel {
  explicit NormKernel(py::handle module, bool centre) : centre(centre) {
    if (centre) {
      load(module, "hfnn::LayerNorm", layer_forward_, &LayerNorm::forward, "forward");
      load(module, "hfnn::LayerNorm", layer_rebuild_, &LayerNorm::rebuild, "rebuild");
      load(module, "hfnn::LayerNorm", layer_backward_, &LayerNorm::backward, "backward");
      load(module, "hfnn::AddLayerNorm", layer_add_, &AddLayerNorm::add, "add", "add_functions");
      const auto* functions = functions_of<LayerNorm>(module, "hfnn::LayerNorm");
      partials.load(module, functions ? functions->partials : nullptr);
    } else {
      load(module, "hfnn::RmsNorm", rms_forward_, &RmsNorm::forward, "forward");
      load(module, "hfnn::RmsNorm", rms_rebuild_, &RmsNorm::rebuild, "rebuild");
      load(module, "hfnn::RmsNorm", rms_backward_, &RmsNorm::backward, "backward");
      load(module, "hfnn::AddRmsNorm", rms_add_, &AddRmsNorm::add, "add", "add_functions");
      const auto* functions = functions_of<RmsNorm>(module, "hfnn::RmsNorm");
      partials.load(module, functions ? functions->partials : nullptr);
    }
  }

  void forward(const Tensor& x, const Tensor& w, const Tensor& b, const Tensor& y, const Tensor& mean,
               const Tensor& rstd, double eps, double offset) const {
    if (centre) return layer_forward_(x, x, w, b, y, mean, rstd, eps);
    rms_forward_(x, x, w, y, rstd, eps, offset);
  }
  void rebuild(const Tensor& x, const Tensor& w, const Tensor& b, const Tensor& mean, const Tensor& rstd,
               const Tensor& y, double offset) const {
    if (centre) return layer_rebuild_(x, x, w, b, mean, rstd, y);
    rms_rebuild_(x, x, w, rstd, y, offset);
  }
  void backward(const Tensor& dy, const Tensor& x, const Tensor& w, const Tensor& mean, const Tensor& rstd,
                const Tensor& dx, const Tensor& dw, const Tensor& db, const Tensor& partials, double offset) const {
    if (centre) return layer_backward_(x, dy, x, w, mean, rstd, dx, dw, db, partials);
    rms_backward_(x, dy, x, w, rstd, dx, dw, partials, offset);
  }
  // Like forward, but first computes its input as a sum with dropout.
  void add(const Tensor& x, const Tensor& residual, const Tensor& sum, const Tensor& w, const Tensor& b,
           const Tensor& y, const Tensor& mean, const Tensor& rstd, double eps, double offset, const Mask& m) const {
    if (centre)
      return layer_add_(x, x, residual, sum, w, b, y, mean, rstd, eps, m.threshold, m.scale, m.seed, m.offset, m.pair);
    rms_add_(x, x, residual, sum, w, y, rstd, eps, offset, m.threshold, m.scale, m.seed, m.offset, m.pair);
  }

  const bool centre;
  Partials<int64_t, int64_t> partials;

 private:
  Launch<In, In, In, In, In, In, In, In, double, int64_t, double, int64_t, int64_t, In> layer_add_;
  Launch<In, In, In, In, In, In, double, double, int64_t, double, int64_t, int64_t, In> rms_add_;
  Launch<In, In, In, In, In, In, double> layer_forward_;
  Launch<In, In, In, In, In, In> layer_rebuild_;
  Launch<In, In, In, In, In, In, In, In, In> layer_backward_;
  Launch<In, In, In, In, double, double> rms_forward_;
  Launch<In, In, In, In, double> rms_rebuild_;
  Launch<In, In, In, In, In, In, In, double> rms_backward_;
};

struct NormTable : Table<NormKernel> {
  NormTable(py::object op, py::object second, bool centre)
      : Table(std::move(op)), second(std::move(second)), centre(centre) {}
  NormTable(NormTable&&) = default;
  NormKernel* make(py::handle module) override { return new NormKernel(module, centre); }
  py::object second;  // gradients of (dy, needs, x, weight, bias, dims, eps, offset) by differentiable ops
  const bool centre;
};

static Tensor rows(const Tensor& x, int64_t cols) { return x.contiguous().view({-1, cols}); }
static Tensor flat(const Tensor& p) { return p.defined() && p.dim() != 1 ? p.view(-1) : p; }

struct NormRoom : Room {
  Kept inputs[5];  // x, weight, bias, mean, rstd
  NormTable* table;
  const NormKernel* kernel;
  double eps, offset;
  int64_t dims, cols;

  std::span<Kept> kept() override { return inputs; }
  std::string name() const override { return table->centre ? "_LayerNormBackward" : "_RMSNormBackward"; }

  Tensor build(ScalarType dtype) override {
    const Tensor x = inputs[0].part(), x_RC = rows(x, cols);
    Tensor y = like(x_RC, into(x, dtype));
    kernel->rebuild(x_RC, flat(inputs[1].get()), flat(inputs[2].get()), inputs[3].get(), inputs[4].get(), y, offset);
    return y.view(x.sizes());
  }

  variable_list gradients(const Tensor& dy) override {
    const bool to_x = wanted(0), to_weight = wanted(1), to_bias = wanted(2);
    const Tensor x = inputs[0].get(), bias = inputs[2].own(), rstd = inputs[4].get();
    const Tensor weight = inputs[1].held() ? inputs[1].stored() : inputs[1].own();
    const Tensor x_RC = rows(x, cols), dy_RC = rows(dy, cols);
    Tensor dx, dweight, dbias, partials;
    if (to_x) dx = like(x_RC, x_RC.scalar_type());
    if (to_weight) dweight = at::empty_like(weight);
    if (to_bias) dbias = at::empty_like(bias);
    if (to_weight || to_bias)
      partials = at::empty({table->centre ? 2 : 1, kernel->partials(x_RC.size(0), cols), cols}, rstd.options());
    kernel->backward(dy_RC, x_RC, flat(weight), inputs[3].get(), rstd, dx, flat(dweight), flat(dbias), partials,
                     offset);
    if (to_x) dx = table->centre ? dx.view(x.sizes()) : like_dy(dx.view(x.sizes()), dy);
    if (to_x && !table->centre && cols > 1 && !on_gpu(dy) && ambiguous(dy)) dx = laid(dx, broadcast_strides(dy));
    if (fault(kWrongInput) && to_weight && to_bias) dbias = dweight;
    return {dx, dweight, dbias};
  }

  variable_list differentiable(const Tensor& dy) override {
    Tensor x = inputs[0].get(), weight = inputs[1].own(), bias = inputs[2].own();
    pybind11::gil_scoped_acquire gil;
    return differentiated(table->second, py::make_tuple(dy, py::make_tuple(wanted(0), wanted(1), wanted(2)), maybe(x),
                                                        maybe(weight), maybe(bias), dims, eps, offset));
  }
};

// The arguments of a call that fits.
struct NormCall {
  const Tensor *weight, *bias;
  bool parameters[2];  // whether weight, bias are sources
  int64_t dims = 1, cols;
  double eps, offset;
  ScalarType out;
};

// Reads normalized_shape (None: the last dimension), weight, bias, eps and offset. False if Python must be asked.
static bool read(const NormTable& table, const Tensor& x, PyObject* const* args, NormCall& call) {
  call.weight = plain_or_none(args[1]);
  call.bias = plain_or_none(args[2]);
  if (!call.weight || !call.bias || !(PyFloat_Check(args[3]) || PyLong_Check(args[3]) || args[3] == Py_None))
    return false;
  if (args[0] != Py_None) {
    if (!PyTuple_Check(args[0]) && !PyList_Check(args[0])) return false;
    call.dims = PySequence_Fast_GET_SIZE(args[0]);
    if (call.dims < 1 || call.dims > x.dim()) return false;
    for (int64_t i = 0; i < call.dims; ++i) {
      PyObject* size = PySequence_Fast_GET_ITEM(args[0], i);
      if (!PyLong_Check(size) || PyLong_AsLongLong(size) != x.size(x.dim() - call.dims + i)) return false;
    }
  } else if (x.dim() < 1 || !in_rows(x)) {
    return false;
  }
  const auto shape = x.sizes().slice(x.dim() - call.dims);
  call.cols = c10::multiply_integers(shape);
  // For images, torch's result may be channels-last.
  if (call.cols == 0 || (!table.centre && x.dim() > 3 && !in_rows(x))) return false;
  for (const Tensor* p : {call.weight, call.bias})
    if (p->defined() && (p->sizes() != shape || !p->is_contiguous())) return false;
  if (!goes_with(x, {call.weight, call.bias})) return false;
  const double least =
      x.scalar_type() == at::kDouble ? std::numeric_limits<double>::epsilon() : std::numeric_limits<float>::epsilon();
  call.eps = args[3] == Py_None ? least : PyFloat_AsDouble(args[3]);
  call.offset = PyFloat_AsDouble(args[4]);
  call.parameters[0] = is_source(args[1]);
  call.parameters[1] = is_source(args[2]);
  return true;
}

// The norm of x, computed by forward(x_RC, weight, bias, y_RC, mean, rstd).
template <class Forward>
static Tensor normed(NormTable& table, const NormKernel* kernel, const Tensor& x, const NormCall& call,
                     Forward forward) {
  const bool grad = ag::compute_requires_grad(x, *call.weight, *call.bias);
  auto node = grad ? make_node<NormRoom>() : nullptr;
  const bool taken = grad && node->inputs[0].take(x);
  Tensor y, mean, rstd;
  {
    pybind11::gil_scoped_release no_gil;
    const BelowAutograd below;
    const Tensor x_RC = rows(x, call.cols);
    y = at::empty(x.sizes(), x.options().dtype(call.out));
    const auto wide = x.options().dtype(x.scalar_type() == at::kDouble ? at::kDouble : at::kFloat);
    if (table.centre) mean = at::empty({x_RC.size(0)}, wide);
    rstd = at::empty({x_RC.size(0)}, wide);
    forward(x_RC, flat(*call.weight), flat(*call.bias), y.view(x_RC.sizes()), mean, rstd);
  }
  if (grad) {
    node->table = &table;
    node->module = table.chosen;
    node->kernel = kernel;
    node->eps = call.eps;
    node->offset = call.offset;
    node->dims = call.dims;
    node->cols = call.cols;
    if (!taken) node->inputs[0].save(x);  // after `forward` has filled a sum, because a hook may copy it
    // Written as element-wise ops, an RMS norm saves the weight for x's gradient only.
    const bool saves = table.centre || x.requires_grad();
    keep_parameter(node->inputs[1], *call.weight, call.parameters[0], saves ? &Kept::save : &Kept::hold);
    keep_parameter(node->inputs[2], *call.bias, call.parameters[1], &Kept::save);
    node->inputs[3].save(mean, true);
    node->inputs[4].save(rstd, true);
    node->finish(node, y, ag::collect_next_edges(x, *call.weight, *call.bias), true);
  }
  return y;
}

// (input, normalized_shape or None, weight, bias, eps, offset, out or None for torch's dtype, prefer)
static PyObject* norm(PyObject* self, PyObject* const* args, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  auto& table = table_of<NormTable>(self);
  const Tensor* x = plain(args[0]);
  if (!table.worth(x, args[count - 1])) Py_RETURN_NONE;
  NormCall call;
  if (!x || !plain_context() || !read(table, *x, args + 1, call)) Py_RETURN_NOTIMPLEMENTED;
  call.out = args[6] == Py_None ? table.out_dtype(*x, args[0]) : scalar_type(args[6]);
  const NormKernel* kernel = table.choose(*x, x->scalar_type(), call.cols, call.out);
  if (!kernel) Py_RETURN_NOTIMPLEMENTED;
  // Results of elementwise ops, such as torch's RMS norm, then have other strides.
  if ((!table.centre || args[1] == Py_None) && ambiguous(*x)) Py_RETURN_NONE;
  return THPVariable_Wrap(normed(table, kernel, *x, call,
                                 [&](const auto&... tensors) { kernel->forward(tensors..., call.eps, call.offset); }));
  END_HANDLE_TH_ERRORS
}

struct AddNormTable {
  NormTable fused;
  NormTable& norm;        // for the dtype of torch's result
  DropoutTable& dropout;  // for the mask's backward
};

// (input, residual, normalized_shape, weight, bias, eps, offset, p, prefer). Returns the norm of the sum, and the sum.
static PyObject* add_norm(PyObject* self, PyObject* const* args, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  auto& table = table_of<AddNormTable>(self);
  const Tensor *x = plain(args[0]), *residual = plain(args[1]);
  if (!table.fused.worth(residual, args[count - 1])) Py_RETURN_NONE;
  NormCall call;
  if (!x || !residual || !PyFloat_Check(args[7]) || !plain_context() || !read(table.fused, *residual, args + 2, call))
    Py_RETURN_NOTIMPLEMENTED;
  const double p = PyFloat_AS_DOUBLE(args[7]);
  if (!(p >= 0 && p < 1) || !addable(*x, *residual)) Py_RETURN_NOTIMPLEMENTED;
  const ScalarType dtype = residual->scalar_type();
  call.out = table.norm.out_dtype(*residual, args[1]);
  const NormKernel* kernel = table.fused.choose(*residual, dtype, call.cols, call.out);
  const DropoutKernel* masks = p > 0 ? table.dropout.choose(*x, x->scalar_type(), 1, dtype) : nullptr;
  if (!kernel || (p > 0 && !masks)) Py_RETURN_NOTIMPLEMENTED;

  const Mask mask = p > 0 ? Mask(*x, p) : Mask();
  Tensor total;
  {
    const BelowAutograd below;
    total = at::empty(residual->sizes(), residual->options());
  }
  finish_sum(total, *x, *residual, masks, mask, table.fused.chosen);
  const Tensor y = normed(table.fused, kernel, total, call, [&](const Tensor& sum_RC, const auto&... tensors) {
    kernel->add(x->contiguous().view(sum_RC.sizes()), residual->contiguous().view(sum_RC.sizes()), sum_RC, tensors...,
                call.eps, call.offset, mask);
  });
  return py::make_tuple(y, total).release().ptr();
  END_HANDLE_TH_ERRORS
}

void bind_norm(py::module_& m) {
  static PyMethodDef method = fast_method("norm", norm);
  m.def("norm", [](py::object op, py::object second, bool centre) {
    return bound(&method, new NormTable(std::move(op), std::move(second), centre));
  });
  static PyMethodDef add = fast_method("add_norm", add_norm);
  m.def("add_norm", [](py::object op, py::object norm, py::object dropout) {
    auto& plain = table_of<NormTable>(PyCFunction_GET_SELF(norm.ptr()));
    auto& masks = table_of<DropoutTable>(PyCFunction_GET_SELF(dropout.ptr()));
    return bound(&add, new AddNormTable{{std::move(op), plain.second, plain.centre}, plain, masks});
  });
}

}  // namespace hfnn::node
