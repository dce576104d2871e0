#include "kernel.h"

#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/ops/add.h>
#include <ATen/ops/addcmul.h>
#include <ATen/ops/empty_strided.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/DynamicTypes.h>
#include <torch/csrc/PyInterpreter.h>
#include <torch/csrc/autograd/forward_grad.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/jit/frontend/tracer.h>

namespace hfnn::node {

int forced = 0;
bool as_if_on_gpu = false;

Floors::Floors(const py::dict& floors) {
  const char* names[kPrefers] = {"auto", "memory", "speed"};
  for (int i = 0; i < kPrefers; ++i) {
    py::tuple both = floors[names[i]];
    for (int cuda = 0; cuda < 2; ++cuda) floors_[i][cuda] = py::cast<int64_t>(both[cuda]);
  }
}

Choices::Choices(py::object op) : op(std::move(op)), floors_(py::dict(this->op.attr("floors"))) {}

PyObject* Choices::find(const Tensor& x, ScalarType dtype, int64_t cols, ScalarType out) {
  const bool fake = fake_mode() != nullptr;
  const uint64_t key = uint64_t(cols) << 24 | uint64_t(fake) << 23 | uint64_t(forced) << 20 |
                       uint64_t(on_gpu(x)) << 16 | uint64_t(dtype) << 8 | uint64_t(out);
  auto at = modules_.find(key);
  if (at != modules_.end()) return at->second;
  py::object module =
      op.attr("module_for")(on_gpu(x) ? "cuda" : "cpu", dtype_object(dtype), cols, dtype_object(out), fake);
  return modules_[key] = module.release().ptr();
}

ScalarType Choices::out_dtype(const Tensor& x, PyObject* input) {
  const auto device = x.device().type();
  if (!at::autocast::is_autocast_enabled(device)) return x.scalar_type();
  const uint32_t key =
      uint32_t(x.scalar_type()) << 16 | uint32_t(at::autocast::get_autocast_dtype(device)) << 8 | uint32_t(on_gpu(x));
  auto at = outs_.find(key);
  if (at != outs_.end()) return at->second;
  py::object out = op.attr("out_dtype")(py::handle(input));
  return outs_[key] = scalar_type(out.ptr());
}

// Whether a TorchFunctionMode sees torch's calls. torch.device's own, which set_default_device leaves on, gives a
// device to functions that make tensors, and nothing else. One with `hfnn_runs` sees hfnn's ops.
static bool observed() {
  if (!at::impl::torch_function_mode_enabled()) return false;
  static PyObject *name = PyUnicode_InternFromString("torch.utils._device"), *default_device = nullptr;
  static PyObject* runs = PyUnicode_InternFromString("hfnn_runs");
  if (!default_device) {
    PyObject* module = PyDict_GetItem(PyImport_GetModuleDict(), name);
    if (!module) return true;
    default_device = py::object(py::getattr(module, "DeviceContext", py::none())).release().ptr();
  }
  using Modes = at::impl::PythonTorchFunctionTLS;
  for (int64_t i = 0; i < Modes::stack_len(); ++i) {
    PyObject* mode = Modes::get_stack_at(i)->ptr(getPyInterpreter());
    auto* type = reinterpret_cast<PyObject*>(Py_TYPE(mode));
    if (type != default_device && !PyObject_HasAttr(type, runs)) return true;
  }
  return false;
}

// Whether a dispatch mode records torch's ops for a graph.
static bool recorded() {
  using Modes = c10::impl::TorchDispatchModeTLS;
  using c10::impl::TorchDispatchModeKey;
  return Modes::any_modes_set() &&
         (Modes::get_mode(TorchDispatchModeKey::PROXY) || Modes::get_mode(TorchDispatchModeKey::FUNCTIONAL));
}

bool plain_context() {
  using c10::DispatchKey;
  constexpr c10::DispatchKeySet odd({DispatchKey::Functionalize, DispatchKey::FuncTorchDynamicLayerFrontMode,
                                     DispatchKey::FuncTorchDynamicLayerBackMode, DispatchKey::FuncTorchVmapMode});
  const auto keys = c10::impl::tls_local_dispatch_key_set();
  return forced != 1 && !keys.included_.has_any(odd) && !observed() && !recorded() &&
         !torch::jit::tracer::isTracing() && !torch::autograd::ForwardADLevel::try_get_by_idx(0);
}

bool is_parameter(PyObject* argument) {
  PyTypeObject* type = Py_TYPE(argument);
  if (type != python().fake) return reinterpret_cast<PyObject*>(type) == ParameterClass;
  return py::getattr(argument, "_is_param", py::none()).ptr() == Py_True;
}

const Tensor* plain(PyObject* argument) {
  PyTypeObject* type = Py_TYPE(argument);
  const bool fake = type == python().fake;
  if (!fake && type != reinterpret_cast<PyTypeObject*>(THPVariableClass) &&
      type != reinterpret_cast<PyTypeObject*>(ParameterClass))
    return nullptr;
  using c10::DispatchKey;
  static const c10::DispatchKeySet usual =
      c10::DispatchKeySet(
          {DispatchKey::CPU, DispatchKey::AutogradCPU, DispatchKey::AutocastCPU, DispatchKey::ADInplaceOrView}) |
      c10::DispatchKeySet({DispatchKey::CUDA, DispatchKey::AutogradCUDA, DispatchKey::AutocastCUDA});
  const Tensor& x = THPVariable_Unpack(argument);
  constexpr c10::DispatchKeySet of_fakes({DispatchKey::Python, DispatchKey::PythonTLSSnapshot});
  if ((fake ? x.key_set() - of_fakes : x.key_set()).raw_repr() & ~usual.raw_repr()) return nullptr;
  if (!x.unsafeGetTensorImpl()->has_storage()) return nullptr;
  if (fake) return fake_mode() && !x.unsafeGetTensorImpl()->has_symbolic_sizes_strides() ? &x : nullptr;
  if (!x.storage().data() && x.numel()) return nullptr;  // freed, as in a sharded parameter
  return &x;
}

static const Tensor undefined;

const Tensor* plain_or_none(PyObject* argument) { return argument == Py_None ? &undefined : plain(argument); }

Prefer prefer_of(PyObject* text) {
  static PyObject* names[kPrefers] = {PyUnicode_InternFromString("auto"), PyUnicode_InternFromString("memory"),
                                      PyUnicode_InternFromString("speed")};
  for (int i = 0; i < kPrefers; ++i)
    if (text == names[i]) return Prefer(i);
  for (int i = 0; i < kPrefers; ++i)
    if (PyUnicode_Check(text) && PyUnicode_Compare(text, names[i]) == 0) return Prefer(i);
  return kPrefers;
}

bool goes_with(const Tensor& x, std::initializer_list<const Tensor*> parameters) {
  ScalarType dtype = ScalarType::Undefined;
  for (const Tensor* p : parameters) {
    if (!p->defined()) continue;
    if (p->device() != x.device() || (dtype != ScalarType::Undefined && p->scalar_type() != dtype)) return false;
    dtype = p->scalar_type();
    if (dtype != x.scalar_type() && (dtype != ScalarType::Float || x.scalar_type() == ScalarType::Double)) return false;
  }
  return true;
}

hfnn::Tensor in_order(const Tensor& x) {
  hfnn::Tensor t = borrow(x);
  if (x.is_contiguous()) return t;
  t.dims = 1;
  t.shape[0] = x.numel();
  t.strides[0] = 1;
  return t;
}

bool in_rows(const Tensor& x) {
  if (x.is_contiguous()) return true;
  int64_t last = std::numeric_limits<int64_t>::max();
  for (int64_t i = 0; i < x.dim(); ++i) {
    if (x.size(i) == 1 || x.stride(i) == 0) continue;
    if (x.stride(i) > last) return false;
    last = x.stride(i);
  }
  return true;
}

bool ambiguous(const Tensor& x) {
  const bool last = !x.is_contiguous();
  if (last && !x.is_contiguous(at::MemoryFormat::ChannelsLast)) return false;
  constexpr int64_t order[] = {1, 3, 2, 0};
  int64_t step = 1;
  for (int64_t i = 0; i < x.dim(); ++i) {
    const int64_t d = last ? order[i] : x.dim() - 1 - i;
    if (x.stride(d) != step) return true;
    step *= std::max<int64_t>(x.size(d), 1);
  }
  return false;
}

static Tensor on_meta(const Tensor& x) {
  return at::empty_strided(x.sizes(), x.strides(), x.options().device(at::kMeta));
}

std::vector<int64_t> broadcast_strides(const Tensor& x) {
  // An op with three tensors, for which the meta device has no fast path.
  const Tensor one = at::empty({1}, x.options().device(at::kMeta));
  return at::addcmul(on_meta(x), one, one).strides().vec();
}

std::vector<int64_t> result_strides(const Tensor& a, const Tensor& b) {
  if (a.is_contiguous() && b.is_contiguous())  // here the meta device gives other strides
    return at::empty(a.sizes(), a.options().device(at::kMeta)).strides().vec();
  return at::add(on_meta(a), on_meta(b)).strides().vec();
}

Tensor laid(const Tensor& x, at::IntArrayRef strides) {
  return x.strides() == strides ? x : at::empty_strided(x.sizes(), strides, x.options()).copy_(x);
}

Tensor order(Tensor& a, Tensor& b, ScalarType dtype) {
  if ((a.is_contiguous() && b.is_contiguous()) || (a.strides() == b.strides() && dense(a))) return like(b, dtype);
  const auto strides = result_strides(a, b);
  a = laid(a, strides);
  b = laid(b, strides);
  return at::empty_strided(b.sizes(), strides, b.options().dtype(dtype));
}

py::object bound(PyMethodDef* method, void* table) {
  py::capsule self(table, [](void*) {});
  return py::reinterpret_steal<py::object>(PyCFunction_NewEx(method, self.ptr(), nullptr));
}

py::object dtype_object(ScalarType type) {
  return py::reinterpret_borrow<py::object>(reinterpret_cast<PyObject*>(torch::getTHPDtype(type)));
}

ScalarType scalar_type(PyObject* dtype) {
  TORCH_CHECK_TYPE(THPDtype_Check(dtype), "takes a torch.dtype");
  return reinterpret_cast<THPDtype*>(dtype)->scalar_type;
}

variable_list differentiated(const py::object& function, const py::tuple& arguments) {
  py::tuple found = function(*arguments);
  variable_list grads(found.size());
  for (size_t i = 0; i < grads.size(); ++i)
    if (!found[i].is_none()) grads[i] = py::cast<Tensor>(found[i]);
  return grads;
}

}  // namespace hfnn::node
