// A norm of a sum with dropout, the end of a transformer block, in one pass over its tensors.
//
//   sum = residual + dropped x,    y = norm(sum)
//
// `sum` (R, C) takes the place of x in the arguments of the norm's forward (layer_norm.h, rms_norm.h). y, mean and rstd
// are bitwise equal to that forward's; rebuild and backward are the norm's own, on `sum`. The next arguments select the
// kept elements of x, as in dropout.h; threshold 0 keeps all. residual and sum share a dtype: that of x, or float32.
#pragma once
#include "tensor.h"

namespace hfnn {

struct AddLayerNorm {
  void (*add)(const Tensor& x, const Tensor& residual, const Tensor& sum, const Tensor& weight, const Tensor& bias,
              const Tensor& y, const Tensor& mean, const Tensor& rstd, double eps, int64_t threshold, double scale,
              int64_t seed, int64_t offset, const Tensor& pair, int64_t queue);
};

struct AddRmsNorm {
  void (*add)(const Tensor& x, const Tensor& residual, const Tensor& sum, const Tensor& weight, const Tensor& y,
              const Tensor& rstd, double eps, double weight_offset, int64_t threshold, double scale, int64_t seed,
              int64_t offset, const Tensor& pair, int64_t queue);
};

extern const AddLayerNorm add_layer_norm_cpu;
extern const AddRmsNorm add_rms_norm_cpu;

}  // namespace hfnn
