// What a step checks about the tensors for which its table was made, in one call for all. It runs at every step, so it
// is not in Python; hfnn/optim/look.py has the same function as a fallback.
//
//   look   (addresses, addresses of the gradients, layouts), as bytes, and the written tensors. Addresses are int64, 0
//          for an absent gradient. For each parameter, its gradient and each value of a state: the dtype, device, shape
//          and strides, or that it is absent or no tensor; for parameters also which object. None if no kernel can read
//          one of the tensors. `chosen` has a byte for each state: whether its tensors, except `step`, are written.
#pragma once
#include <optional>
#include <string_view>
#include <vector>

#include "caster.h"

namespace hfnn::detail {

class Look {
 public:
  explicit Look(size_t tensors) : layouts_(8 * tensors + kMost) {}

  // Adds a tensor, or None as -1. False if it cannot be read.
  bool add(PyObject* x, int64_t& address) {
    int64_t *first = room(), *end = first;
    if (x == Py_None) {
      address = 0;
      *end++ = -1;
    } else {
      if (!read(x, tensor_)) return false;
      address = reinterpret_cast<int64_t>(tensor_.data);
      *end++ = int64_t(tensor_.dtype) << 32 | int64_t(uint16_t(tensor_.device)) << 8 | tensor_.dims;
      for (int i = 0; i < tensor_.dims; ++i) {
        *end++ = tensor_.shape[i];
        *end++ = tensor_.strides[i];
      }
    }
    size_ += end - first;
    return true;
  }

  void number(int64_t x) {
    *room() = x;
    ++size_;
  }
  // Of the tensor that was read last.
  bool single() const { return tensor_.numel() == 1; }

  py::bytes layouts() const { return bytes(layouts_.data(), size_); }

  static py::bytes bytes(const int64_t* numbers, size_t n) {
    return py::bytes(reinterpret_cast<const char*>(numbers), n * sizeof(int64_t));
  }

 private:
  static constexpr size_t kMost = 1 + 2 * Tensor::kMaxDims;  // numbers per tensor
  int64_t* room() {
    if (layouts_.size() - size_ < kMost) layouts_.resize(2 * layouts_.size());
    return layouts_.data() + size_;
  }
  Tensor tensor_;  // reused, because clearing it takes longer than reading into it
  std::vector<int64_t> layouts_;
  size_t size_ = 0;
};

// The local part of a DTensor; any other object as it is.
inline py::object local(PyObject* x, PyObject* plain) {
  static PyObject* const name = PyUnicode_InternFromString("_local_tensor");
  if (reinterpret_cast<PyObject*>(Py_TYPE(x)) != plain)
    if (PyObject* part = PyObject_GetAttr(x, name)) return py::reinterpret_steal<py::object>(part);
  PyErr_Clear();
  return py::reinterpret_borrow<py::object>(x);
}

// Whether a tensor is negated lazily: its memory has the values of the other sign. Such views, of the imaginary parts
// of conjugates, have strides of 2, with which gradients are copied for their rows. Those of one element count as
// contiguous.
inline bool negated(PyObject* x) {
  static PyObject* const name = PyUnicode_InternFromString("is_neg");
  return py::reinterpret_steal<py::object>(PyObject_CallMethodNoArgs(x, name)).ptr() != Py_False;
}

// False if a tensor among the values of this state cannot be read.
inline bool add_state(const py::dict& state, bool written, Look& found, std::vector<int64_t>& at, py::list& out) {
  static PyObject* const step = PyUnicode_InternFromString("step");
  PyTypeObject* const tensor = Torch::get().tensor;
  found.number(PyDict_GET_SIZE(state.ptr()));
  PyObject *key, *value;
  for (Py_ssize_t place = 0; PyDict_Next(state.ptr(), &place, &key, &value);) {
    if (!PyObject_TypeCheck(value, tensor)) {
      found.number(-2);  // no tensor
      continue;
    }
    at.emplace_back();
    if (!found.add(local(value, reinterpret_cast<PyObject*>(tensor)).ptr(), at.back())) return false;
    if (written && !(PyUnicode_Check(key) && PyUnicode_Compare(key, step) == 0)) out.append(py::handle(value));
  }
  return true;
}

// grads: a list, or None for each parameter's `.grad`.
inline py::object look(const py::list& params, const std::optional<py::list>& grads, const py::list& states,
                       const std::string_view chosen) {
  static PyObject* const name = PyUnicode_InternFromString("grad");
  const size_t n = params.size();
  if (grads && grads->size() != n) throw py::value_error("look: as many gradients as parameters, or None");
  Look found(2 * n + 4 * states.size());
  std::vector<int64_t> at(n), grads_at(n);
  at.reserve(n + 4 * states.size());
  for (size_t i = 0; i < n; ++i) {
    PyObject* p = PyList_GET_ITEM(params.ptr(), i);
    py::object g = grads ? py::reinterpret_borrow<py::object>(PyList_GET_ITEM(grads->ptr(), i))
                         : py::reinterpret_steal<py::object>(PyObject_GetAttr(p, name));
    if (!g) throw py::error_already_set();
    found.number(reinterpret_cast<int64_t>(p));
    if (!found.add(p, at[i]) || !found.add(g.ptr(), grads_at[i])) return py::none();
    if (!g.is_none() && found.single() && negated(g.ptr())) return py::none();
  }
  py::list written;
  for (size_t i = 0; i < states.size(); ++i) {
    PyObject* state = PyList_GET_ITEM(states.ptr(), i);
    if (!PyDict_Check(state))
      found.number(-3);  // no state
    else if (!add_state(py::reinterpret_borrow<py::dict>(state), i < chosen.size() && chosen[i], found, at, written))
      return py::none();
  }
  return py::make_tuple(Look::bytes(at.data(), at.size()), Look::bytes(grads_at.data(), n), found.layouts(), written);
}

}  // namespace hfnn::detail
