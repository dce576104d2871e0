// Dropout, elementwise over contiguous tensors. It is its own backward. `queue`: see layer_norm.h.
//
// Element i of the flattened tensor is kept if its random word is >= threshold, and multiplied by scale. The word is
//   word i % 4 of Philox4x32-10 with key (seed low, seed high) and counter (c low, c high, 0, 0x68666e6e),
//   c = offset + i / 4 in 64 bits.
// Integers only, so one (seed, offset) gives the same mask on the CPU, in Triton and in CUDA. The last counter word
// separates these numbers from those that torch draws with the same seed. `pair`, if given, is an int64 tensor {seed,
// offset} on the device, and replaces seed and offset (CUDA graphs).
//
// x and y share a dtype. On the CPU and in Triton, one may be float32 and the other a 16-bit dtype.
#pragma once
#include "tensor.h"

namespace hfnn {

struct Dropout {
  void (*forward)(const Tensor& x, const Tensor& y, int64_t threshold, double scale, int64_t seed, int64_t offset,
                  const Tensor& pair, int64_t queue);
  // y = residual + dropped x, rounded once. residual and y share a dtype: that of x, or float32.
  void (*add)(const Tensor& x, const Tensor& residual, const Tensor& y, int64_t threshold, double scale, int64_t seed,
              int64_t offset, const Tensor& pair, int64_t queue);
};
extern const Dropout dropout_cpu, dropout_cuda;

}  // namespace hfnn
