// Max pooling over three dimensions, with the place of each maximum in its window as a byte.
//
//   y[p, o, c] = max over k of x[p, i(o, k), c],   i(o, k) = o * stride - padding + k * dilation in each dimension
//   code[p, o, c] = the number of that k in the window, row-major;   positions outside x do not count
//   backward: dx[p, i, c] = the sum of dy over the windows o whose code leads to i, in the order of o
//
// The first of equal numbers is the maximum, and a NaN wins, the last of several. A window that has no position inside
// x gives -infinity and the code 0, which leads nowhere.
//
// x, dx (P, D, H, W, C), y, dy (P, oD, oH, oW, C): contiguous, one dtype. C is 1 where the channels are planes of their
// own, P. codes: uint8, as y. window, stride, padding, dilation: of D, H, W; a window has at most 256 positions.
// Pooling over one or two dimensions has sizes and windows of 1 in the others. `queue` as in layer_norm.h.
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
