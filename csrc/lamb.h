// LAMB (You et al., arXiv:1904.00962) over any number of parameters: three launches after optim.h's `prepare`. optim.h
// describes the table, W, the state formats, control, squares, and how a parameter is stored. The states are m and v.
//
//   moments   unless an infinity was found: g += wd p (not with kDecoupled);  m = b1 m + b3 g, where b3 = 1 - b1, or 1
//             with kSum;  v = b2 v + (1 - b2) g g.  partials[tile] = {sum of p^2, sum of u^2} over the tile, where
//             u = (m / c1) / (sqrt(v / c2) + eps) + wd p (wd p only with kDecoupled),
//             c = 1 - b^t with kBiasCorrection, else 1,  t = step,  m and v as stored. Sums are in W over at most a
//             tile, in float64 above that. control[kNorm] = norm.
//   norms     of each row: the partials of its tiles added in order, in float64.
//   update    unless an infinity was found: p -= lr |p| / |u| u, with the same u. The ratio is 1 if either norm is 0,
//             and, without kAlways, if wd = 0.
//
// partials (T, 2), norms (N, 2): float64. hyper has optim.h's first five columns and kOptions.
#pragma once
#include "optim.h"

namespace hfnn {

struct Lamb {
  // in addition to Optim::kMaximize and kDecoupled
  enum Options { kBiasCorrection = 16, kSum = 32, kAlways = 64 };

  void (*moments)(const Tensor& rows, const Tensor& owner, const Tensor& hyper, const Tensor& control,
                  const Tensor& squares, const Tensor& partials, int64_t queue);
  void (*norms)(const Tensor& rows, const Tensor& partials, const Tensor& norms, int64_t queue);
  // ema_decay, seed, offset: see optim.h.
  void (*update)(const Tensor& rows, const Tensor& owner, const Tensor& hyper, const Tensor& control,
                 const Tensor& norms, double ema_decay, int64_t seed, int64_t offset, int64_t queue);
};
extern const Lamb lamb_cpu;

}  // namespace hfnn
