// Rotary position embedding of the heads of queries and keys in one pass.
//
// q, yq (B, H, S, D), k, yk (B, G, S, D), any strides but for the last, which is 1; k and yk may be absent. q and k
// have one dtype, yq and yk have one. cos, sin (B or 1, P, W) contiguous, of one dtype; positions (B or 1, S) int64,
// contiguous: token s of batch b reads row positions[b, s], or row s where positions is absent. Of the D columns, R =
// `rotary` are turned in R / 2 pairs and the others are copied. Pair i is the columns (a, b) = (i, i + R / 2), or
// (2 i, 2 i + 1) when `interleaved`:
//
//   y_a = x_a cos_a - x_b sin_a,     y_b = x_b cos_b + x_a sin_b                           W = R
//   y_a = x_a cos_a + x_b sin_b,     y_b = x_b cos_b - x_a sin_a                           transposed: the gradient
//
// With W = R / 2, cos_a = cos_b is column i of cos, and so for sin. Each product and the sum are rounded to float32
// (float64), nothing is fused: for float32 the bits are those of the formula in torch. A position outside the table is
// an error on the CPU and gives NaN on CUDA.
#pragma once
#include "tensor.h"

namespace hfnn {

struct Rope {
  void (*forward)(const Tensor& q, const Tensor& k, const Tensor& cos, const Tensor& sin, const Tensor& positions,
                  const Tensor& yq, const Tensor& yk, int64_t rotary, bool interleaved, bool transposed, int64_t queue);
};
extern const Rope rope_cpu;

}  // namespace hfnn
