// hfnn._C: `_C.cpu.<op>` and, if built with nvcc, `_C.cuda.<op>`. An op's functions have the same names on every
// device.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "adafactor.h"
#include "add_norm.h"
#include "attention.h"
#include "batch_norm.h"
#include "bits.h"
#include "caster.h"
#include "compare.h"
#include "contents.h"
#include "cross_entropy.h"
#include "distillation.h"
#include "dropout.h"
#include "gated.h"
#include "gelu.h"
#include "group_norm.h"
#include "lamb.h"
#include "layer_norm.h"
#include "log_probs.h"
#include "masked_softmax.h"
#include "optim.h"
#include "optim_look.h"
#include "piecewise.h"
#include "pointwise_loss.h"
#include "pool.h"
#include "qk_norm_rope.h"
#include "rms_norm.h"
#include "rope.h"
#include "scale.h"
#include "silu.h"
#include "softmax.h"
#include "unary.h"

namespace py = pybind11;
using namespace hfnn;
using Unlocked = py::call_guard<py::gil_scoped_release>;

#ifdef HFNN_CUDA
namespace hfnn {
const char* cuda_refusal();  // device.cu
}
#endif

// The capsule names of ops that hfnn._autograd calls by function pointers.
template <class Op>
constexpr const char* kLent = nullptr;
#define HFNN_LENT(Op) \
  template <>         \
  constexpr const char* kLent<Op> = "hfnn::" #Op;
HFNN_LENT(BatchNorm)
HFNN_LENT(LayerNorm)
HFNN_LENT(RmsNorm)
HFNN_LENT(AddLayerNorm)
HFNN_LENT(AddRmsNorm)
HFNN_LENT(Gelu)
HFNN_LENT(Silu)
HFNN_LENT(Dropout)
HFNN_LENT(Gated)
HFNN_LENT(Unary)
#undef HFNN_LENT

// All function names that ops use.
// clang-format off
#define HFNN_NAMES(F)                                                                                              \
  F(partials) F(forward) F(rebuild) F(backward) F(add) F(fused) F(delta) F(pack) F(unpack)                         \
  F(prepare) F(moments) F(sums) F(factors) F(norms) F(scale) F(update)
// clang-format on

// def_<name>(m, op, 0) binds an op's function of that name, if it has one.
#define HFNN_DEF(name)                                                                   \
  template <class Op>                                                                    \
  static auto def_##name(py::module_& m, const Op& op, int) -> decltype(void(op.name)) { \
    m.def(#name, op.name, Unlocked());                                                   \
  }                                                                                      \
  template <class Op>                                                                    \
  static void def_##name(py::module_&, const Op&, long) {}
HFNN_NAMES(HFNN_DEF)
#undef HFNN_DEF

template <class Op>
static void bind(py::module_ m, const Op& op, const char* functions = "functions") {
  if (kLent<Op>) m.attr(functions) = py::capsule(&op, kLent<Op>);
#define HFNN_CALL(name) def_##name(m, op, 0);
  HFNN_NAMES(HFNN_CALL)
#undef HFNN_CALL
}

// For optimizers that use the partial sums and `prepare` of optim.cpp.
template <class Op>
static void bind_optimizer(py::module_ m, const Op& op) {
  def_partials(m, optim_cpu, 0);
  def_prepare(m, optim_cpu, 0);
  bind(m, op);
}

PYBIND11_MODULE(_C, m) {
  py::module_ cpu = m.def_submodule("cpu");
  bind(cpu.def_submodule("layer_norm"), layer_norm_cpu);
  bind(cpu.def_submodule("layer_norm"), add_layer_norm_cpu, "add_functions");
  bind(cpu.def_submodule("rms_norm"), rms_norm_cpu);
  bind(cpu.def_submodule("rms_norm"), add_rms_norm_cpu, "add_functions");
  bind(cpu.def_submodule("batch_norm"), batch_norm_cpu);
  bind(cpu.def_submodule("group_norm"), group_norm_cpu);
  bind(cpu.def_submodule("gelu"), gelu_cpu);
  bind(cpu.def_submodule("silu"), silu_cpu);
  bind(cpu.def_submodule("dropout"), dropout_cpu);
  bind(cpu.def_submodule("softmax"), softmax_cpu);
  bind(cpu.def_submodule("masked_softmax"), masked_softmax_cpu);
  bind(cpu.def_submodule("cross_entropy"), cross_entropy_cpu);
  bind(cpu.def_submodule("log_probs"), log_probs_cpu);
  bind(cpu.def_submodule("distillation"), distillation_cpu);
  bind(cpu.def_submodule("pointwise_loss"), pointwise_loss_cpu);
  bind(cpu.def_submodule("scale"), scale_cpu);
  bind(cpu.def_submodule("unary"), unary_cpu);
  bind(cpu.def_submodule("rope"), rope_cpu);
  bind(cpu.def_submodule("qk_norm_rope"), qk_norm_rope_cpu);
  bind(cpu.def_submodule("gated"), gated_cpu);
  bind(cpu.def_submodule("compare"), compare_cpu);
  bind(cpu.def_submodule("pool"), pool_cpu);
  bind(cpu.def_submodule("bits"), bits_cpu);
  bind(cpu.def_submodule("piecewise"), piecewise_cpu);
  bind(cpu.def_submodule("attention"), attention_cpu);
  bind_optimizer(cpu.def_submodule("lamb"), lamb_cpu);
  bind_optimizer(cpu.def_submodule("adafactor"), adafactor_cpu);
  bind(cpu.def_submodule("optim"), optim_cpu);
  py::module_ tables = m.def_submodule("optim");  // on the host, for every device
  tables.def("look", detail::look, py::arg("params"), py::arg("grads"), py::arg("states"), py::arg("chosen"));
  py::class_<detail::Contents>(m, "Contents")
      .def(py::init<const py::list&>())
      .def("changed", &detail::Contents::changed)
      .def("look", &detail::Contents::look);
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
