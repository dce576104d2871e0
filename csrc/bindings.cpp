// hfnn._C: `_C.cpu.<op>` and, when built with nvcc, `_C.cuda.<op>`; one bind() per op, whatever the device.
#include <pybind11/pybind11.h>

#include "caster.h"
#include "cross_entropy.h"
#include "distillation.h"
#include "dropout.h"
#include "gelu.h"
#include "layer_norm.h"
#include "log_probs.h"
#include "pointwise_loss.h"
#include "rms_norm.h"
#include "scale.h"
#include "silu.h"
#include "softmax.h"

namespace py = pybind11;
using namespace hfnn;
using Unlocked = py::call_guard<py::gil_scoped_release>;

#ifdef HFNN_CUDA
namespace hfnn {
const char* cuda_refusal();  // device.cu
}
#endif

static void bind(py::module_ m, const LayerNorm& op) {
  m.def("partials", op.partials);
  m.def("forward", op.forward, Unlocked());
  m.def("rebuild", op.rebuild, Unlocked());
  m.def("backward", op.backward, Unlocked());
}

static void bind(py::module_ m, const RmsNorm& op) {
  m.def("partials", op.partials);
  m.def("forward", op.forward, Unlocked());
  m.def("rebuild", op.rebuild, Unlocked());
  m.def("backward", op.backward, Unlocked());
}

static void bind(py::module_ m, const Gelu& op) {
  m.def("forward", op.forward, Unlocked());
  m.def("backward", op.backward, Unlocked());
}

static void bind(py::module_ m, const Silu& op) {
  m.def("forward", op.forward, Unlocked());
  m.def("backward", op.backward, Unlocked());
}

static void bind(py::module_ m, const Dropout& op) { m.def("forward", op.forward, Unlocked()); }

static void bind(py::module_ m, const Softmax& op) {
  m.def("forward", op.forward, Unlocked());
  m.def("backward", op.backward, Unlocked());
}

static void bind(py::module_ m, const CrossEntropy& op) {
  m.def("forward", op.forward, Unlocked());
  m.def("backward", op.backward, Unlocked());
  m.def("fused", op.fused, Unlocked());
}

static void bind(py::module_ m, const LogProbs& op) {
  m.def("forward", op.forward, Unlocked());
  m.def("backward", op.backward, Unlocked());
}

static void bind(py::module_ m, const Distillation& op) { m.def("fused", op.fused, Unlocked()); }

static void bind(py::module_ m, const PointwiseLoss& op) {
  m.def("partials", op.partials);
  m.def("forward", op.forward, Unlocked());
}

static void bind(py::module_ m, const Scale& op) { m.def("forward", op.forward, Unlocked()); }

PYBIND11_MODULE(_C, m) {
  py::module_ cpu = m.def_submodule("cpu");
  bind(cpu.def_submodule("layer_norm"), layer_norm_cpu);
  bind(cpu.def_submodule("rms_norm"), rms_norm_cpu);
  bind(cpu.def_submodule("gelu"), gelu_cpu);
  bind(cpu.def_submodule("silu"), silu_cpu);
  bind(cpu.def_submodule("dropout"), dropout_cpu);
  bind(cpu.def_submodule("softmax"), softmax_cpu);
  bind(cpu.def_submodule("cross_entropy"), cross_entropy_cpu);
  bind(cpu.def_submodule("log_probs"), log_probs_cpu);
  bind(cpu.def_submodule("distillation"), distillation_cpu);
  bind(cpu.def_submodule("pointwise_loss"), pointwise_loss_cpu);
  bind(cpu.def_submodule("scale"), scale_cpu);
#ifdef HFNN_CUDA
  py::module_ cuda = m.def_submodule("cuda");
  cuda.def("refusal", &cuda_refusal);  // why these kernels cannot run here, or None
  bind(cuda.def_submodule("layer_norm"), layer_norm_cuda);
  bind(cuda.def_submodule("rms_norm"), rms_norm_cuda);
  bind(cuda.def_submodule("gelu"), gelu_cuda);
  bind(cuda.def_submodule("dropout"), dropout_cuda);
  bind(cuda.def_submodule("softmax"), softmax_cuda);
  bind(cuda.def_submodule("cross_entropy"), cross_entropy_cuda);
#endif
}
