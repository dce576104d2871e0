// Layer normalisation of the rows of x (R, C). The CPU and CUDA share one signature: `queue` is the number of threads
// on the CPU and the raw stream on CUDA. Kernels fill the tensors that they are given; an absent output is not
// computed.
//
//   y = (x - mean) * rstd * weight + bias
//
// Each of these groups shares a dtype: x, dx; y, dy; weight, bias, dweight, dbias. mean, rstd (R,) and partials (2, P,
// C) are float32 (float64 for float64 x), with P = partials(R, C).
#pragma once
#include "tensor.h"

namespace hfnn {

struct LayerNorm {
  int64_t (*partials)(int64_t rows, int64_t cols);
  void (*forward)(const Tensor& x, const Tensor& weight, const Tensor& bias, const Tensor& y, const Tensor& mean,
                  const Tensor& rstd, double eps, int64_t queue);
  // Recomputes y bit for bit from the saved statistics. Its dtype may be narrower than forward's float32.
  void (*rebuild)(const Tensor& x, const Tensor& weight, const Tensor& bias, const Tensor& mean, const Tensor& rstd,
                  const Tensor& y, int64_t queue);
  void (*backward)(const Tensor& dy, const Tensor& x, const Tensor& weight, const Tensor& mean, const Tensor& rstd,
                   const Tensor& dx, const Tensor& dweight, const Tensor& dbias, const Tensor& partials, int64_t queue);
};
extern const LayerNorm layer_norm_cpu, layer_norm_cuda;

}  // namespace hfnn
