// Shared by the files of rooms, and what bindings.cpp needs from each.
#pragma once
#include "../dropout.h"
#include "kernel.h"

namespace hfnn::node {

// Whether parameters of this process may be resharded: their memory is then freed or reused before backward.
bool sharded_parameters();
// Whether a CUDA graph is being captured on x's stream. Random numbers are then drawn on the device.
bool capturing(const Tensor& x);
// Whether a profiler counts the FLOPs of this thread's ops.
bool profiles_flops();
bool is_parameter(PyObject* argument);
// Whether a checkpoint of torch sees the tensors that are saved now. Needs the GIL.
bool in_checkpoint();
// Whether y may be rebuilt from a weight that is not in the graph: a parameter. A checkpoint's second forward may find
// a parameter where the first one had a tensor (torch.func.functional_call), and must save as many tensors.
inline bool is_source(PyObject* weight) { return is_parameter(weight) || in_checkpoint(); }
// Keeps a weight or bias, in the grad mode of the forward. keep: Kept::save or Kept::hold. A parameter that may be
// resharded is copied, because a consumer may rebuild y when the parameter's memory is gone.
inline void keep_parameter(Kept& kept, const Tensor& p, bool parameter, void (Kept::*keep)(const Tensor&, bool)) {
  const bool copies = p.defined() && parameter && sharded_parameters();
  (kept.*keep)(copies ? fault(kWrongCopy) ? p.mul(1.01) : p.clone() : p, parameter);
  if (copies) kept.copy_of(p);
}

struct DropoutKernel {
  explicit DropoutKernel(py::handle module) {
    load(module, "hfnn::Dropout", forward, &Dropout::forward, "forward");
    load(module, "hfnn::Dropout", add, &Dropout::add, "add");
  }
  Launch<In, In, int64_t, double, int64_t, int64_t, In> forward;
  Launch<In, In, In, int64_t, double, int64_t, int64_t, In> add;
};

struct DropoutTable : Table<DropoutKernel> {
  explicit DropoutTable(py::object op) : Table(std::move(op)) {}
};

// A dropout mask, defined by a seed and an offset. By default nothing is dropped. pair: both, drawn on the device at
// every replay of a CUDA graph.
struct Mask {
  int64_t threshold = 0;
  double scale = 1;
  Fresh seed{0}, offset{0};
  Tensor pair;

  Mask() = default;
  // Drops a fraction p. Seed and offset come from the default generator of x's device, as in `philox_seed` of
  // hfnn/ops/dropout.py.
  Mask(const Tensor& x, double p);
};

// addable: whether the kernels compute x + residual as torch does. finish_sum: adds the node of such a sum.
bool addable(const Tensor& x, const Tensor& residual);
void finish_sum(Tensor& total, const Tensor& x, const Tensor& residual, const DropoutKernel* kernel, const Mask& mask,
                PyObject* module);

// x in `dtype`, differentiable. For a tensor in the graph, consecutive consumers share one cast while one of them keeps
// it. Any other tensor may be refilled without a new version, so its cast is not shared.
Tensor shared_cast(const Tensor& x, ScalarType dtype);

// The weight that a node keeps under autocast: a parameter, or a leaf of the graph, as it is. Any other one may live
// for this node alone, and is cast, which is what torch keeps. Not in a checkpoint: its second forward may find a
// parameter there (torch.func.functional_call), and must save a tensor of the same dtype.
inline Tensor lasting(const Tensor& weight, PyObject* argument, ScalarType dtype) {
  const bool lives = is_parameter(argument) || (weight.is_leaf() && weight.requires_grad());
  if (lives || weight.scalar_type() == dtype || in_checkpoint()) return weight;
  return shared_cast(weight, dtype);
}

// A weight that a room kept. Under autocast (dtype is not its own) torch keeps a copy. module: named in the error if
// the weight was written to.
Tensor unpacked_weight(Kept& weight, ScalarType dtype, const char* module);

void bind_batch_norm(py::module_& m);
void bind_norm(py::module_& m);
void bind_smooth(py::module_& m);
void bind_gated(py::module_& m);
void bind_dropout(py::module_& m);
void bind_linear(py::module_& m);
void bind_conv(py::module_& m);
void bind_joint(py::module_& m);
void bind_described(py::module_& m);
void bind_cat(py::module_& m);

}  // namespace hfnn::node
