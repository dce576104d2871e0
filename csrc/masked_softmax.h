// Softmax of scaled, masked scores x (N, H, T, S). Each row may exclude columns.
//
//   z = scale x + mask,   or scale x where the boolean mask is 1; other columns are excluded
//   y = exp(z - lse),   lse = log(sum(exp(z)))
//   dx = scale y (dy - sum(dy y))
//
// causal: row i (of T) includes column j if j <= i + shift, where -T <= shift <= S. Later columns are not read.
// Excluded columns are 0 in y and dx, whatever x or dy holds there. A row is all 0 if it includes nothing, or if
// everything that it includes is -inf. Where y is 0, dx is 0 and dy is not read. An included NaN or +inf makes its row
// NaN.
//
// x, y, dy and dx are contiguous. y has the dtype of x, or one of the two is float32 and the other a 16-bit dtype; dy
// has the dtype of y, dx that of x. mask (N, H, T, S) or None: bool (uint8), the dtype of x, or float32. Its last
// stride is 0 or 1; other strides are arbitrary, 0 for broadcast dimensions. On CUDA there are fewer than 2^31 rows.
// `queue`: see layer_norm.h.
#pragma once
#include "tensor.h"

namespace hfnn {

struct MaskedSoftmax {
  void (*forward)(const Tensor& x, const Tensor& mask, const Tensor& y, double scale, bool causal, int64_t shift,
                  int64_t queue);
  void (*backward)(const Tensor& dy, const Tensor& y, const Tensor& dx, double scale, bool causal, int64_t shift,
                   int64_t queue);
};
extern const MaskedSoftmax masked_softmax_cpu;

}  // namespace hfnn
