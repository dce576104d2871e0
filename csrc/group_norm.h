// Group normalisation, followed by an activation. A group is D = C / G consecutive channels of one sample:
//
//   y = f(z),   z = (x - mean) * rstd * weight + bias,   rstd = 1 / sqrt(var + eps)
//   backward, with g = dy * f'(z), xhat = (x - mean) * rstd and n = D S elements of a group:
//   dbias = sum(g),  dweight = sum(g * xhat), over a channel;  with sums over the group
//   dx = rstd * (weight * g - sum(weight * g) / n - xhat * sum(weight * g * xhat) / n)
//
// `kind` and `slope` select f, as in batch_norm.h. f' is computed from x.
//
// x, y, dy, dx (N, C, S), or (N, S, C) with `last`: contiguous. dx has the dtype of x, dy that of y, which on the CPU
// is that of x. weight, bias (C,), or absent for 1 and 0. mean, rstd (N, G), and partials, with as many numbers as
// `partials` returns, have the dtype of the arithmetic. forward computes mean and rstd. rebuild gets them. Both write
// the same bits to y. Absent ones of dx, dweight, dbias are not computed. `queue`: see layer_norm.h.
#pragma once
#include "tensor.h"

namespace hfnn {

struct GroupNorm {
  int64_t (*partials)(int64_t samples, int64_t channels, int64_t size, int64_t groups, bool last);
  void (*forward)(const Tensor& x, const Tensor& weight, const Tensor& bias, const Tensor& y, const Tensor& mean,
                  const Tensor& rstd, const Tensor& partials, double eps, int64_t kind, double slope, bool last,
                  int64_t queue);
  void (*rebuild)(const Tensor& x, const Tensor& weight, const Tensor& bias, const Tensor& y, const Tensor& mean,
                  const Tensor& rstd, int64_t kind, double slope, bool last, int64_t queue);
  void (*backward)(const Tensor& dy, const Tensor& x, const Tensor& weight, const Tensor& bias, const Tensor& mean,
                   const Tensor& rstd, const Tensor& dx, const Tensor& dweight, const Tensor& dbias,
                   const Tensor& partials, int64_t kind, double slope, bool last, int64_t queue);
};
extern const GroupNorm group_norm_cpu;

}  // namespace hfnn
