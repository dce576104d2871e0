// Softmax of masked scores: x (N, H, T, S), scaled, of which each row may leave columns out.
//
//   z = scale x + mask,   or scale x where the boolean mask is 1, else nothing;   y = exp(z - lse),  lse =
//   log(sum(exp(z))) dx = scale y (dy - sum(dy y))
//
// causal: column j of row i (of T) counts where j <= i + shift; later ones are not read, and -T <= shift <= S. What
// does not count is 0 in y and dx, whatever x or dy is there, and a row in which nothing counts, or everything is -inf,
// is all 0. Where y is 0, dx is 0 and dy is not looked at. A NaN or +inf that counts makes a row NaN.
//
// x, y, dy and dx are contiguous. y has the dtype of x, or one of the two is float32 and the other a 16-bit one; dy is
// as y, dx as x in this. mask (N, H, T, S), or None: a bool (uint8), or of the dtype of x or float32; its last stride
// is 0 or 1, the others are any, 0 where it is broadcast. On CUDA there are fewer than 2^31
// rows. `queue` as in layer_norm.h.
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
