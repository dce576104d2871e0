// Gaussian error linear unit, elementwise over contiguous tensors. `tanh` selects the approximation. `queue`: see
// layer_norm.h.
//
// x and dx share a dtype, as do dy and forward's y: the same dtype, or float32 for bfloat16 or float16 x, as under
// autocast. `rebuild` writes y with the bits of forward's float32 y cast to the dtype of y.
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
