// Piecewise linear maps with two slopes, and a bit an element that tells which one it is on.
//
//   kind              y                                                              bit
//   0 relu            x < 0 ? 0 : x                                                  !(x <= 0)
//   1 leaky_relu      x > 0 ? x : a x                                                x > 0
//   2 hardtanh        min(max(x, a), b)                                              !(x <= a || x >= b)
//   3 clamp           min(max(x, a), b)                                              x >= a && x <= b
//   4 threshold       x <= a ? b : x                                                 !(x <= a)
//   5 hardshrink      |x| <= a ? 0 : x                                               !(|x| <= a)
//   6 softshrink      x > a ? x - a : x < -a ? x + a : x * 0                         !(|x| <= b)
//   7 hardsigmoid     min(max(x + 3, 0), 6) / 6                                      x > -3 && x < 3
//
// torch compares with a rounded to the dtype of x in the backward of softshrink alone: that is its b.
// A NaN stays a NaN in y, and takes the slope that the comparisons above give it, which is torch's.
// backward: dx = dy * inside where the bit is set, dy * outside elsewhere; where a factor is 0, dx is 0 whatever dy is.
//
// x, y, dy, dx: contiguous, one dtype, one shape; arithmetic in float32 (float64 for float64). bits: as in bits.h,
// width 1, or None in forward. `queue` as in layer_norm.h.
#pragma once
#include "tensor.h"

namespace hfnn {

struct Piecewise {
  void (*forward)(const Tensor& x, const Tensor& y, const Tensor& bits, int64_t kind, double a, double b,
                  int64_t queue);
  void (*backward)(const Tensor& dy, const Tensor& bits, const Tensor& dx, double inside, double outside,
                   int64_t queue);
};
extern const Piecewise piecewise_cpu;

}  // namespace hfnn
