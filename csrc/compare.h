// Maps whose slope is told by the order of two numbers: two bits an element.
//
//   code: 0 where a == b, 1 where a < b, 2 where a > b, 3 where either is a NaN          (kind 0: b is 0)
//   kind 0 abs: y = |a|;   kind 1 maximum: max(a, b);   kind 2 minimum: min(a, b);   kind 3: codes alone, y is None
//   A NaN in a or b is a NaN in y.
//   backward: dx = dy * factor[code], factors in the order equal, less, greater, unordered; where a factor is 0, dx is 0.
//
// a, b, y, dy, dx: contiguous, one dtype, one shape; b None for kind 0. codes: as in bits.h, width 2, or None in
// forward (kinds 0 to 2). `queue` as in layer_norm.h.
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
