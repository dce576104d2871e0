// Batch normalisation over all dimensions but the channels, with a sum and an activation behind it:
//
//   y = f(z),   z = (x - mean) * rstd * weight + bias + residual,   rstd = 1 / sqrt(var + eps)
//   backward, with g = dy * f'(z) and n = P S:  dresidual = g,  dbias = sum(g),  dweight = sum(g * xhat),
//   dx = rstd * weight * (g - sum(g) / n - xhat * sum(g * xhat) / n)  in training, where mean and rstd are of x, else
//   dx = rstd * weight * g
//
// rstd is 0 where var and eps both are. `kind` is f: the identity, relu, leaky_relu(slope), relu6, silu, hardswish.
//
// x, y, dy, dx, residual, dresidual (P, C, S): contiguous, one dtype. S is 1 where the channels are last in memory.
// weight, bias (C,) or absent: 1 and 0. mean, rstd (C,), partials (n, partials(P, C, S), C), n 3 in forward and 2 in
// backward: dtype of the arithmetic.
// forward computes mean and rstd, and moves running_mean and running_var, if there, by `momentum` towards mean and the
// unbiased variance. rebuild is given them; both write the same bits into y.
//
// bits, a flag an element, for a piecewise linear f: forward and rebuild write them if asked; backward, where there was
// a residual, reads them, and else tells f' from x. uint8: (ceil(P C / 8),) where S is 1, each 8 elements in memory a
// byte, the first one the lowest bit; else (P, C, ceil(S / 8)), where each plane begins a byte.
// Of dx, dresidual, dweight, dbias those that are absent are not computed. `queue` as in layer_norm.h.
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
