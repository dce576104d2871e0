// Packed codes of `width` bits. Code i is in the bits [width i, width (i + 1)) of the bytes, the lowest bit of a byte
// first. width is 1, 2, 4, 5 or 8. The bits after the last code are 0.
//
// codes (n,): uint8 (torch.bool for width 1), each below 2^width; packed (ceil(n width / 8),): uint8. Both contiguous,
// of any shape. `queue`: see layer_norm.h.
#pragma once
#include "tensor.h"

namespace hfnn {

struct Bits {
  void (*pack)(const Tensor& codes, const Tensor& packed, int64_t width, int64_t queue);
  void (*unpack)(const Tensor& packed, const Tensor& codes, int64_t width, int64_t queue);
};
extern const Bits bits_cpu;

}  // namespace hfnn
