// hfnn._C: `_C.cpu.<op>` and, when built with nvcc, `_C.cuda.<op>`; one bind() per op, whatever the device.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "adafactor.h"
#include "add_norm.h"
#include "attention.h"
#include "bits.h"
#include "caster.h"
#include "compare.h"
#include "cross_entropy.h"
#include "distillation.h"
#include "dropout.h"
#include "gated.h"
#include "gelu.h"
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
#include "recode.h"
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

// For hfnn._autograd, which calls kernels by their pointers.
template <class Functions>
static void lend(py::module_ m, const char* name, const Functions& op, const char* attribute = "functions") {
  m.attr(attribute) = py::capsule(&op, name);
}

static void bind(py::module_ m, const LayerNorm& op) {
  lend(m, "hfnn::LayerNorm", op);
  m.def("partials", op.partials);
  m.def("forward", op.forward, Unlocked());
  m.def("rebuild", op.rebuild, Unlocked());
  m.def("backward", op.backward, Unlocked());
}

static void bind(py::module_ m, const RmsNorm& op) {
  lend(m, "hfnn::RmsNorm", op);
  m.def("partials", op.partials);
  m.def("forward", op.forward, Unlocked());
  m.def("rebuild", op.rebuild, Unlocked());
  m.def("backward", op.backward, Unlocked());
}

static void bind(py::module_ m, const Gelu& op) {
  lend(m, "hfnn::Gelu", op);
  m.def("forward", op.forward, Unlocked());
  m.def("rebuild", op.rebuild, Unlocked());
  m.def("backward", op.backward, Unlocked());
}

static void bind(py::module_ m, const Silu& op) {
  lend(m, "hfnn::Silu", op);
  m.def("forward", op.forward, Unlocked());
  m.def("backward", op.backward, Unlocked());
}

static void bind(py::module_ m, const Dropout& op) {
  lend(m, "hfnn::Dropout", op);
  m.def("forward", op.forward, Unlocked());
  m.def("add", op.add, Unlocked());
}

static void bind(py::module_ m, const AddLayerNorm& op) {
  lend(m, "hfnn::AddLayerNorm", op, "add_functions");
  m.def("add", op.add, Unlocked());
}

static void bind(py::module_ m, const AddRmsNorm& op) {
  lend(m, "hfnn::AddRmsNorm", op, "add_functions");
  m.def("add", op.add, Unlocked());
}

static void bind(py::module_ m, const Softmax& op) {
  m.def("forward", op.forward, Unlocked());
  m.def("backward", op.backward, Unlocked());
}

static void bind(py::module_ m, const MaskedSoftmax& op) {
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

static void bind(py::module_ m, const Bits& op) {
  m.def("pack", op.pack, Unlocked());
  m.def("unpack", op.unpack, Unlocked());
}

static void bind(py::module_ m, const Piecewise& op) {
  m.def("forward", op.forward, Unlocked());
  m.def("backward", op.backward, Unlocked());
}

static void bind(py::module_ m, const Scale& op) { m.def("forward", op.forward, Unlocked()); }

static void bind(py::module_ m, const Pool& op) {
  m.def("forward", op.forward, Unlocked());
  m.def("backward", op.backward, Unlocked());
}

static void bind(py::module_ m, const Compare& op) {
  m.def("forward", op.forward, Unlocked());
  m.def("backward", op.backward, Unlocked());
}

static void bind(py::module_ m, const Gated& op) {
  lend(m, "hfnn::Gated", op);
  m.def("forward", op.forward, Unlocked());
  m.def("backward", op.backward, Unlocked());
}

static void bind(py::module_ m, const Unary& op) {
  lend(m, "hfnn::Unary", op);
  m.def("forward", op.forward, Unlocked());
  m.def("backward", op.backward, Unlocked());
}

static void bind(py::module_ m, const Rope& op) { m.def("forward", op.forward, Unlocked()); }

static void bind(py::module_ m, const QkNormRope& op) {
  m.def("partials", op.partials);
  m.def("forward", op.forward, Unlocked());
  m.def("rebuild", op.rebuild, Unlocked());
  m.def("backward", op.backward, Unlocked());
}

static void bind(py::module_ m, const Recode& op) {
  m.def("encode", op.encode, Unlocked());
  m.def("decode", op.decode, Unlocked());
}

static void bind(py::module_ m, const Attention& op) {
  m.def("forward", op.forward, Unlocked());
  m.def("delta", op.delta, Unlocked());
  m.def("backward", op.backward, Unlocked());
}

static void bind(py::module_ m, const Optim& op) {
  m.def("partials", op.partials);
  m.def("prepare", op.prepare, Unlocked());
  m.def("update", op.update, Unlocked());
}

static void bind(py::module_ m, const Lamb& op) {
  m.def("partials", optim_cpu.partials);
  m.def("prepare", optim_cpu.prepare, Unlocked());
  m.def("moments", op.moments, Unlocked());
  m.def("norms", op.norms, Unlocked());
  m.def("update", op.update, Unlocked());
}

static void bind(py::module_ m, const Adafactor& op) {
  m.def("partials", optim_cpu.partials);
  m.def("prepare", optim_cpu.prepare, Unlocked());
  m.def("sums", op.sums, Unlocked());
  m.def("factors", op.factors, Unlocked());
  m.def("norms", op.norms, Unlocked());
  m.def("scale", op.scale, Unlocked());
  m.def("update", op.update, Unlocked());
}

PYBIND11_MODULE(_C, m) {
  py::module_ cpu = m.def_submodule("cpu");
  bind(cpu.def_submodule("layer_norm"), layer_norm_cpu);
  bind(cpu.def_submodule("layer_norm"), add_layer_norm_cpu);
  bind(cpu.def_submodule("rms_norm"), rms_norm_cpu);
  bind(cpu.def_submodule("rms_norm"), add_rms_norm_cpu);
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
  bind(cpu.def_submodule("recode"), recode_cpu);
  bind(cpu.def_submodule("rope"), rope_cpu);
  bind(cpu.def_submodule("qk_norm_rope"), qk_norm_rope_cpu);
  bind(cpu.def_submodule("gated"), gated_cpu);
  bind(cpu.def_submodule("compare"), compare_cpu);
  bind(cpu.def_submodule("pool"), pool_cpu);
  bind(cpu.def_submodule("bits"), bits_cpu);
  bind(cpu.def_submodule("piecewise"), piecewise_cpu);
  bind(cpu.def_submodule("attention"), attention_cpu);
  bind(cpu.def_submodule("lamb"), lamb_cpu);
  bind(cpu.def_submodule("adafactor"), adafactor_cpu);
  bind(cpu.def_submodule("optim"), optim_cpu);
  py::module_ tables = m.def_submodule("optim");  // on the host, whatever the device
  tables.def("look", detail::look, py::arg("params"), py::arg("grads") = py::none());
  tables.def("same", detail::same);
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
