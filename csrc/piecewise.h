// Piecewise linear functions with two slopes. One bit per element stores the slope.
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
// softshrink's b is a rounded to the dtype of x: only in its backward does torch compare with the rounded number.
// A NaN stays a NaN in y. Its slope follows from the comparisons above, as in torch.
// backward: dx = dy * inside where the bit is set, else dy * outside. If a factor is 0, dx is 0 whatever dy is.
//
// x, y, dy, dx: contiguous, one dtype, one shape. Arithmetic in float32 (float64 for float64). bits: see bits.h, width
// 1; may be None in forward. `queue`: see layer_norm.h.
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
