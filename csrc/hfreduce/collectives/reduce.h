// The arithmetic of every reduction: on the calling thread, in one pass over memory.
#pragma once

#include "types.h"

namespace hfreduce {

// out[i] = scale * op(factors[0] * inputs[0][i], ..., factors[n-1] * inputs[n-1][i]), in that order, so the bits do not
// depend on which rank computes it. `out` may be one of the inputs; otherwise they do not overlap. Any alignment.
//
// 16-bit and 8-bit floats are added (and scaled) in float32 and rounded once, to nearest even. e5m2 overflows to
// infinity; e4m3, which has none, to its largest number. min and max propagate NaN, as torch's do. boolean: sum, max
// and bor are "or"; prod, min and band are "and"; bxor is "xor"; avg is rejected. avg divides the sum by `divisor`, in
// float32 before rounding; for integers toward zero, as in NCCL.
//
//   factors  nullptr: all 1; only with premul_sum, floats only
//   divisor  of avg: the number of ranks; otherwise 1
//   stream   use non-temporal stores: for outputs that are larger than the caches and not read soon
void reduce(void* out, const void* const* inputs, const double* factors, int n, int64_t count, DType dtype, Op op,
            int64_t divisor, bool stream = false);

// Whether reduce takes this pair. Bit operations: integers and boolean. premul_sum: floats. avg: all but boolean.
bool supported(DType dtype, Op op);

}  // namespace hfreduce
