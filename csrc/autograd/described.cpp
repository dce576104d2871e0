// Nodes whose formulas are functions in Python. hfnn/core/node.py says what an op gives.
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/PyInterpreter.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/python_variable.h>

#include "rooms.h"

namespace hfnn::node {
namespace ag = torch::autograd;
namespace {

// Tensors of a node, by letters.
constexpr char kInput = 'x';     // an input, taken or saved; `build` and the gradients read it
constexpr char kBuilt = 'b';     // the same, and `build` alone reads it
constexpr char kTaken = 't';     // the same, and it is kept only if it can be taken: else y carries no recipe
constexpr char kHeld = 'h';      // a parameter that `build` alone reads, so it may be written to before backward
constexpr char kConstant = 'c';  // a tensor without a gradient, made by the op or kept as torch keeps it

struct Description {
  std::string label, letters;
  py::object build, gradients, second;

  bool has_edge(size_t i) const { return letters[i] != kConstant; }
  bool read_in_backward(size_t i) const { return letters[i] == kInput || letters[i] == kConstant; }
};

struct DescribedNode : Room {
  const Description* of;
  std::unique_ptr<Kept[]> tensors;
  std::optional<c10::SafePyObject> how;  // a tuple: the kernel, and plain values

  std::span<Kept> kept() override { return {tensors.get(), of->letters.size() + fault(kKeptBeside)}; }
  std::string name() const override { return of->label; }

  Tensor build(ScalarType) override {
    variable_list given;
    for (size_t i = 0; i < of->letters.size(); ++i) given.push_back(tensors[i].part(!of->read_in_backward(i)));
    const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
    pybind11::gil_scoped_acquire gil;
    return py::cast<Tensor>(call(of->build, {}, given));
  }
  variable_list gradients(const Tensor& dy) override { return gradients_by(of->gradients, dy); }
  variable_list differentiable(const Tensor& dy) override { return gradients_by(of->second, dy); }

 private:
  variable_list gradients_by(const py::object& function, const Tensor& dy) {
    variable_list given, grads(num_outputs());
    for (size_t i = 0; i < of->letters.size(); ++i)
      given.push_back(of->read_in_backward(i) ? tensors[i].own() : Tensor());
    pybind11::gil_scoped_acquire gil;
    py::tuple needs(grads.size());
    for (size_t i = 0; i < grads.size(); ++i) needs[i] = wanted(i);
    const py::tuple found = call(function, {py::cast(dy), needs}, given);
    for (size_t i = 0; i < grads.size(); ++i)
      if (wanted(i) && !found[i].is_none()) grads[i] = py::cast<Tensor>(found[i]);
    if (fault(kGradientLost)) grads.back() = Tensor();
    return grads;
  }

  // function(*first, how, *given). Needs the GIL.
  py::object call(const py::object& function, std::initializer_list<py::object> first, const variable_list& given) {
    py::tuple arguments(first.size() + 1 + given.size());
    size_t i = 0;
    for (const py::object& each : first) arguments[i++] = each;
    arguments[i++] = py::handle(how->ptr(getPyInterpreter()));
    for (const Tensor& x : given) arguments[i++] = maybe(x);
    auto found = py::reinterpret_steal<py::object>(PyObject_CallObject(function.ptr(), arguments.ptr()));
    if (found) return found;
    python_error raised;
    raised.persist();  // another thread may see it
    throw std::move(raised);
  }
};

void keep(Kept& kept, char letter, const Tensor& x, PyObject* argument) {
  if (letter == kConstant) return kept.save(x, true);
  if (letter == kTaken) return void(x.defined() && kept.take(x));
  if (is_parameter(argument) || letter == kHeld)
    return keep_parameter(kept, x, is_source(argument), letter == kHeld ? &Kept::hold : &Kept::save);
  if (x.defined() && !kept.take(x)) kept.save(x, !x.requires_grad() && in_checkpoint());
}

// (y, how, *tensors), or (function, how, x, *tensors). Returns y, which is new, with its node; or x, which can be
// taken, after function(x) has written to it.
PyObject* described(PyObject* self, PyObject* const* args, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  const auto& of = table_of<Description>(self);
  TORCH_INTERNAL_ASSERT(size_t(count) == 2 + of.letters.size());
  const bool writes = !THPVariable_Check(args[0]);
  bool needed = false;
  variable_list given;
  for (size_t i = 0; i < of.letters.size(); ++i) {
    given.push_back(args[2 + i] == Py_None ? Tensor() : THPVariable_Unpack(args[2 + i]));
    needed |= of.has_edge(i) && given[i].defined() && given[i].requires_grad();
  }
  if (needed && at::GradMode::is_enabled()) {
    auto node = make_node<DescribedNode>();
    node->of = &of;
    node->how.emplace(Py_NewRef(args[1]), getPyInterpreter());
    PyObject* kernel = PyTuple_GetItem(args[1], 0);
    node->module = kernel == Py_None ? nullptr : kernel;
    node->tensors = std::make_unique<Kept[]>(given.size() + fault(kKeptBeside));
    ag::edge_list edges;
    bool carries = true;
    for (size_t i = 0; i < given.size(); ++i) {
      keep(node->tensors[i], of.letters[i], given[i], args[2 + i]);
      if (of.has_edge(i)) edges.push_back(given[i].defined() ? ag::impl::gradient_edge(given[i]) : ag::Edge());
      carries &= of.letters[i] != kTaken || node->tensors[i].taken();
    }
    Tensor y = writes ? given[0] : THPVariable_Unpack(args[0]);
    if (writes) {
      const at::AutoGradMode no_grad(false);
      const BelowAutograd below;
      if (!THPObjectPtr(PyObject_CallOneArg(args[0], args[2]))) throw python_error();
      ag::impl::bump_version(y);
      node->tensors[0].written(y);
    }
    if (fault(kKeptBeside)) node->tensors[given.size()].save(y.clone(), true);
    node->finish(node, y, std::move(edges), carries, writes);
  }
  return Py_NewRef(args[writes ? 2 : 0]);
  END_HANDLE_TH_ERRORS
}

// function(*args), without a graph.
PyObject* below(PyObject*, PyObject* const* args, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  const at::AutoGradMode no_grad(false);
  const BelowAutograd below;
  return PyObject_Vectorcall(args[0], args + 1, size_t(count - 1), nullptr);
  END_HANDLE_TH_ERRORS
}

}  // namespace

void bind_described(py::module_& m) {
  static PyMethodDef method = fast_method("described", described), function = fast_method("below", below);
  m.def("described",
        [](std::string label, std::string letters, py::object build, py::object gradients, py::object second) {
          return bound(&method, new Description{std::move(label), std::move(letters), std::move(build),
                                                std::move(gradients), std::move(second)});
        });
  m.add_object("below", py::reinterpret_steal<py::object>(PyCFunction_NewEx(&function, nullptr, nullptr)));
}

}  // namespace hfnn::node
