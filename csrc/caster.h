// torch.Tensor -> hfnn::Tensor, for pybind11. Reads torch's DLPack exchange table if torch has one (about 50 ns per
// tensor), else Python attributes (about 300 ns). Sparse, meta, fake and complex tensors are refused.
#pragma once
#include <pybind11/pybind11.h>

#include "tensor.h"

namespace hfnn::detail {
namespace py = pybind11;

// The used part of dlpack.h 1.x. Its layouts are fixed for major version 1.
struct DLTensor {
  void* data;
  int32_t device_type, device_id, ndim;
  uint8_t code, bits;
  uint16_t lanes;
  int64_t *shape, *strides;
  uint64_t byte_offset;
};
struct DLApi {
  uint32_t major, minor;
  void *older, *allocate, *managed_from_object, *managed_to_object;
  int (*from_object)(void* object, DLTensor* out);
  int (*current_stream)(int32_t device_type, int32_t device_id, void** out);
};

struct Torch {  // looked up at the first conversion, never freed
  static constexpr int kDtypes = 9;
  static constexpr const char* kNames[kDtypes] = {"float32", "bfloat16", "float16", "float64", "int64",
                                                  "uint8",   "int32",    "int16",   "bool"};
  static constexpr Dtype kOurs[kDtypes] = {Dtype::float32, Dtype::bfloat16, Dtype::float16,
                                           Dtype::float64, Dtype::int64,    Dtype::uint8,
                                           Dtype::int32,   Dtype::int16,    Dtype::uint8};
  static constexpr int kCodes[kDtypes] = {2 << 8 | 32, 4 << 8 | 16, 2 << 8 | 16, 2 << 8 | 64, 0 << 8 | 64,
                                          1 << 8 | 8,  0 << 8 | 32, 0 << 8 | 16, 6 << 8 | 8};  // DLPack: code, bits
  PyTypeObject* tensor;
  const DLApi* api = nullptr;
  PyObject *data_ptr, *shape, *stride, *dtype, *get_device, *is_complex, *dtypes[kDtypes];

  Torch() {
    py::module_ torch = py::module_::import("torch");
    auto keep = [&](const char* attribute) { return py::object(torch.attr(attribute)).release().ptr(); };
    tensor = reinterpret_cast<PyTypeObject*>(keep("Tensor"));
    py::object capsule = py::getattr(torch.attr("Tensor"), "__dlpack_c_exchange_api__", py::none());
    if (PyCapsule_IsValid(capsule.ptr(), "dlpack_exchange_api")) {
      auto* found = static_cast<const DLApi*>(PyCapsule_GetPointer(capsule.ptr(), "dlpack_exchange_api"));
      if (found->major == 1 && found->from_object) api = found;
    }
    data_ptr = PyUnicode_InternFromString("data_ptr");
    shape = PyUnicode_InternFromString("shape");
    stride = PyUnicode_InternFromString("stride");
    dtype = PyUnicode_InternFromString("dtype");
    get_device = PyUnicode_InternFromString("get_device");
    is_complex = PyUnicode_InternFromString("is_complex");
    for (int i = 0; i < kDtypes; ++i) dtypes[i] = keep(kNames[i]);
  }
  static const Torch& get() {
    static const Torch* torch = new Torch;
    return *torch;
  }
};

inline bool from_api(const Torch& torch, PyObject* source, Tensor& t) {
  DLTensor d;
  if (torch.api->from_object(source, &d) || d.ndim > Tensor::kMaxDims) return false;
  if (d.device_type != 1 && d.device_type != 2) return false;  // the CPU, CUDA
  if (d.code == 5) return false;                               // complex, including conjugate views
  t.data = static_cast<char*>(d.data) + d.byte_offset;
  t.dims = d.ndim;
  t.device = d.device_type == 1 ? -1 : d.device_id;
  t.dtype = Dtype::other;
  for (int i = 0; i < Torch::kDtypes; ++i)
    if ((d.code << 8 | d.bits) == Torch::kCodes[i] && d.lanes == 1) t.dtype = Torch::kOurs[i];
  for (int i = 0; i < d.ndim; ++i) {
    t.shape[i] = d.shape[i];
    t.strides[i] = d.strides[i];
  }
  return true;
}

inline bool from_attributes(const Torch& torch, PyObject* source, Tensor& t) {
  auto get = [&](PyObject* name) { return py::reinterpret_steal<py::object>(PyObject_GetAttr(source, name)); };
  auto call = [&](PyObject* name) {
    return py::reinterpret_steal<py::object>(PyObject_CallMethodNoArgs(source, name));
  };
  py::object pointer = call(torch.data_ptr), is_complex = call(torch.is_complex);
  if (!pointer || !is_complex || is_complex.ptr() == Py_True) return false;
  py::object shape = get(torch.shape), strides = call(torch.stride), dtype = get(torch.dtype),
             device = call(torch.get_device);
  if (!shape || !strides || !dtype || !device || PyTuple_GET_SIZE(shape.ptr()) > Tensor::kMaxDims) return false;
  t.data = PyLong_AsVoidPtr(pointer.ptr());
  t.dims = int(PyTuple_GET_SIZE(shape.ptr()));
  t.device = int(PyLong_AsLong(device.ptr()));
  t.dtype = Dtype::other;
  for (int i = 0; i < Torch::kDtypes; ++i)
    if (dtype.ptr() == torch.dtypes[i]) t.dtype = Torch::kOurs[i];
  for (int i = 0; i < t.dims; ++i) {
    t.shape[i] = PyLong_AsLongLong(PyTuple_GET_ITEM(shape.ptr(), i));
    t.strides[i] = PyLong_AsLongLong(PyTuple_GET_ITEM(strides.ptr(), i));
  }
  return true;
}

// False, without a pending Python error, if no kernel can read it.
inline bool read(PyObject* source, Tensor& t) {
  const Torch& torch = Torch::get();
  if (!PyObject_TypeCheck(source, torch.tensor)) return false;
  bool done = (torch.api ? from_api : from_attributes)(torch, source, t) && (t.data || t.numel() == 0);
  if (PyErr_Occurred()) {
    PyErr_Clear();
    return false;
  }
  return done;
}

}  // namespace hfnn::detail

template <>
struct pybind11::detail::type_caster<hfnn::Tensor> {
  PYBIND11_TYPE_CASTER(hfnn::Tensor, const_name("torch.Tensor | None"));
  // Throws where a caster usually returns false: pybind11's message would print every argument, and printing a torch
  // tensor whose memory was freed is a segmentation fault.
  bool load(handle source, bool) {
    if (source.is_none() || hfnn::detail::read(source.ptr(), value)) return true;
    throw type_error(
        std::string("kernels take dense, real tensors with memory, of up to 8 dimensions, on the CPU or on "
                    "CUDA, or None; got a ") +
        Py_TYPE(source.ptr())->tp_name + " that is not one");
  }
};
