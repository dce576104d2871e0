// Gated products y = f(gate) * up, as in SwiGLU.
//
//   kind 0 silu: gate / (1 + exp(-gate));   1 gelu, erf form;   2 gelu, tanh form;   3 relu;   4 sigmoid (GLU);
//   5 quick gelu: gate / (1 + exp(-1.702 gate))
//   dgate = dy up f'(gate),   dup = dy f(gate)
//
// All tensors are (rows, cols) of one dtype with rows that may be further apart than cols (a stride), so that gate and
// up, or dgate and dup, may be the halves of one tensor; the elements of a row are next to each other. dgate or dup is
// None where it is not wanted. The product is rounded once. Arithmetic in float32 (float64 for float64); y of the same
// gate and up has the same bits whenever it is computed. `queue` as in layer_norm.h.
#pragma once
#include "tensor.h"

namespace hfnn {

struct Gated {
  void (*forward)(const Tensor& gate, const Tensor& up, const Tensor& y, int64_t kind, int64_t queue);
  void (*backward)(const Tensor& dy, const Tensor& gate, const Tensor& up, const Tensor& dgate, const Tensor& dup,
                   int64_t kind, int64_t queue);
};
extern const Gated gated_cpu, gated_cuda;

}  // namespace hfnn
