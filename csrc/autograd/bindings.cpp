// hfnn._autograd: the calls of rooms in C++, one per family. hfnn/core/native.py passes the tables of ops.
#include <ATen/record_function.h>
#include <torch/csrc/PyInterpreter.h>
#include <torch/csrc/autograd/python_cpp_function.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/profiler/orchestration/observer.h>
#include <torch/csrc/utils/pybind.h>

#include <utility>

#include "rooms.h"
#include "written.h"

namespace hfnn::node {
namespace {

bool resharded = false;  // set by haiscale.fsdp

PyObject* is_capturing = nullptr;

// What a Function in Python keeps of the room that made its input.
class Token {
 public:
  static py::object take(const Tensor& x) {
    auto token = std::make_unique<Token>();
    if (!Kept::takes(x) || !token->kept_.take(x)) return py::none();
    token->node_ = x.grad_fn();
    return py::cast(std::move(token));
  }
  ~Token() { kept_.release(); }

  Tensor tensor(py::object dtype) {
    std::optional<ScalarType> wanted;
    if (!dtype.is_none()) wanted = scalar_type(dtype.ptr());
    py::gil_scoped_release no_gil;
    return wanted ? kept_.get(*wanted) : kept_.get();
  }
  void release() {
    py::gil_scoped_release no_gil;
    kept_.release();
    node_ = {};
  }

 private:
  NodePtr node_;
  Kept kept_;
};

// The node behind its object in Python; null for a node of another kind.
Room* node_of(py::handle node) {
  if (!torch::autograd::THPCppFunction_Check(node.ptr())) return nullptr;
  return dynamic_cast<Room*>(reinterpret_cast<torch::autograd::THPCppFunction*>(node.ptr())->cdata.get());
}

}  // namespace

Tensor Kept::stored() const {
  if (held_.defined() || hooked_ || released_ || taken() || !defined_) return held_;
  return mark_.holds() ? saved_.unpack() : Tensor();
}

std::optional<PyObject*> Kept::packed() const {
  auto data = saved_.retrieve_unpack_hook_data();
  return data ? std::optional(data->second.ptr(getPyInterpreter())) : std::nullopt;
}

bool sharded_parameters() {
  if (resharded) return true;
  static PyObject *name = PyUnicode_InternFromString("torch.distributed._composable_state"), *states = nullptr;
  if (!states) {
    PyObject* module = PyDict_GetItem(PyImport_GetModuleDict(), name);  // imported by fully_shard
    if (!module) return false;
    py::object mapping = py::getattr(module, "_module_state_mapping", py::none());
    if (mapping.is_none()) return false;
    states = py::object(py::getattr(mapping, "data", mapping)).release().ptr();  // the dict in a WeakKeyDictionary
  }
  return PyObject_Length(states) > 0;
}

bool capturing(const Tensor& x) {
  if (!x.is_cuda()) return false;
  py::object answer = py::reinterpret_steal<py::object>(PyObject_CallNoArgs(is_capturing));
  if (!answer) throw python_error();
  return answer.ptr() == Py_True;
}

bool profiles_flops() {
  const auto* state = torch::profiler::impl::ProfilerStateBase::get();
  return state && state->config().with_flops;
}

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.attr("torch_version") = HFNN_TORCH;
  bind_batch_norm(m);
  bind_norm(m);
  bind_smooth(m);
  bind_gated(m);
  bind_dropout(m);
  bind_linear(m);
  bind_conv(m);
  bind_joint(m);
  bind_described(m);
  bind_cat(m);
  bind_triton(m);
  bind_written(m);
  py::class_<Token>(m, "Token")
      .def("tensor", &Token::tensor, py::arg("dtype") = py::none())
      .def("release", &Token::release);
  m.def("take", &Token::take, "A token of x's room, or None.");
  m.def("carries", [](const Tensor& x) {
    const Tensor y = viewed(x);
    auto* room = y.defined() && y.grad_fn() ? dynamic_cast<Room*>(y.grad_fn().get()) : nullptr;
    return room && y.output_nr() == 0 && room->gives(y);
  });
  m.def(
      "packed",
      [](py::handle node) {
        py::list found;
        Room* of = node_of(node);
        for (Kept& input : of ? of->kept() : std::span<Kept>())
          if (auto data = input.packed()) found.append(py::reinterpret_borrow<py::object>(*data));
        return found;
      },
      "What hooks of saved tensors made of those that a node of a room saved.");
  m.def(
      "stored",
      [](py::handle node) {
        py::list found;
        Room* of = node_of(node);
        for (Kept& input : of ? of->kept() : std::span<Kept>())
          if (Tensor x = input.stored(); x.defined()) found.append(py::cast(x));
        return found;
      },
      "The tensors that a node keeps and that no hook packed.");
  // Python functions for rare cases, torch's query for graph capture, and the class of fake tensors.
  m.def("connect", [](py::object batched, py::object capturing, py::object whole, py::object watched, py::object fake) {
    python().watched = watched.release().ptr();
    python().fake = reinterpret_cast<PyTypeObject*>(fake.release().ptr());
    python().keeps_whole = whole.release().ptr();
    python().batched = batched.release().ptr();
    is_capturing = capturing.release().ptr();
  });
  m.def("watch", [](py::object function) { python().watch = function.is_none() ? nullptr : function.release().ptr(); });
  m.def(
      "module",
      [](py::handle node) {
        Room* of = node_of(node);
        return of && of->module ? py::reinterpret_borrow<py::object>(of->module) : py::object(py::none());
      },
      "The kernel that made the output of a room's node, or its module; or None.");
  m.def("profiles_flops", profiles_flops, "Whether a profiler counts the FLOPs of this thread's ops.");
  m.def("record", at::enableRecordFunction, "Whether profilers see the ops of this thread.");
  m.def("force", [](int kind) { forced = kind; });
  m.def("as_if", [](bool on) { as_if_on_gpu = on; });
#ifdef HFNN_FAULTS
  m.def("plant", [](int fault) { planted = fault; }, "For tests: the number of a defect of nodes, 0 for none.");
#endif
  m.def("set_recipes", [](bool on) { return state().recipes.exchange(on); }, "Returns what it was.");
  m.attr("LONGEST") = kLongest;
  m.def("set_wide_on_cpu", [](bool on) { state().wide_on_cpu = on; });
  m.def("set_resharded", [](bool on) { return std::exchange(resharded, on); });
  m.def("counts", [] { return py::make_tuple(state().taken.load(), state().rebuilt.load(), state().alive.load()); });
  m.def("reset_counts", [] { state().taken = state().rebuilt = 0; });
}

}  // namespace hfnn::node
