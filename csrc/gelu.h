// Gaussian error linear unit, elementwise over contiguous tensors; `tanh` chooses the approximation. `queue` as in
// layer_norm.h.
//
// x and dx share a dtype, as do dy and forward's y: the same, or float32 where x is bfloat16 or float16, as authors get
// it under autocast. `rebuild` gives that float32 y again as a cast to y's dtype leaves it, to the bit.
#pragma once
#include "tensor.h"

namespace hfnn {

struct Gelu {
  void (*forward)(const Tensor& x, const Tensor& y, bool tanh, int64_t queue);
  void (*rebuild)(const Tensor& x, const Tensor& y, bool tanh, int64_t queue);
  void (*backward)(const Tensor& dy, const Tensor& x, const Tensor& dx, bool tanh, int64_t queue);
};
extern const Gelu gelu_cpu, gelu_cuda;

}  // namespace hfnn
