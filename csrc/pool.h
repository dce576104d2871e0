// Max pooling over three dimensions. The position of each maximum in its window is stored as a byte.
//
//   y[p, o, c] = max over k of x[p, i(o, k), c],   i(o, k) = o * stride - padding + k * dilation in each dimension
//   code[p, o, c] = the row-major index of that k in the window;   positions outside x are excluded
//   backward: dx[p, i, c] = the sum of dy over the windows o whose code points to i, in the order of o
//
// Of equal numbers the first is the maximum. A NaN wins; of several NaNs, the last. A window without a position inside
// x gives -infinity and the code 0, and contributes to no dx.
//
// x, dx (P, D, H, W, C), y, dy (P, oD, oH, oW, C): contiguous, one dtype. C is 1 if each channel is a plane of its own,
// counted in P. codes: uint8, shaped as y. window, stride, padding, dilation: of D, H, W; a window has at most 256
// positions. For pooling over one or two dimensions, sizes and windows of the others are 1. `queue`: see layer_norm.h.
#pragma once
#include <array>

#include "tensor.h"

namespace hfnn {

using Triple = std::array<int64_t, 3>;

struct Pool {
  void (*forward)(const Tensor& x, const Tensor& y, const Tensor& codes, Triple window, Triple stride, Triple padding,
                  Triple dilation, int64_t queue);
  void (*backward)(const Tensor& dy, const Tensor& codes, const Tensor& dx, Triple window, Triple stride,
                   Triple padding, Triple dilation, int64_t queue);
};
extern const Pool pool_cpu;

}  // namespace hfnn
