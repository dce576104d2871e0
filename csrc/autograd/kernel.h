// How rooms call kernels: functions of hfnn._C by pointer, or Triton's by cached handles.
#pragma once
#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <map>
#include <unordered_map>

#include "../tensor.h"
#include "room.h"
#include "triton.h"

// From ATen/autocast_mode.h, which includes every operator.
namespace at::autocast {
TORCH_API bool is_autocast_enabled(at::DeviceType device_type);
TORCH_API at::ScalarType get_autocast_dtype(at::DeviceType device_type);
}  // namespace at::autocast

namespace hfnn::node {
namespace py = pybind11;

inline hfnn::Dtype dtype_of(ScalarType type) {
  switch (type) {
    case ScalarType::Float:
      return hfnn::Dtype::float32;
    case ScalarType::BFloat16:
      return hfnn::Dtype::bfloat16;
    case ScalarType::Half:
      return hfnn::Dtype::float16;
    case ScalarType::Double:
      return hfnn::Dtype::float64;
    case ScalarType::Long:
      return hfnn::Dtype::int64;
    case ScalarType::Bool:
    case ScalarType::Byte:
      return hfnn::Dtype::uint8;
    case ScalarType::Int:
      return hfnn::Dtype::int32;
    case ScalarType::Short:
      return hfnn::Dtype::int16;
    default:
      return hfnn::Dtype::other;
  }
}

inline hfnn::Tensor borrow(const Tensor& x) {
  hfnn::Tensor t;
  if (!x.defined()) return t;
  t.data = x.data_ptr();
  t.dims = int(x.dim());
  for (int i = 0; i < t.dims; ++i) {
    t.shape[i] = x.size(i);
    t.strides[i] = x.stride(i);
  }
  t.device = x.is_cuda() ? x.get_device() : -1;
  t.dtype = dtype_of(x.scalar_type());
  return t;
}

// A kernel's queue: the number of threads on the CPU, the raw stream on CUDA.
inline int64_t queue_of(const Tensor& x) {
  if (!x.is_cuda()) return at::get_num_threads();
  return reinterpret_cast<int64_t>(
      c10::impl::VirtualGuardImpl(x.device().type()).getStream(x.device()).native_handle());
}

// A dense tensor, as its elements in memory order.
struct Flat {
  const Tensor& x;
};
hfnn::Tensor in_order(const Tensor& x);

// The memory of a dense tensor as a contiguous tensor of three dimensions.
struct Shaped {
  const Tensor& x;
  std::array<int64_t, 3> shape;
  std::array<int64_t, 3> strides() const { return {shape[1] * shape[2], shape[2], 1}; }
};
inline hfnn::Tensor borrow(const Shaped& given) {
  hfnn::Tensor t;
  if (!given.x.defined()) return t;
  t.data = given.x.data_ptr();
  t.dims = 3;
  std::ranges::copy(given.shape, t.shape);
  std::ranges::copy(given.strides(), t.strides);
  t.device = given.x.is_cuda() ? given.x.get_device() : -1;
  t.dtype = dtype_of(given.x.scalar_type());
  return t;
}

// One function of a kernel, in hfnn._C or in a Triton module. A: its arguments without the queue.
template <class... A>
class Launch {
 public:
  using Function = void (*)(A..., int64_t);

  Launch() = default;
  Launch(Function function) : function_(function) {}
  explicit Launch(py::handle function) : triton_(std::make_unique<TritonFunction>(function.ptr())) {}

  template <class... G>
  void operator()(const Tensor& like, const G&... given) const {
    if (fake_mode()) return;
    if (function_) {
      function_(native<A>(given)..., queue_of(like));
    } else {
      const Tensor flat[] = {flattened(given)...};  // views that live as long as the call
      size_t i = 0;
      const Arg args[] = {argument(given, flat[i++])...};
      (*triton_)(args);
    }
  }

 private:
  template <class G>
  static Tensor flattened(const G& given) {
    if constexpr (std::is_same_v<G, Flat>) {
      if (!given.x.is_contiguous()) return given.x.as_strided({given.x.numel()}, {1});
      return given.x;
    } else if constexpr (std::is_same_v<G, Shaped>) {
      if (!given.x.defined()) return {};
      return given.x.as_strided(given.shape, given.strides());
    } else {
      return {};
    }
  }
  template <class G>
  static Arg argument(const G& given, const Tensor& flat) {
    if constexpr (std::is_same_v<G, Flat> || std::is_same_v<G, Shaped>) {
      return Arg(flat);
    } else {
      return Arg(given);
    }
  }
  template <class T, class G>
  static decltype(auto) native(const G& given) {
    if constexpr (std::is_same_v<std::decay_t<T>, hfnn::Tensor>) {
      if constexpr (std::is_same_v<G, hfnn::node::Flat>) {
        return in_order(given.x);
      } else {
        return borrow(given);
      }
    } else if constexpr (std::is_same_v<G, Fresh> || std::is_same_v<G, FreshReal>) {
      return given.value;
    } else {
      return given;
    }
  }

  Function function_ = nullptr;
  std::unique_ptr<TritonFunction> triton_;
};

using In = const hfnn::Tensor&;

// The functions that hfnn._C has in a capsule, or null for a Triton module.
template <class Functions>
const Functions* functions_of(py::handle module, const char* name, const char* attribute = "functions") {
  if (!py::hasattr(module, attribute)) return nullptr;
  py::capsule capsule = module.attr(attribute);
  TORCH_CHECK(std::string_view(capsule.name()) == name, "takes the functions of ", name, ", got ", capsule.name());
  return capsule.get_pointer<Functions>();
}

// Loads one function of a kernel's module: by its pointer in hfnn._C, or by name from a Triton module.
template <class Functions, class L, class M>
void load(py::handle module, const char* name, L& launch, M Functions::* member, const char* attribute,
          const char* capsule = "functions") {
  if (const auto* functions = functions_of<Functions>(module, name, capsule)) {
    launch = L(functions->*member);
  } else {
    if (py::hasattr(module, attribute)) launch = L(module.attr(attribute));
  }
}

// The number of partial sums that a kernel needs for given sizes. A Triton module is asked once for each.
template <class... N>
class Partials {
 public:
  void load(py::handle module, int64_t (*native)(N...)) {
    native_ = native;
    if (!native) asked_ = py::object(module.attr("partials")).release();
  }
  int64_t operator()(N... sizes) const {
    if (native_) return native_(sizes...);
    {
      std::lock_guard<std::mutex> lock(mutex_);
      auto at = known_.find({sizes...});
      if (at != known_.end()) return at->second;
    }
    pybind11::gil_scoped_acquire gil;
    const int64_t count = py::cast<int64_t>(asked_(sizes...));
    std::lock_guard<std::mutex> lock(mutex_);
    return known_[{sizes...}] = count;
  }

 private:
  int64_t (*native_)(N...) = nullptr;
  py::handle asked_;
  mutable std::mutex mutex_;
  mutable std::map<std::array<int64_t, sizeof...(N)>, int64_t> known_;
};

enum Prefer { kAuto, kMemory, kSpeed, kPrefers };
Prefer prefer_of(PyObject* text);  // kPrefers: unknown
// What hfnn.use forces: 0 nothing, 1 torch's own ops, else a kind of kernel.
extern int forced;

// `Op.floors`: by preference, the number of elements from which a kernel pays, on the CPU and on CUDA.
class Floors {
 public:
  explicit Floors(const py::dict& floors);
  int64_t of(const Tensor& x, Prefer prefer) const { return floors_[prefer][on_gpu(x)]; }

 private:
  int64_t floors_[kPrefers][2];
};

// An op of hfnn/core/kernel.py. Which of its kernels takes a call is asked once for each kind of input.
class Choices {
 public:
  explicit Choices(py::object op);

  // Whether the input is large enough for a kernel; true if the decision is made elsewhere.
  bool worth(const Tensor* x, PyObject* prefer) const {
    if (!x || forced) return true;
    const Prefer known = prefer_of(prefer);
    TORCH_CHECK_VALUE(known != kPrefers, "prefer: choose one of 'auto', 'memory', 'speed'");
    return x->numel() >= floors_.of(*x, known);
  }
  // The module of the kernel that takes such a call, or None. Needs the GIL.
  PyObject* find(const Tensor& x, ScalarType dtype, int64_t cols, ScalarType out);
  // The dtype of torch's result for x under autocast. Needs the GIL.
  ScalarType out_dtype(const Tensor& x, PyObject* input);

  py::object op;

 private:
  Floors floors_;
  std::unordered_map<uint64_t, PyObject*> modules_;
  std::unordered_map<uint32_t, ScalarType> outs_;
};

// The kernels of one op, by module.
template <class K>
class Table : public Choices {
 public:
  using Choices::Choices;

  K* choose(const Tensor& x, ScalarType dtype, int64_t cols, ScalarType out) {
    PyObject* module = find(x, dtype, cols, out);
    if (module == Py_None) return nullptr;
    chosen = module;
    auto& kernel = kernels_[module];
    if (!kernel) kernel.reset(make(py::handle(module)));
    return kernel.get();
  }
  virtual K* make([[maybe_unused]] py::handle module) {
    if constexpr (std::is_constructible_v<K, py::handle>) return new K(module);
    return nullptr;
  }
  virtual ~Table() = default;

  PyObject* chosen = nullptr;  // the module of the last choice

 private:
  std::unordered_map<PyObject*, std::unique_ptr<K>> kernels_;
};

// A call from Python returns the result, None if torch's own op must run, or NotImplemented if it must run and Python
// may explain why.

// Whether rooms take the call at all: no tracer or transform, no TorchFunctionMode, and the usual dispatch keys. They
// do in dispatch modes, which see what they allocate, and while gradients of many dy are computed at once, where a
// checkpoint may repeat a forward.
bool plain_context();
// The tensor behind an argument, or null if rooms do not take it. plain_or_none: None is an undefined tensor.
const Tensor* plain(PyObject* argument);
const Tensor* plain_or_none(PyObject* argument);
// Whether the parameters' devices and dtypes suit x, as kernels require.
bool goes_with(const Tensor& x, std::initializer_list<const Tensor*> parameters);

// `function(*arguments)` in Python, which returns a tuple of gradients or None. Used under create_graph.
variable_list differentiated(const py::object& function, const py::tuple& arguments);
py::object dtype_object(ScalarType type);
ScalarType scalar_type(PyObject* dtype);
inline py::object maybe(const Tensor& x) { return x.defined() ? py::cast(x) : py::none(); }

// Layouts, as in hfnn/ops/layout.py.
inline bool dense(const Tensor& x) { return x.is_contiguous() || x.is_non_overlapping_and_dense(); }
hfnn::Tensor in_order(const Tensor& x);  // a dense tensor, in memory order
// x, or a copy in the order of torch's results if x is not dense.
inline Tensor densely(const Tensor& x) { return dense(x) ? x : at::empty_like(x).copy_(x); }
bool in_rows(const Tensor& x);
// A new tensor with the strides that torch's elementwise ops give for a dense x. In dimensions of size 1 they are the
// usual ones, whatever x has.
inline Tensor like(const Tensor& x, ScalarType dtype) {
  using at::MemoryFormat;
  const bool last = !x.is_contiguous() && x.is_contiguous(MemoryFormat::ChannelsLast);
  const auto format = last ? MemoryFormat::ChannelsLast : MemoryFormat::Preserve;
  return at::empty_like(x, x.options().dtype(dtype), x.is_contiguous() ? MemoryFormat::Contiguous : format);
}
// Whether x is contiguous or channels-last, but `like` gives other strides in dimensions of size 1.
bool ambiguous(const Tensor& x);
std::vector<int64_t> result_strides(const Tensor& a, const Tensor& b);
std::vector<int64_t> broadcast_strides(const Tensor& x);  // of torch's result for x and a broadcast tensor
Tensor laid(const Tensor& x, at::IntArrayRef strides);
// Makes both dense, in the layout of torch's result for (a, b). Returns an empty tensor in that layout.
Tensor order(Tensor& a, Tensor& b, ScalarType dtype);
inline Tensor like_dy(const Tensor& dx, const Tensor& dy) {
  return dy.is_contiguous() ? dx : laid(dx, result_strides(dy, dx));
}

// A Python function bound to a table that is never freed.
using Fast = PyObject* (*)(PyObject* self, PyObject* const* args, Py_ssize_t count);
inline PyMethodDef fast_method(const char* name, Fast function) {
  return {name, reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(function)), METH_FASTCALL, nullptr};
}
py::object bound(PyMethodDef* method, void* table);
template <class Table>
Table& table_of(PyObject* self) {
  return *static_cast<Table*>(PyCapsule_GetPointer(self, nullptr));
}

}  // namespace hfnn::node
