// Rotary position embedding of the heads of queries and keys in one pass.
//
// q, yq (B, H, S, D), k, yk (B, G, S, D): last stride 1, others arbitrary; k and yk may be absent. q and k share a
// dtype, as do yq and yk. cos, sin (B or 1, P, W): contiguous, one dtype. positions (B or 1, S) int64, contiguous:
// token s of batch element b reads row positions[b, s], or row s without positions. The first R = `rotary` of the D
// columns are rotated in R / 2 pairs, the others are copied. Pair i is the columns (a, b) = (i, i + R / 2), or (2 i, 2
// i + 1) with `interleaved`:
//
//   y_a = x_a cos_a - x_b sin_a,     y_b = x_b cos_b + x_a sin_b                           W = R
//   y_a = x_a cos_a + x_b sin_b,     y_b = x_b cos_b - x_a sin_a                           transposed: the gradient
//
// With W = R / 2, cos_a = cos_b is column i of cos, and likewise for sin. Each product and the sum are rounded to
// float32 (float64) without fma: float32 results have the bits of torch's formula. A position outside the table is an
// error on the CPU and gives NaN on CUDA.
#pragma once
#include "tensor.h"

namespace hfnn {

struct Rope {
  void (*forward)(const Tensor& q, const Tensor& k, const Tensor& cos, const Tensor& sin, const Tensor& positions,
                  const Tensor& yq, const Tensor& yk, int64_t rotary, bool interleaved, bool transposed, int64_t queue);
};
extern const Rope rope_cpu;

}  // namespace hfnn
