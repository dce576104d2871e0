// Gated products. See hfnn/ops/gated.py.
#include "../gated.h"

#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/python_variable.h>

#include "rooms.h"

namespace hfnn::node {
namespace ag = torch::autograd;

constexpr int64_t kReluGate = 3;  // as in csrc/gated.h

struct GatedKernel {
  explicit GatedKernel(py::handle module) {
    load(module, "hfnn::Gated", forward, &Gated::forward, "forward");
    load(module, "hfnn::Gated", backward, &Gated::backward, "backward");
  }
  Launch<In, In, In, int64_t> forward;
  Launch<In, In, In, In, In, int64_t> backward;
};

struct GatedTable : Table<GatedKernel> {
  GatedTable(py::object op, py::object second) : Table(std::move(op)), second(std::move(second)) {}
  py::object second;  // gradients of (dy, needs, gate, up, kind, gate_first, dim) by differentiable ops
};

// x as (rows, cols), with the elements of a row contiguous; its last `tail` dimensions are the columns.
static Tensor by_rows(const Tensor& x, size_t tail = 1) {
  const auto sizes = x.sizes();
  const int64_t cols = c10::multiply_integers(sizes.slice(sizes.size() - std::min(tail, sizes.size())));
  if (x.numel() == 0) return at::empty({cols ? x.numel() / cols : 0, cols}, x.options());
  const Tensor x_RC = x.reshape({x.numel() / cols, cols});
  return x_RC.stride(1) == 1 || cols == 1 ? x_RC : x_RC.contiguous();
}

// gate and up, from two tensors or from the halves of one, in the first of its last `tail` dimensions.
static std::pair<Tensor, Tensor> operands(const Tensor& gate, const Tensor& up, bool gate_first, size_t tail) {
  if (up.defined()) return {by_rows(gate), by_rows(up)};
  const Tensor both = by_rows(gate, tail);
  const int64_t half = both.size(1) / 2;
  const Tensor first = both.narrow(1, 0, half), second = both.narrow(1, half, half);
  return gate_first ? std::pair{first, second} : std::pair{second, first};
}

static Tensor product(const GatedKernel& kernel, const Tensor& gate, const Tensor& up, bool gate_first, size_t tail,
                      int64_t kind) {
  auto shape = gate.sizes().vec();
  if (!up.defined()) shape[shape.size() - tail] /= 2;
  const auto [gate_RC, up_RC] = operands(gate, up, gate_first, tail);
  Tensor y = at::empty(shape, gate.options());
  kernel.forward(gate, gate_RC, up_RC, by_rows(y, up.defined() ? 1 : tail), kind);
  return y;
}

struct GatedRoom : Room {
  Kept inputs[2];  // gate, up
  GatedTable* table;
  const GatedKernel* kernel;
  int64_t kind;
  bool gate_first;
  size_t tail;

  std::span<Kept> kept() override { return inputs; }
  std::string name() const override { return "_GatedBackward"; }

  Tensor build(ScalarType) override {
    return product(*kernel, inputs[0].part(), inputs[1].part(), gate_first, tail, kind);
  }

  variable_list gradients(const Tensor& dy) override {
    const Tensor gate = inputs[0].get(), up = inputs[1].get();
    const auto [gate_RC, up_RC] = operands(gate, up, gate_first, tail);
    auto fresh = [](const Tensor& like) { return at::empty(like.sizes(), like.options()); };
    if (!up.defined()) {
      Tensor dgate = fresh(gate);
      const auto [first, second] = operands(dgate, {}, gate_first, tail);
      kernel->backward(gate, by_rows(dy, tail), gate_RC, up_RC, first, second, kind);
      return {dgate};
    }
    Tensor dgate, dup;
    if (wanted(0)) dgate = fresh(gate);
    if (wanted(1)) dup = fresh(up);
    kernel->backward(gate, by_rows(dy), gate_RC, up_RC, dgate.defined() ? by_rows(dgate) : dgate,
                     dup.defined() ? by_rows(dup) : dup, kind);
    if (dgate.defined() && kind == kReluGate && !dy.is_contiguous()) {
      dgate = laid(dgate, result_strides(dgate, dy));  // as in torch, whose first operand is the result
    } else if (dgate.defined()) {
      dgate = like_dy(dgate, dy);
    }
    if (dup.defined()) dup = like_dy(dup, dy);
    return {dgate, dup};
  }

  variable_list differentiable(const Tensor& dy) override {
    const Tensor gate = inputs[0].get(), up = inputs[1].get();
    pybind11::gil_scoped_acquire gil;
    const bool to_up = up.defined() && wanted(1);
    auto grads =
        differentiated(table->second, py::make_tuple(dy, py::make_tuple(wanted(0), to_up), maybe(gate), maybe(up), kind,
                                                     gate_first, -static_cast<int64_t>(tail)));
    grads.resize(up.defined() ? 2 : 1);
    return grads;
  }
};

// (gate, up or None, kind, gate_first, dimension of the halves from the end, prefer)
static PyObject* gated(PyObject* self, PyObject* const* args, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  auto& table = table_of<GatedTable>(self);
  const Tensor* gate = plain(args[0]);
  if (!table.worth(gate, args[count - 1])) Py_RETURN_NONE;
  const Tensor* up = plain_or_none(args[1]);
  if (!gate || !up || !plain_context()) Py_RETURN_NOTIMPLEMENTED;
  const bool packed = !up->defined();
  const int64_t dim = PyLong_AsLongLong(args[4]);
  if (packed && (gate->dim() + dim < 0 || gate->size(dim) % 2)) Py_RETURN_NOTIMPLEMENTED;
  if (packed && dim != -1 && !gate->is_contiguous()) Py_RETURN_NONE;
  if (packed && ambiguous(*gate)) Py_RETURN_NONE;  // the halves are not contiguous: torch's result has other strides
  if (!packed && (up->sizes() != gate->sizes() || up->scalar_type() != gate->scalar_type() ||
                  up->device() != gate->device() || !in_rows(*up)))
    Py_RETURN_NOTIMPLEMENTED;
  if (!in_rows(*gate)) Py_RETURN_NOTIMPLEMENTED;
  GatedKernel* kernel = table.choose(*gate, gate->scalar_type(), 1, gate->scalar_type());
  if (!kernel) Py_RETURN_NOTIMPLEMENTED;

  const int64_t kind = PyLong_AsLongLong(args[2]);
  const bool gate_first = args[3] == Py_True, grad = ag::compute_requires_grad(*gate, *up);
  auto node = grad ? make_node<GatedRoom>() : nullptr;
  if (grad) {
    node->inputs[0].take_or_save(*gate);
    node->inputs[1].take_or_save(*up);
  }
  Tensor y;
  {
    pybind11::gil_scoped_release no_gil;
    const BelowAutograd below;
    y = product(*kernel, *gate, *up, gate_first, -dim, kind);
  }
  if (grad) {
    node->table = &table;
    node->module = table.chosen;
    node->kernel = kernel;
    node->kind = kind;
    node->gate_first = gate_first;
    node->tail = -dim;
    auto edges = packed ? ag::collect_next_edges(*gate) : ag::collect_next_edges(*gate, *up);
    node->finish(node, y, std::move(edges), true);
  }
  return THPVariable_Wrap(y);
  END_HANDLE_TH_ERRORS
}

void bind_gated(py::module_& m) {
  static PyMethodDef method = fast_method("gated", gated);
  m.def("gated", [](py::object op, py::object second) {
    return bound(&method, new GatedTable(std::move(op), std::move(second)));
  });
}

}  // namespace hfnn::node
