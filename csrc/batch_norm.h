// Batch normalisation over all dimensions but the channels, followed by a sum and an activation:
//
//   y = f(z),   z = (x - mean) * rstd * weight + bias + residual,   rstd = 1 / sqrt(var + eps)
//   backward, with g = dy * f'(z) and n = P S:  dresidual = g,  dbias = sum(g),  dweight = sum(g * xhat),
//   dx = rstd * weight * (g - sum(g) / n - xhat * sum(g * xhat) / n)  in training (mean and rstd are those of x), else
//   dx = rstd * weight * g
//
// rstd is 0 if var and eps are both 0. `kind` selects f: identity, relu, leaky_relu(slope), relu6, silu, hardswish.
//
// x, y, dy, dx, residual, dresidual (P, C, S): contiguous, one dtype. S is 1 if the channels are last in memory.
// weight, bias (C,), or absent for 1 and 0. mean, rstd (C,) and partials (n, partials(P, C, S), C), with n = 3 in
// forward and 2 in backward, have the dtype of the arithmetic. forward computes mean and rstd. It moves running_mean
// and running_var, if given, by `momentum` towards the mean and the unbiased variance. rebuild gets mean and rstd. Both
// write the same bits to y.
//
// bits: one flag per element, for a piecewise linear f. forward and rebuild write them if given. backward reads them if
// there was a residual; otherwise it computes f' from x. uint8: (ceil(P C / 8),) if S is 1, with 8 elements in memory
// order per byte, the first one in the lowest bit; else (P, C, ceil(S / 8)), where each plane starts a byte. Absent
// ones of dx, dresidual, dweight, dbias are not computed. `queue`: see layer_norm.h.
#pragma once
#include "tensor.h"

namespace hfnn {

struct BatchNorm {
  int64_t (*partials)(int64_t planes, int64_t channels, int64_t size);
  void (*forward)(const Tensor& x, const Tensor& weight, const Tensor& bias, const Tensor& residual, const Tensor& y,
                  const Tensor& bits, const Tensor& mean, const Tensor& rstd, const Tensor& running_mean,
                  const Tensor& running_var, const Tensor& partials, double momentum, double eps, int64_t kind,
                  double slope, int64_t queue);
  void (*rebuild)(const Tensor& x, const Tensor& weight, const Tensor& bias, const Tensor& residual, const Tensor& y,
                  const Tensor& bits, const Tensor& mean, const Tensor& rstd, int64_t kind, double slope,
                  int64_t queue);
  void (*backward)(const Tensor& dy, const Tensor& x, const Tensor& weight, const Tensor& bias, const Tensor& bits,
                   const Tensor& mean, const Tensor& rstd, const Tensor& dx, const Tensor& dresidual,
                   const Tensor& dweight, const Tensor& dbias, const Tensor& partials, bool training, int64_t kind,
                   double slope, int64_t queue);
};
extern const BatchNorm batch_norm_cpu;

}  // namespace hfnn
