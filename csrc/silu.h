// Sigmoid linear unit, elementwise over contiguous tensors of one dtype. `queue`: see layer_norm.h.
#pragma once
#include "tensor.h"

namespace hfnn {

struct Silu {
  void (*forward)(const Tensor& x, const Tensor& y, int64_t queue);
  void (*backward)(const Tensor& dy, const Tensor& x, const Tensor& dx, int64_t queue);
};
extern const Silu silu_cpu;

}  // namespace hfnn
