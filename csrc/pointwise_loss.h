// Losses that sum one function over all elements. The gradient is computed in the same pass.
//
//   d = x - target
//   kind 0, squared:   d^2                                         d/dx: 2 d
//   kind 1, Huber:     d^2 / 2 where |d| < parameter, else parameter (|d| - parameter / 2)
//   kind 2, smooth L1: d^2 / (2 parameter) where |d| < parameter, else |d| - parameter / 2     (parameter 0: |d|)
//   kind 3, binary cross-entropy of logits: max(x, 0) - x target + log(1 + exp(-|x|))      d/dx: sigmoid(x) - target
//
// x, target, dx: one dtype, one shape. sums (partials(numel),): float32 (float64 for float64), each over a run of
// elements whose length depends only on numel. dx: the unscaled derivative, or None.
#pragma once
#include "tensor.h"

namespace hfnn {

struct PointwiseLoss {
  int64_t (*partials)(int64_t numel);
  void (*forward)(const Tensor& x, const Tensor& target, const Tensor& sums, const Tensor& dx, int64_t kind,
                  double parameter, int64_t queue);
};
extern const PointwiseLoss pointwise_loss_cpu;

}  // namespace hfnn
