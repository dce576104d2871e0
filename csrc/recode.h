// Recovers a 16-bit number x from y = f(x) and a five-bit code, which selects one of the numbers with that y.
//
// `rank` (65536,) uint8: for the bit pattern of each x, its place among all x with the same y, below 32. `table`
// (65536,) int16: the bit patterns of all x, ordered by their y. `start` (65536,) int32: for the bit pattern of each y,
// where its x start in `table`. encode: codes of x, packed as in bits.h with width 5. decode: x from y and its codes.
//
// x, y: contiguous, bfloat16 or float16, one shape; packed (ceil(5 n / 8),) uint8. `queue`: see layer_norm.h.
#pragma once
#include "tensor.h"

namespace hfnn {

struct Recode {
  void (*encode)(const Tensor& x, const Tensor& rank, const Tensor& packed, int64_t queue);
  void (*decode)(const Tensor& y, const Tensor& packed, const Tensor& start, const Tensor& table, const Tensor& x,
                 int64_t queue);
};
extern const Recode recode_cpu;

}  // namespace hfnn
