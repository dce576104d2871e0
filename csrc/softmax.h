// Softmax, or its logarithm, of the rows of x (R, C).
//
//   y = exp(x - lse)    or    y = x - lse,    lse = log(sum(exp(x)))
//
// y has the dtype of x, or is float32. dy has the dtype of y, dx that of x.
#pragma once
#include "tensor.h"

namespace hfnn {

struct Softmax {
  void (*forward)(const Tensor& x, const Tensor& y, bool log, int64_t queue);
  void (*backward)(const Tensor& dy, const Tensor& y, const Tensor& dx, bool log, int64_t queue);
};
extern const Softmax softmax_cpu, softmax_cuda;

}  // namespace hfnn
