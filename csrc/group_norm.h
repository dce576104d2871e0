// Group normalisation, with an activation behind it. A group is D = C / G channels side by side of one sample:
//
//   y = f(z),   z = (x - mean) * rstd * weight + bias,   rstd = 1 / sqrt(var + eps)
//   backward, with g = dy * f'(z), xhat = (x - mean) * rstd and n = D S elements of a group:
//   dbias = sum(g),  dweight = sum(g * xhat), of a channel;  of the group's sums
//   dx = rstd * (weight * g - sum(weight * g) / n - xhat * sum(weight * g * xhat) / n)
//
// `kind` and `slope` are f, as in batch_norm.h; f' is told from x.
//
// x, y, dy, dx (N, C, S), or where `last` (N, S, C): contiguous; dx is of the dtype of x, dy of that of y, which on the
// CPU is that of x. weight, bias (C,) or absent: 1 and 0. mean, rstd (N, G), and partials, as many numbers as
// `partials` says: dtype of the arithmetic.
// forward computes mean and rstd. rebuild is given them; both write the same bits into y.
// Of dx, dweight, dbias those that are absent are not computed. `queue` as in layer_norm.h.
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
