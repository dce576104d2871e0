// Maps whose slope is told by the order of two numbers: two bits an element.
//
//   code: 0 where a == b, 1 where a < b, 2 where a > b, 3 where either is a NaN          (kind 0: b is 0)
//   kind 0 abs: y = |a|;   kind 1 maximum: max(a, b);   kind 2 minimum: min(a, b);   kind 3: codes alone, y is None
//   A NaN in a or b is a NaN in y. Of zeros of both signs, either may be y.
//   backward: dx = dy * factor[code], factors in the order equal, less, greater, unordered; where a factor is NaN, dx
//   is 0 whatever dy is. (A factor of 0 is multiplied with, as torch does in abs: it makes a NaN of an infinite dy.)
//
// a, b, y, dy, dx: contiguous, one dtype, one shape; b None for kind 0. dy may also be a single number for all
// elements, of shape (1,) and of the dtype of the arithmetic: float32, or float64 where dx is float64. codes: as in
// bits.h, width 2, or None in forward (kinds 0 to 2). `queue` as in layer_norm.h.
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
