// Errors about tensors that were written to before backward.
#pragma once
#include "kernel.h"

namespace hfnn::node {

// Raises the present error again. For a tensor that was written to, its text explains why the node needs the tensor
// (hfnn/core/written.py).
[[noreturn]] void throw_explained(const NodePtr& node, const c10::Error& error);
void bind_written(py::module_& m);

}  // namespace hfnn::node
