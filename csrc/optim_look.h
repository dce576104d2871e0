// What a step checks about the tensors for which its table was made, in one call for all. It runs at every step, so it
// is not in Python; hfnn/optim/look.py has the same functions as a fallback.
//
//   look   (parameters, gradients, layouts), as bytes: the addresses, int64, 0 for an absent gradient; and for each
//          parameter and its gradient the dtype, device, shape and strides, or that it is absent. None if no kernel
//          can read one of the tensors.
//   same   whether `kept` is exactly these items, followed by the values of those that are dicts: the same objects, in
//          the same order.
#pragma once
#include <optional>
#include <vector>

#include "caster.h"

namespace hfnn::detail {

class Look {
 public:
  explicit Look(size_t tensors) : layouts_(8 * tensors + kMost) {}

  // False if it cannot be read.
  bool add(PyObject* x, int64_t& address) {
    if (layouts_.size() - size_ < kMost) layouts_.resize(2 * layouts_.size());
    int64_t *first = layouts_.data() + size_, *end = first;
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

  py::bytes layouts() const { return bytes(layouts_.data(), size_); }

  static py::bytes bytes(const int64_t* numbers, size_t n) {
    return py::bytes(reinterpret_cast<const char*>(numbers), n * sizeof(int64_t));
  }

 private:
  static constexpr size_t kMost = 1 + 2 * Tensor::kMaxDims;  // numbers per tensor
  Tensor tensor_;  // reused, because clearing it takes longer than reading into it
  std::vector<int64_t> layouts_;
  size_t size_ = 0;
};

// grads: a list, or None for each parameter's `.grad`.
inline py::object look(const py::list& params, const std::optional<py::list>& grads) {
  static PyObject* const name = PyUnicode_InternFromString("grad");
  const size_t n = params.size();
  if (grads && grads->size() != n) throw py::value_error("look: as many gradients as parameters, or None");
  Look found(2 * n);
  std::vector<int64_t> at(n), grads_at(n);
  for (size_t i = 0; i < n; ++i) {
    PyObject* p = PyList_GET_ITEM(params.ptr(), i);
    py::object g = grads ? py::reinterpret_borrow<py::object>(PyList_GET_ITEM(grads->ptr(), i))
                         : py::reinterpret_steal<py::object>(PyObject_GetAttr(p, name));
    if (!g) throw py::error_already_set();
    if (!found.add(p, at[i]) || !found.add(g.ptr(), grads_at[i])) return py::none();
  }
  return py::make_tuple(Look::bytes(at.data(), n), Look::bytes(grads_at.data(), n), found.layouts());
}

inline bool same(const py::list& items, const py::list& kept) {
  Py_ssize_t k = 0;
  const Py_ssize_t n = PyList_GET_SIZE(kept.ptr());
  auto next_is = [&](PyObject* item) { return k < n && PyList_GET_ITEM(kept.ptr(), k++) == item; };
  for (py::handle item : items)
    if (!next_is(item.ptr())) return false;
  PyObject *key, *value;
  for (py::handle item : items)
    if (PyDict_Check(item.ptr()))
      for (Py_ssize_t at = 0; PyDict_Next(item.ptr(), &at, &key, &value);)
        if (!next_is(value)) return false;
  return k == n;
}

}  // namespace hfnn::detail
