// Smooth functions of one input. Backward gets the output if the derivative can be computed from it, else the input.
//
//   kind             y                                               dy/dx, of what is kept
//   0 sigmoid        1 / (1 + exp(-x))                               y (1 - y)
//   1 tanh           tanh(x)                                         1 - y^2
//   2 softplus       a x > b ? x : log(1 + exp(a x)) / a             a y > b ? 1 : 1 - exp(-a y)
//   3 logsigmoid     min(x, 0) - log(1 + exp(-|x|))                  1 - exp(y)
//   4 elu            x > 0 ? b x : a b (exp(c x) - 1)                y > 0 ? b : c (y + a b)
//   5 softsign       x / (1 + |x|)                                   (1 - |y|)^2
//   6 exp            exp(x)                                          y
//   7 sqrt           sqrt(x)                                         1 / (2 y)
//   8 mish           x tanh(log(1 + exp(x)))                         of x
//   9 hardswish      x min(max(x + 3, 0), 6) / 6                     of x: 0 below -3, 1 above 3, else (2 x + 3) / 6
//  10 quick_gelu     x / (1 + exp(-1.702 x))                         of x
//  11 relu_squared   max(x, 0)^2                                     of x
//
// elu's a, b, c are torch's alpha, scale, input_scale. Where y has reached its limit in the dtype (elu's -a b), the
// slope is 0. hardswish's slope is 0 at -3 and 1 at 3, as in torch. No value or derivative cancels: 1 - exp(y) is
// -expm1(y). x, y, dy, dx and `kept` (y for kinds 0 to 7, x from 8 on): contiguous, one dtype, one shape. Arithmetic in
// float32 (float64 for float64). `queue`: see layer_norm.h.
#pragma once
#include "tensor.h"

namespace hfnn {

struct Unary {
  void (*forward)(const Tensor& x, const Tensor& y, int64_t kind, double a, double b, double c, int64_t queue);
  void (*backward)(const Tensor& dy, const Tensor& kept, const Tensor& dx, int64_t kind, double a, double b, double c,
                   int64_t queue);
};
extern const Unary unary_cpu;

}  // namespace hfnn
