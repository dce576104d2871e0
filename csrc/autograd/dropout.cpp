// Dropout, and a residual connection with dropout. See hfnn/ops/dropout.py, hfnn/ops/dropout_add.py.
#include "../dropout.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/python_variable.h>

#include <cmath>

#include "rooms.h"

namespace hfnn::node {
namespace ag = torch::autograd;

Mask::Mask(const Tensor& x, double p) : threshold(int64_t(std::nearbyint(p * 4294967296.0))), scale(1 / (1 - p)) {
  if (fake_mode()) return;
  if (!x.is_cuda()) {
    seed.value = at::empty({}, at::kLong).random_().item<int64_t>();
    return;
  }
  if (capturing(x)) {
    pair = at::empty({2}, x.options().dtype(at::kLong)).random_();
    return;
  }
  auto generator = at::globalContext().defaultGenerator(x.device());
  std::lock_guard<std::mutex> lock(generator.mutex());
  offset.value = int64_t(generator.get_offset());
  const int64_t used = (x.numel() + 3) / 4;
  generator.set_offset(uint64_t(offset.value + (used + 3) / 4 * 4));  // torch requires multiples of 4
  seed.value = int64_t(generator.current_seed());
}

static Tensor dropped(const DropoutKernel& kernel, const Mask& mask, const Tensor& x, ScalarType out) {
  Tensor y = like(x, out);
  kernel.forward(x, Flat{x}, Flat{y}, mask.threshold, mask.scale, mask.seed, mask.offset, mask.pair);
  return y;
}

// Gives dx the layout of torch's gradient: on CUDA channels-last or contiguous, whatever dy has; on the CPU that of dy.
static Tensor as_torchs(const Tensor& dx, const Tensor& dy) {
  if (dx.is_contiguous() && dy.is_contiguous() && !(on_gpu(dy) && ambiguous(dy))) return dx;
  if (on_gpu(dy))
    return laid(dx, at::empty_like(dy, dy.options().device(at::kMeta), dy.suggest_memory_format()).strides());
  return dx.strides() == dy.strides() ? dx : laid(dx, result_strides(dy, dx));
}

// Linear in x, so it is its own backward and second derivative.
struct DropoutRoom : Room {
  Kept input[1];  // kept only if x has a recipe: else x would replace y, and nothing is saved
  const DropoutKernel* kernel;
  Mask mask;
  std::vector<int64_t> strides;  // of the result, because the mask follows memory order

  std::span<Kept> kept() override { return input; }
  std::string name() const override { return "_DropoutBackward"; }

  Tensor build(ScalarType) override {
    const Tensor x = laid(input[0].part(true), strides);
    return dropped(*kernel, mask, x, x.scalar_type());
  }
  variable_list gradients(const Tensor& dy) override {
    return {as_torchs(dropped(*kernel, mask, laid(dy, strides), dy.scalar_type()), dy)};
  }
  variable_list differentiable(const Tensor& dy) override;
};

static Tensor apply_mask(const Tensor& x, const DropoutKernel* kernel, const Mask& mask, at::IntArrayRef strides,
                         bool carries, PyObject* module) {
  const bool grad = ag::compute_requires_grad(x);
  auto node = grad ? make_node<DropoutRoom>() : nullptr;
  const bool taken = grad && carries && node->input[0].take(x);
  Tensor y;
  {
    const BelowAutograd below;
    y = dropped(*kernel, mask, laid(x, strides), x.scalar_type());
  }
  if (grad) {
    node->kernel = kernel;
    node->mask = mask;
    node->module = module;
    node->strides = y.strides().vec();
    node->finish(node, y, ag::collect_next_edges(x), taken);
  }
  return y;
}

variable_list DropoutRoom::differentiable(const Tensor& dy) {
  const Tensor dx = apply_mask(dy, kernel, mask, strides, false, module);
  return {as_torchs(dx, dy)};
}

// (input, p, prefer)
static PyObject* dropout(PyObject* self, PyObject* const* args, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  auto& table = table_of<DropoutTable>(self);
  const Tensor* x = plain(args[0]);
  if (!table.worth(x, args[count - 1])) Py_RETURN_NONE;
  if (!x || !PyFloat_Check(args[1]) || !plain_context()) Py_RETURN_NOTIMPLEMENTED;
  DropoutKernel* kernel = table.choose(*x, x->scalar_type(), 1, table.out_dtype(*x, args[0]));
  if (!kernel) Py_RETURN_NOTIMPLEMENTED;
  if (on_gpu(*x) && ambiguous(*x)) Py_RETURN_NONE;  // torch's result is channels-last, or not
  const auto strides = dense(*x) ? x->strides().vec() : result_strides(*x, *x);
  return THPVariable_Wrap(apply_mask(*x, kernel, Mask(*x, PyFloat_AS_DOUBLE(args[1])), strides, true, table.chosen));
  END_HANDLE_TH_ERRORS
}

struct DropoutAddRoom : Room {
  const DropoutKernel* kernel;  // null: nothing was dropped
  Mask mask;
  ScalarType dtype;

  std::span<Kept> kept() override { return {}; }
  std::string name() const override { return "_DropoutAddBackward"; }
  Tensor build(ScalarType) override { TORCH_INTERNAL_ASSERT(false, "carries no recipe"); }

  variable_list gradients(const Tensor& dy) override {
    Tensor dx;  // the engine casts dy
    if (wanted(0)) dx = kernel ? as_torchs(dropped(*kernel, mask, dy.contiguous(), dtype), dy) : dy;
    return {dx, wanted(1) ? dy : Tensor()};
  }
  variable_list differentiable(const Tensor& dy) override {
    Tensor dx = wanted(0) ? dy : Tensor();
    if (wanted(0) && kernel) {
      const Tensor low = dy.to(dtype).contiguous();
      dx = apply_mask(low, kernel, mask, low.strides(), false, module);
    }
    return {dx, wanted(1) ? dy : Tensor()};
  }
};

bool addable(const Tensor& x, const Tensor& residual) {
  const ScalarType out = residual.scalar_type();
  return x.sizes() == residual.sizes() && x.device() == residual.device() && in_rows(residual) &&
         (x.scalar_type() == out || (out == at::kFloat && c10::promoteTypes(x.scalar_type(), out) == out));
}

void finish_sum(Tensor& total, const Tensor& x, const Tensor& residual, const DropoutKernel* kernel, const Mask& mask,
                PyObject* module) {
  if (!ag::compute_requires_grad(x, residual)) return;
  auto node = make_node<DropoutAddRoom>();
  node->kernel = kernel;
  node->mask = mask;
  node->dtype = x.scalar_type();
  node->module = module;
  node->finish(node, total, ag::collect_next_edges(x, residual), false);
}

// (input, residual, p, prefer)
static PyObject* dropout_add(PyObject* self, PyObject* const* args, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  auto& table = table_of<DropoutTable>(self);
  const Tensor *x = plain(args[0]), *residual = plain(args[1]);
  if (!table.worth(x, args[count - 1])) Py_RETURN_NONE;
  if (!x || !residual || !PyFloat_Check(args[2]) || !plain_context()) Py_RETURN_NOTIMPLEMENTED;
  if (!addable(*x, *residual)) Py_RETURN_NOTIMPLEMENTED;
  const DropoutKernel* kernel = table.choose(*x, x->scalar_type(), 1, residual->scalar_type());
  if (!kernel) Py_RETURN_NOTIMPLEMENTED;

  const Mask mask(*x, PyFloat_AS_DOUBLE(args[2]));
  Tensor y;
  {
    pybind11::gil_scoped_release no_gil;
    const BelowAutograd below;
    const Tensor a = x->contiguous(), b = residual->contiguous();
    y = like(b, b.scalar_type());
    kernel->add(a, a, b, y, mask.threshold, mask.scale, mask.seed, mask.offset, mask.pair);
  }
  finish_sum(y, *x, *residual, kernel, mask, table.chosen);
  return THPVariable_Wrap(y);
  END_HANDLE_TH_ERRORS
}

void bind_dropout(py::module_& m) {
  static PyMethodDef method = fast_method("dropout", dropout), add = fast_method("dropout_add", dropout_add);
  m.def("dropout", [](py::object op) { return bound(&method, new DropoutTable(std::move(op))); });
  m.def("dropout_add", [](py::object op) { return bound(&add, new DropoutTable(std::move(op))); });
}

}  // namespace hfnn::node
