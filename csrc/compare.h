// Elementwise functions whose slope depends on the order of two numbers. They keep two bits per element.
//
//   code: 0 where a == b, 1 where a < b, 2 where a > b, 3 where either is a NaN          (kind 0: b is 0)
//   kind 0 abs: y = |a|;   kind 1 maximum: max(a, b);   kind 2 minimum: min(a, b);   kind 3: codes only, y is None
//   A NaN in a or b is a NaN in y. Of zeros with different signs, either may be y.
//   backward: dx = dy * factor[code], with the factors in the order equal, less, greater, unordered. Where a factor is
//   NaN, dx is 0 whatever dy is. (A factor of 0 is multiplied, as torch does in abs: an infinite dy gives a NaN.)
//
// a, b, y, dy, dx: contiguous, one dtype, one shape; b is None for kind 0. dy may also be one number for all elements,
// of shape (1,) in the dtype of the arithmetic: float32, or float64 for float64 dx. codes: see bits.h, width 2; may be
// None in forward (kinds 0 to 2). `queue`: see layer_norm.h.
#pragma once
#include "tensor.h"

namespace hfnn {

struct Compare {
  void (*forward)(const Tensor& a, const Tensor& b, const Tensor& y, const Tensor& codes, int64_t kind, int64_t queue);
  void (*backward)(const Tensor& dy, const Tensor& codes, const Tensor& dx, double equal, double less, double greater,
                   double unordered, int64_t queue);
};
extern const Compare compare_cpu;

}  // namespace hfnn
