// Root-mean-square normalisation of the rows of x (R, C). layer_norm.h describes what both norms share.
//
//   y = x * rstd * (offset + weight)
#pragma once
#include "tensor.h"

namespace hfnn {

struct RmsNorm {
  int64_t (*partials)(int64_t rows, int64_t cols);  // partials is (1, P, C) here
  void (*forward)(const Tensor& x, const Tensor& weight, const Tensor& y, const Tensor& rstd, double eps, double offset,
                  int64_t queue);
  void (*rebuild)(const Tensor& x, const Tensor& weight, const Tensor& rstd, const Tensor& y, double offset,
                  int64_t queue);
  void (*backward)(const Tensor& dy, const Tensor& x, const Tensor& weight, const Tensor& rstd, const Tensor& dx,
                   const Tensor& dweight, const Tensor& partials, double offset, int64_t queue);
};
extern const RmsNorm rms_norm_cpu, rms_norm_cuda;

}  // namespace hfnn
