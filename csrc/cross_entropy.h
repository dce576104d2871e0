// Cross-entropy of the rows of logits x (R, C).
//
//   z = s x, or softcap * tanh(s x / softcap) where softcap is not 0        s = logit_scale
//   lse = log(sum_c exp(z_c)),  p = exp(z - lse)
//   loss = slope0 * lse - sum_c b_c z_c + z_loss * lse^2
//
// Row coefficients b, with slope0 = sum_c b_c and w = `weight` (C,), or all 1:
//   target t is a class (int64, (R,)):        b_c = (1 - smoothing) w_t [c = t] + smoothing / C * w_c
//   or q is a row of probabilities (R, C):    b_c = w_c ((1 - smoothing) q_c + smoothing / C)
// A row whose class is ignore_index has loss 0 and share 0.
//
//   dx_c = factor * ((slope0 + 2 z_loss lse) p_c - b_c) dz_c/dx_c,   0 in an ignored row
//
// x, dx: one dtype; q: that dtype or float32; weight: any floating dtype. lse (R,): float64, so that p is exact to the
// last bit of float32 even for large lse. The others are float32 (float64 for float64 x), (R,): loss; share, the row's
// weight in a mean (w_t, or 1 for probabilities), or None; slope = slope0, or None if not wanted. In backward, slope
// may be None if it is w_t (a class, and no weight or no smoothing). factor has R elements or 1. dx may be x itself. A
// class outside 0..C-1 that is not ignore_index is an error: std::out_of_range on the CPU, a message and a trap on the
// device (Triton: NaN).
#pragma once
#include "tensor.h"

namespace hfnn {

struct CrossEntropy {
  void (*forward)(const Tensor& x, const Tensor& target, const Tensor& weight, const Tensor& loss, const Tensor& share,
                  const Tensor& lse, const Tensor& slope, int64_t ignore_index, double smoothing, double z_loss,
                  double logit_scale, double softcap, int64_t queue);
  void (*backward)(const Tensor& x, const Tensor& target, const Tensor& weight, const Tensor& lse, const Tensor& slope,
                   const Tensor& factor, const Tensor& dx, int64_t ignore_index, double smoothing, double z_loss,
                   double logit_scale, double softcap, int64_t queue);
  // Both at once. loss, share, lse, slope are filled as in forward (all but loss may be None), dx as in backward.
  void (*fused)(const Tensor& x, const Tensor& target, const Tensor& weight, const Tensor& loss, const Tensor& share,
                const Tensor& lse, const Tensor& slope, const Tensor& factor, const Tensor& dx, int64_t ignore_index,
                double smoothing, double z_loss, double logit_scale, double softcap, int64_t queue);
};
extern const CrossEntropy cross_entropy_cpu, cross_entropy_cuda;

}  // namespace hfnn
