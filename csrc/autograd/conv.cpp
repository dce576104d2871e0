// Convolutions that keep a recipe of their input. hfnn/ops/conv.py describes what is torch's.
#include <ATen/ops/conv1d.h>
#include <ATen/ops/conv2d.h>
#include <ATen/ops/conv3d.h>
#include <ATen/ops/conv_transpose1d.h>
#include <ATen/ops/conv_transpose2d.h>
#include <ATen/ops/conv_transpose3d.h>
#include <ATen/ops/convolution.h>
#include <ATen/ops/convolution_backward.h>
#include <ATen/ops/empty_strided.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/python_variable.h>

#include "rooms.h"

namespace hfnn::node {
namespace ag = torch::autograd;

// Elements of the input. Below, a step may wait for the host, on which this node takes longer than torch's.
constexpr int64_t kLeastOnCuda = 1 << 23;

struct ConvTable {
  ConvTable(int dims, bool transposed, py::dict floors) : dims(dims), transposed(transposed) {
    const char* names[kPrefers] = {"auto", "memory", "speed"};
    for (int i = 0; i < kPrefers; ++i) {
      const double floor = py::cast<double>(floors[names[i]]);
      this->floors[i] = floor > 1e18 ? std::numeric_limits<int64_t>::max() : int64_t(floor);
    }
  }
  int dims;
  bool transposed;
  int64_t floors[kPrefers];  // under autocast: elements from which not keeping casts pays
};

// One number per dimension of an image.
struct PerDimension {
  std::array<int64_t, 3> numbers{};
  int dims = 0;

  operator at::IntArrayRef() const { return {numbers.data(), size_t(dims)}; }
  // A tuple of `count` numbers, or one number for all. False if torch's own parser must read it.
  bool read(PyObject* given, int count) {
    dims = count;
    const bool one = PyLong_CheckExact(given);
    if (!one && !(PyTuple_CheckExact(given) && PyTuple_GET_SIZE(given) == count)) return false;
    for (int i = 0; i < count; ++i) {
      PyObject* each = one ? given : PyTuple_GET_ITEM(given, i);
      if (!PyLong_CheckExact(each)) return false;
      int overflow = 0;
      numbers[size_t(i)] = PyLong_AsLongLongAndOverflow(each, &overflow);
      if (overflow) return false;
    }
    return true;
  }
};

// The geometry of a convolution.
struct Geometry {
  PerDimension stride, padding, dilation, output_padding;
  int64_t groups = 1;
  bool transposed = false, by_name = false;  // by_name: the padding

  // Reads (stride, padding, dilation, output_padding, groups) from Python. False if torch's own parser must read them.
  bool read(const ConvTable& table, PyObject* const* args, const Tensor& weight) {
    transposed = table.transposed;
    if (!stride.read(args[0], table.dims) || !dilation.read(args[2], table.dims) ||
        !output_padding.read(args[3], table.dims) || !PyLong_CheckExact(args[4]))
      return false;
    int overflow = 0;
    groups = PyLong_AsLongLongAndOverflow(args[4], &overflow);
    by_name = PyUnicode_CheckExact(args[1]);
    return !overflow && (by_name ? named(args[1], weight) : padding.read(args[1], table.dims));
  }

 private:
  // padding="valid", or "same" if both sides get the same padding. Otherwise torch pads the input.
  bool named(PyObject* name, const Tensor& weight) {
    padding.dims = stride.dims;
    if (transposed) return false;
    if (PyUnicode_CompareWithASCIIString(name, "valid") == 0) return true;
    if (PyUnicode_CompareWithASCIIString(name, "same") != 0 || weight.dim() != stride.dims + 2) return false;
    for (size_t i = 0; i < size_t(stride.dims); ++i) {
      const int64_t total = dilation.numbers[i] * (weight.size(int64_t(i) + 2) - 1);
      if (stride.numbers[i] != 1 || total < 0 || total % 2) return false;
      padding.numbers[i] = total / 2;
    }
    return true;
  }
};

// Sizes and strides of a tensor.
struct Placed {
  std::vector<int64_t> sizes, strides;
  at::TensorOptions options;

  Placed() = default;
  explicit Placed(const Tensor& x) : sizes(x.sizes().vec()), strides(x.strides().vec()), options(x.options()) {}
  // Replaces a tensor of which only these are read. edge: where its gradient would go, in a recorded graph.
  Tensor empty(const ag::Edge& edge) const {
    Tensor made = at::empty_strided(sizes, strides, options);
    if (at::GradMode::is_enabled() && edge.is_valid()) ag::impl::set_gradient_edge(made, edge);
    return made;
  }
};

struct ConvRoom : Room {
  Kept inputs[2];  // x, and the weight as it is
  Geometry how;
  Placed x, weight;  // as they were convolved
  bool casts_weight;
  std::optional<Mark> unread;      // of an x that is not kept, because no gradient reads it
  std::vector<int64_t> bias_size;  // empty without a bias

  std::span<Kept> kept() override { return inputs; }
  std::string name() const override { return "_ConvolutionBackward"; }

  Tensor build(ScalarType) override { TORCH_INTERNAL_ASSERT(false, "the result of a convolution is never rebuilt"); }

  variable_list gradients(const Tensor& dy) override {
    const std::array<bool, 3> mask{wanted(0), wanted(1), wanted(2)};
    const Tensor weight_low = weight_again(), x_low = x_again(mask[1]);
    const auto bias = bias_size.empty() ? std::nullopt : at::OptionalIntArrayRef(bias_size);
    auto [dx, dweight, dbias] =
        at::convolution_backward(dy, x_low, weight_low, bias, how.stride, how.padding, how.dilation, how.transposed,
                                 how.output_padding, how.groups, mask);
    // If backward runs under autocast, sums on CUDA are float32. torch rounds them to the dtype of its cast bias.
    if (mask[2]) dbias = as(dbias, dtype());
    // Some of torch's kernels compute gradients that were not requested.
    return {mask[0] ? dx : Tensor(), mask[1] ? dweight : Tensor(), mask[2] ? dbias : Tensor()};
  }

  // torch's op is differentiable.
  variable_list differentiable(const Tensor& dy) override { return gradients(dy); }

 private:
  ScalarType dtype() const { return c10::typeMetaToScalarType(x.options.dtype()); }

  Tensor weight_again() {
    if (!inputs[1].defined()) return weight.empty(next_edge(1));
    if (!casts_weight) return inputs[1].get();
    return as(unpacked_weight(inputs[1], dtype(), "a convolution of hfnn"), dtype());
  }

  // read: whether a gradient is computed from x.
  Tensor x_again(bool read) {
    if (unread && !unread->holds()) throw_written_to(x.options, x.sizes, next_edge(0), *unread);
    if (!inputs[0].defined() || (!read && !at::GradMode::is_enabled() && inputs[0].checked(dtype())))
      return x.empty(next_edge(0));
    return laid(inputs[0].get(dtype()), x.strides);
  }
};

// torch's op. Calling it from here is faster than from Python.
static Tensor of_torch(const ConvTable& table, const Geometry& g, const Tensor& x, const Tensor& w, const Tensor& b) {
  const auto bias = b.defined() ? std::optional(b) : std::nullopt;
  if (table.transposed) {
    const auto function = table.dims == 1   ? at::conv_transpose1d
                          : table.dims == 2 ? at::conv_transpose2d
                                            : at::conv_transpose3d;
    return function(x, w, bias, g.stride, g.padding, g.output_padding, g.groups, g.dilation);
  }
  if (table.dims == 1) return at::conv1d(x, w, bias, g.stride, g.padding, g.dilation, g.groups);
  if (table.dims == 2) return at::conv2d(x, w, bias, g.stride, g.padding, g.dilation, g.groups);
  return at::conv3d(x, w, bias, g.stride, g.padding, g.dilation, g.groups);
}

// (input, weight, bias, stride, padding, dilation, output_padding, groups, prefer). Calls torch's op if there is
// nothing to gain.
static PyObject* convolution(PyObject* self, PyObject* const* args, Py_ssize_t) {
  HANDLE_TH_ERRORS
  auto& table = table_of<ConvTable>(self);
  const Tensor *x = plain(args[0]), *given = plain(args[1]), *bias = plain_or_none(args[2]);
  Geometry how;
  if (!x || !given || !bias || !plain_context() || !how.read(table, args + 3, *given)) Py_RETURN_NOTIMPLEMENTED;
  const Prefer prefer = prefer_of(args[8]);
  TORCH_CHECK_VALUE(prefer != kPrefers, "prefer: choose one of 'auto', 'memory', 'speed'");
  const auto torchs = [&] {
    if (at::GradMode::is_enabled() && given->requires_grad()) keeps_whole(*x);
    pybind11::gil_scoped_release no_gil;
    return of_torch(table, how, *x, *given, *bias);
  };
  const auto device = x->device();
  const bool autocast = at::autocast::is_autocast_enabled(device.type());
  // torch's call with padding="same" has other checks of its dtypes.
  const bool mixed =
      given->scalar_type() != x->scalar_type() || (bias->defined() && bias->scalar_type() != x->scalar_type());
  if (mixed && !autocast && PyUnicode_CheckExact(args[4])) Py_RETURN_NOTIMPLEMENTED;
  const bool large = x->numel() >= table.floors[prefer], frozen = !given->requires_grad();
  const bool asked = !on_gpu(*x) || prefer == kMemory || (prefer == kAuto && x->numel() >= kLeastOnCuda);
  // All that a call costs if there is nothing to gain.
  if (!asked || !at::GradMode::is_enabled() || !(frozen || Kept::takes(*x) || (autocast && large)))
    return THPVariable_Wrap(torchs());
  const ScalarType dtype = autocast ? at::autocast::get_autocast_dtype(device.type()) : x->scalar_type();
  bool casts = false, fits = x->dim() == table.dims + 2 && given->dim() == table.dims + 2;
  for (const Tensor* t : {x, given, bias}) {
    if (!t->defined()) continue;
    fits = fits && at::isFloatingType(t->scalar_type()) && t->device() == device && !t->is_inference() &&
           !(autocast && t->scalar_type() == at::kDouble);  // autocast leaves float64 alone
    casts = casts || t->scalar_type() != dtype;
  }
  fits = fits && (autocast || !casts) && ag::compute_requires_grad(*x, *given, *bias);
  if (!fits || (frozen && casts && !large)) return THPVariable_Wrap(torchs());
  auto node = make_node<ConvRoom>();
  const bool taken = !frozen && node->inputs[0].take(*x);
  if (!frozen && !taken && !(casts && large)) return THPVariable_Wrap(torchs());

  const Tensor low = taken || frozen ? Tensor() : shared_cast(*x, dtype);
  const Tensor lasts = lasting(*given, args[1], dtype);
  given = &lasts;
  node->casts_weight = given->scalar_type() != dtype;
  const auto save = [&] {
    if (low.defined()) node->inputs[0].save(low);
    if (frozen && x->scalar_type() == dtype) node->unread.emplace(*x);
    // If the cast weight is not kept and no gradient reads it, writes to the weight do not matter.
    if (!node->casts_weight) node->inputs[1].save(*given, is_source(args[1]));
    if (node->casts_weight && x->requires_grad()) node->inputs[1].refer(*given);
  };
  const bool late = profiles_flops();  // as in linear.cpp
  if (!late) save();
  Tensor y;
  {
    pybind11::gil_scoped_release no_gil;
    const BelowAutograd below;
    c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
    const Tensor x_low = low.defined() ? low : as(*x, dtype), weight = as(*given, dtype), b = as(*bias, dtype);
    // A profiler counts the FLOPs of the ops that users call, and none where the padding has a name.
    y = how.by_name ? at::convolution(x_low, weight, b.defined() ? std::optional(b) : std::nullopt, how.stride,
                                      how.padding, how.dilation, how.transposed, how.output_padding, how.groups)
                    : of_torch(table, how, x_low, weight, b);
    node->x = Placed(x_low);
    node->weight = Placed(weight);
  }
  if (late) save();
  node->how = how;
  if (bias->defined()) node->bias_size = bias->sizes().vec();
  node->finish(node, y, ag::collect_next_edges(*x, *given, *bias), false);
  return THPVariable_Wrap(y);
  END_HANDLE_TH_ERRORS
}

void bind_conv(py::module_& m) {
  static PyMethodDef method = fast_method("convolution", convolution);
  m.def("convolution", [](int dims, bool transposed, py::dict floors) {
    return bound(&method, new ConvTable(dims, transposed, std::move(floors)));
  });
}

}  // namespace hfnn::node
