// Smooth functions that keep their input: rows of hfnn/ops/smooth.py whose backward has a kernel.
#include <torch/csrc/DynamicTypes.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/python_variable.h>

#include "../gelu.h"
#include "../silu.h"
#include "../unary.h"
#include "rooms.h"

namespace hfnn::node {
namespace ag = torch::autograd;

// What kernels take after the tensors: nothing (silu), a boolean (gelu), or a kind and three numbers (unary).
struct Numbers {
  bool tanh = false;
  int64_t kind = 0;
  double a = 0, b = 0, c = 0;
  py::tuple python;  // for torch's own formula

  explicit Numbers(py::tuple given) : python(std::move(given)) {
    if (python.size() == 1) tanh = py::cast<bool>(python[0]);
    if (python.size() == 4) {
      kind = py::cast<int64_t>(python[0]);
      a = py::cast<double>(python[1]);
      b = py::cast<double>(python[2]);
      c = py::cast<double>(python[3]);
    }
  }
};

struct SmoothKernel {
  virtual ~SmoothKernel() = default;
  virtual void forward(Flat x, Flat y, const Numbers& n, bool again) const = 0;
  virtual void backward(Flat dy, Flat x, Flat dx, const Numbers& n) const = 0;
};

struct GeluKernel : SmoothKernel {
  explicit GeluKernel(py::handle module) {
    load(module, "hfnn::Gelu", forward_, &Gelu::forward, "forward");
    load(module, "hfnn::Gelu", rebuild_, &Gelu::rebuild, "rebuild");
    load(module, "hfnn::Gelu", backward_, &Gelu::backward, "backward");
  }
  void forward(Flat x, Flat y, const Numbers& n, bool again) const override {
    (again ? rebuild_ : forward_)(x.x, x, y, n.tanh);
  }
  void backward(Flat dy, Flat x, Flat dx, const Numbers& n) const override { backward_(x.x, dy, x, dx, n.tanh); }

 private:
  Launch<In, In, bool> forward_, rebuild_;
  Launch<In, In, In, bool> backward_;
};

struct SiluKernel : SmoothKernel {
  explicit SiluKernel(py::handle module) {
    load(module, "hfnn::Silu", forward_, &Silu::forward, "forward");
    load(module, "hfnn::Silu", backward_, &Silu::backward, "backward");
  }
  void forward(Flat x, Flat y, const Numbers&, bool) const override { forward_(x.x, x, y); }
  void backward(Flat dy, Flat x, Flat dx, const Numbers&) const override { backward_(x.x, dy, x, dx); }

 private:
  Launch<In, In> forward_;
  Launch<In, In, In> backward_;
};

struct UnaryKernel : SmoothKernel {
  explicit UnaryKernel(py::handle module) {
    load(module, "hfnn::Unary", forward_, &Unary::forward, "forward");
    load(module, "hfnn::Unary", backward_, &Unary::backward, "backward");
  }
  void forward(Flat x, Flat y, const Numbers& n, bool) const override { forward_(x.x, x, y, n.kind, n.a, n.b, n.c); }
  void backward(Flat dy, Flat x, Flat dx, const Numbers& n) const override {
    backward_(x.x, dy, x, dx, n.kind, n.a, n.b, n.c);
  }

 private:
  Launch<In, In, int64_t, double, double, double> forward_;
  Launch<In, In, In, int64_t, double, double, double> backward_;
};

struct SmoothTable : Table<SmoothKernel> {
  SmoothTable(py::object op, py::object second) : Table(op), second(std::move(second)) {
    label = "_" + py::cast<std::string>(op.attr("label")) + "Backward";
    casts = py::cast<bool>(op.attr("casts"));
    like_x = py::cast<bool>(op.attr("like_x"));
  }

  SmoothKernel* make(py::handle module) override {
    const Numbers* any = numbers.begin()->second.get();
    if (any->python.size() == 0) return new SiluKernel(module);
    if (any->python.size() == 1) return new GeluKernel(module);
    return new UnaryKernel(module);
  }

  // Python's translation of torch's arguments, or null if torch's own op must run. Needs the GIL.
  const Numbers* of(PyObject* const* arguments, Py_ssize_t count) {
    py::tuple key(count);
    for (Py_ssize_t i = 0; i < count; ++i) {
      if (!PyFloat_Check(arguments[i]) && !PyBool_Check(arguments[i]) && !PyLong_Check(arguments[i]) &&
          !PyUnicode_Check(arguments[i]))
        return nullptr;
      key[i] = py::reinterpret_borrow<py::object>(arguments[i]);
    }
    PyObject* known = PyDict_GetItemWithError(known_.ptr(), key.ptr());
    if (!known) {
      py::object found = op.attr("numbers_of")(key);
      known_[key] = found;
      if (!found.is_none()) numbers[found.ptr()] = std::make_unique<Numbers>(py::tuple(found));
      known = found.ptr();
    }
    return known == Py_None ? nullptr : numbers.at(known).get();
  }

  py::object second;  // the gradient of (dy, x, out, numbers) by differentiable ops
  std::string label;
  bool casts, like_x;
  std::unordered_map<PyObject*, std::unique_ptr<Numbers>> numbers;

 private:
  py::dict known_;
};

struct SmoothRoom : Room {
  Kept input[1];
  SmoothTable* table;
  const SmoothKernel* kernel;
  const Numbers* numbers;
  ScalarType out;
  Tensor nothing;  // for a fault

  std::span<Kept> kept() override { return input; }
  std::string name() const override { return table->label; }

  Tensor build(ScalarType dtype) override {
    const Tensor x = given(input[0].part());
    Tensor y = like(x, table->casts ? into(x, dtype) : out);
    kernel->forward({x}, {y}, *numbers, y.scalar_type() != out);
    return y;
  }

  variable_list gradients(const Tensor& dy) override {
    const Tensor kept = input[0].get();
    Tensor a = dy, x = table->casts ? kept : as(kept, out);
    if (table->like_x) x = densely(x);
    if (table->like_x && ambiguous(x)) x = like(x, x.scalar_type()).copy_(x);  // as the result: torch makes dx from it
    const Tensor dx = table->like_x ? order(x, a, x.scalar_type()) : order(a, x, x.scalar_type());
    kernel->backward({a}, {x}, {dx}, *numbers);
    if (fault(kMemoryKept)) nothing = at::empty({0}, dy.options());
    return {as(dx, kept.scalar_type())};
  }

  // What the kernel takes for x.
  Tensor given(const Tensor& x) const { return densely(table->casts ? x : as(x, out)); }

  variable_list differentiable(const Tensor& dy) override {
    Tensor x = input[0].get();
    pybind11::gil_scoped_acquire gil;
    return differentiated(table->second, py::make_tuple(dy, maybe(x), dtype_object(out), numbers->python));
  }
};

// (input, out or None for torch's dtype, prefer, *torch's arguments)
static PyObject* smooth(PyObject* self, PyObject* const* args, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  auto& table = table_of<SmoothTable>(self);
  const Tensor* x = plain(args[0]);
  if (!table.worth(x, args[2])) Py_RETURN_NONE;
  if (!x || !plain_context()) Py_RETURN_NOTIMPLEMENTED;
  const Numbers* numbers = table.of(args + 3, count - 3);
  if (!numbers) Py_RETURN_NOTIMPLEMENTED;
  const ScalarType out = args[1] == Py_None ? table.out_dtype(*x, args[0]) : scalar_type(args[1]);
  SmoothKernel* kernel = table.choose(*x, x->scalar_type(), 1, out);
  if (!kernel) Py_RETURN_NOTIMPLEMENTED;

  const bool grad = ag::compute_requires_grad(*x);
  auto node = grad ? make_node<SmoothRoom>() : nullptr;
  if (grad) node->input[0].take_or_save(*x);
  Tensor y;
  {
    pybind11::gil_scoped_release no_gil;
    const BelowAutograd below;
    const Tensor dense_x = densely(table.casts ? *x : as(*x, out));
    y = like(dense_x, out);
    kernel->forward({dense_x}, {y}, *numbers, false);
  }
  if (grad) {
    node->table = &table;
    node->module = table.chosen;
    node->kernel = kernel;
    node->numbers = numbers;
    node->out = out;
    node->finish(node, y, ag::collect_next_edges(*x), true);
  }
  return THPVariable_Wrap(y);
  END_HANDLE_TH_ERRORS
}

void bind_smooth(py::module_& m) {
  static PyMethodDef method = fast_method("smooth", smooth);
  m.def("smooth", [](py::object op, py::object second) {
    return bound(&method, new SmoothTable(std::move(op), std::move(second)));
  });
}

}  // namespace hfnn::node
