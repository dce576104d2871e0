// Checks whether dicts and lists still hold the same objects. hfnn/capture/watch.py checks thousands of them in one
// call before each replay. Contents holds no references: the caller keeps the objects alive.
#pragma once
#include <pybind11/pybind11.h>

#include <vector>

namespace hfnn::detail {
namespace py = pybind11;

class Contents {
 public:
  explicit Contents(const py::list& parts) {
    for (py::handle part : parts) {
      if (!PyDict_Check(part.ptr()) && !PyList_Check(part.ptr())) throw py::type_error("Contents: dicts and lists");
      parts_.push_back({part.ptr(), values(part.ptr())});
    }
  }

  // The index of the first part, from `begin` on, whose contents changed, or -1.
  Py_ssize_t changed(Py_ssize_t begin) const {
    for (size_t i = begin; i < parts_.size(); ++i)
      if (!same(parts_[i])) return Py_ssize_t(i);
    return -1;
  }

  // Makes the current contents of this part the expected ones.
  void look(size_t i) { parts_.at(i).values = values(parts_.at(i).part); }

 private:
  struct Part {
    PyObject* part;
    std::vector<PyObject*> values;
  };

  template <class F>
  static bool each(PyObject* part, F f) {  // whether f returned true for all values, in order
    if (PyList_Check(part)) {
      for (Py_ssize_t i = 0; i < PyList_GET_SIZE(part); ++i)
        if (!f(PyList_GET_ITEM(part, i))) return false;
      return true;
    }
    PyObject* value;
    for (Py_ssize_t at = 0; PyDict_Next(part, &at, nullptr, &value);)
      if (!f(value)) return false;
    return true;
  }
  static std::vector<PyObject*> values(PyObject* part) {
    std::vector<PyObject*> found;
    each(part, [&](PyObject* value) { return found.push_back(value), true; });
    return found;
  }
  static bool same(const Part& part) {
    size_t i = 0;
    const auto& known = part.values;
    return each(part.part, [&](PyObject* value) { return i < known.size() && known[i++] == value; }) &&
           i == known.size();
  }

  std::vector<Part> parts_;
};

}  // namespace hfnn::detail
