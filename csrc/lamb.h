// LAMB (You et al., arXiv:1904.00962) over any number of parameters, in three launches behind optim.h's `prepare`. That
// header has the table, W, the formats of states, control, squares, and how a parameter is kept; states are m and v.
//
//   moments   where nothing was found infinite: g += wd p (kDecoupled: not);  m = b1 m + b3 g with b3 = 1 - b1, or 1
//             where kSum is set;  v = b2 v + (1 - b2) g g. partials[tile] = {sum of p^2, sum of u^2} over a tile, where
//             u = (m / c1) / (sqrt(v / c2) + eps) + wd p (kDecoupled only), c = 1 - b^t (kBiasCorrection, else 1), t =
//             step, with m and v as they are kept: sums of W over at most a tile, of float64 above. control[kNorm] =
//             norm.
//   norms     of each row, the partials of its tiles, in order, in float64.
//   update    where nothing was found infinite: p -= lr |p| / |u| u, with the same u. The ratio is 1 where a norm is 0,
//   and
//             where wd = 0, unless kAlways is set.
//
// partials (T, 2), norms (N, 2): float64. hyper has the columns of optim.h, the first five and kOptions.
#pragma once
#include "optim.h"

namespace hfnn {

struct Lamb {
  // beside Optim::kMaximize and kDecoupled
  enum Options { kBiasCorrection = 16, kSum = 32, kAlways = 64 };

  void (*moments)(const Tensor& rows, const Tensor& owner, const Tensor& hyper, const Tensor& control,
                  const Tensor& squares, const Tensor& partials, int64_t queue);
  void (*norms)(const Tensor& rows, const Tensor& partials, const Tensor& norms, int64_t queue);
  // ema_decay, seed, offset: as in optim.h.
  void (*update)(const Tensor& rows, const Tensor& owner, const Tensor& hyper, const Tensor& control,
                 const Tensor& norms, double ema_decay, int64_t seed, int64_t offset, int64_t queue);
};
extern const Lamb lamb_cpu;

}  // namespace hfnn
