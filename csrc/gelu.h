// Gaussian error linear unit, elementwise over contiguous tensors of one dtype; `tanh` chooses the approximation.
// `queue` as in layer_norm.h.
#pragma once
#include "tensor.h"

namespace hfnn {

struct Gelu {
  void (*forward)(const Tensor& x, const Tensor& y, bool tanh, int64_t queue);
  void (*backward)(const Tensor& dy, const Tensor& x, const Tensor& dx, bool tanh, int64_t queue);
};
extern const Gelu gelu_cpu, gelu_cuda;

}  // namespace hfnn
