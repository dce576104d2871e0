#include "written.h"

#include <ATen/ops/empty_strided.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/python_cpp_function.h>

namespace hfnn::node {

namespace ag = torch::autograd;

void throw_written_to(const at::TensorOptions& options, at::IntArrayRef sizes, const ag::Edge& made_by,
                      const Mark& mark) {
  // Uses torch's own error, whose words differ between versions: a tensor with one element in memory stands for the one
  // that was written to.
  const Tensor x = at::empty_strided(sizes, std::vector<int64_t>(sizes.size(), 0), options);
  ag::impl::set_version_counter(x, c10::VariableVersion(mark.version));
  if (made_by.is_valid() && !dynamic_cast<ag::AccumulateGrad*>(made_by.function.get()))
    ag::impl::set_gradient_edge(x, made_by);
  const ag::SavedVariable saved(x, false);
  while (x._version() != mark.counter.current_version()) ag::impl::bump_version(x);
  saved.unpack();
  TORCH_INTERNAL_ASSERT(false, "torch did not object to a write");
}

static PyObject* explain = nullptr;

void throw_explained(const NodePtr& node, const c10::Error& error) {
  const std::string text = error.what_without_backtrace();
  if (!explain || text.find("modified by an inplace operation") == std::string::npos) throw;
  pybind11::gil_scoped_acquire gil;
  py::object self = py::reinterpret_steal<py::object>(torch::autograd::functionToPyObject(node));
  TORCH_CHECK(false, py::cast<std::string>(py::handle(explain)(self, text)));
}

void bind_written(py::module_& m) {
  m.def("explain_writes", [](py::object function) { explain = function.release().ptr(); });
}

}  // namespace hfnn::node
