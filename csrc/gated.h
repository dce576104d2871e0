// Gated products y = f(gate) * up, as in SwiGLU.
//
//   kind 0 silu: gate / (1 + exp(-gate));   1 gelu, erf form;   2 gelu, tanh form;   3 relu;   4 sigmoid (GLU);
//   5 quick gelu: gate / (1 + exp(-1.702 gate))
//   dgate = dy up f'(gate),   dup = dy f(gate)
//
// All tensors are (rows, cols) of one dtype. The elements of a row are contiguous; the row stride is free, so gate and
// up, or dgate and dup, may be halves of one tensor. dgate or dup is None if not wanted. The product is rounded once.
// Arithmetic in float32 (float64 for float64). The same gate and up always give the same bits of y. `queue`: see
// layer_norm.h.
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
