// Attention: everything for which torch.nn.functional.scaled_dot_product_attention needs a dense mask, in O(T + S)
// memory.
//
// q (B, H, T, D), k (B, G, S, D), v (B, G, S, E), o (B, H, T, E): one dtype, last stride 1, other strides arbitrary. H
// is a multiple of G: query head h reads key head h / (H / G). The statistics lse, delta (B, H, T) are contiguous
// float32 (float64 for float64). For query i and key j of batch element b and head h:
//
//   u = scale q_i . k_j                 s = softcap tanh(u / softcap) + bias_ij - slope |i + shift - j|
//   p = exp(s - lse_i),                 lse_i = log(sum_j exp(s) + exp(sink_h)),     o_i = sum_j p m v_j
//   m = 0 or 1 / (1 - p'): dropout, see below.
//
// softcap 0: none. A pair counts if all of the following hold. A query without any key has o = 0 and lse = -inf (with
// sinks: lse of the sink alone). If `uniform`, it has lse = -inf, but sees all keys with p = 1 / S, as if a number that
// absorbs the scores were added to them in place of bias: ds is that of these p, so q and k have gradients, and dbias
// is 0. Not with starts.
//   -left <= j - (i + shift) <= right   left, right: -1 for no limit; causal is right = 0
//   first <= j < last                   bounds (B, 2) int32: {first, last}; none: all keys
//   bit j of bits_i is 1                bits (B, H, T, ceil(S / 8)) uint8, little-endian along the keys
// tiles (B, H, ceil(T / 128), ceil(S / 128)) uint8 summarises bits by tiles of 128 x 128: 0 if no bit is set, 2 if all
// bits of existing pairs are set, else 1. A kernel may skip tiles with 0, and need not read bits of tiles with 2.
//
// bias (B, H, T, S) has the dtype of q or float32; slopes (B, H) float32; sinks (H,) float32. bits, tiles, bias and
// slopes have any strides, 0 where they are broadcast. With bias, and only then, there is `sums` (B, H, T), like lse:
// lse is then the largest score, and sums the sum of exp(s - lse), or 1 if there is no key. Their sum log(sums) + lse
// would lose the first term where a row of bias is very negative, as that of a hidden query of a finite mask.
//
// starts_q, starts_k (n + 1) int32, both or neither, for packed sequences: B is 1, and queries starts_q[n] <= i <
// starts_q[n + 1] see only the keys starts_k[n] <= j < starts_k[n + 1]. In windows, slopes and dropout's j, i and j
// then count from the start of the sequence. bits, tiles, bias and bounds cannot be combined with starts. Rows of no
// sequence are not written. The bits of a sequence's result do not depend on the other sequences.
//
// Dropout, threshold > 0: m = 1 / (1 - threshold / 65536) if the pair's random number is >= threshold, else 0. The
// number of pair (b, h, i, j): half j % 2 (0: low) of word j % 8 / 2 of Philox4x32-10 (philox.h) with key (seed low,
// seed high) and counter (c low, c high, 0, 0x68666e61), c = offset + ((b H + h) T + i) ceil(S / 8) + j / 8 in 64 bits.
// Here i counts over all of T, j from the start of its sequence. `pair`: see dropout.h.
//
// Backward, with delta_i = do_i . o_i. If lse has a gradient, the room subtracts it from delta.
//   dp = m do_i . v_j,  ds = p (dp - delta_i),  dv_j = sum_i p m do_i,  dbias = ds,  du = ds (1 - tanh(u / softcap)^2),
//   dq_i = scale sum_j du k_j,  dk_j = scale sum_i du q_i
// dq, dk, dv: last stride 1, others arbitrary. dk and dv are summed over the query heads of a key head. dbias (B or 1,
// H or 1, T, S) is contiguous, has the dtype of bias, and is summed over dimensions of size 1. dq, dk, dv, dbias may be
// absent. No atomics: the same bits in every run.
#pragma once
#include "tensor.h"

namespace hfnn {

struct Attention {
  void (*forward)(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& o, const Tensor& lse,
                  const Tensor& sums, const Tensor& bits, const Tensor& tiles, const Tensor& bias, const Tensor& slopes,
                  const Tensor& sinks, const Tensor& bounds, const Tensor& starts_q, const Tensor& starts_k,
                  double scale, double softcap, int64_t left, int64_t right, int64_t shift, bool uniform,
                  int64_t threshold, int64_t seed, int64_t offset, const Tensor& pair, int64_t queue);
  void (*delta)(const Tensor& o, const Tensor& dout, const Tensor& delta, int64_t queue);
  void (*backward)(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& lse, const Tensor& sums,
                   const Tensor& dout, const Tensor& delta, const Tensor& dq, const Tensor& dk, const Tensor& dv,
                   const Tensor& dbias, const Tensor& bits, const Tensor& tiles, const Tensor& bias,
                   const Tensor& slopes, const Tensor& bounds, const Tensor& starts_q, const Tensor& starts_k,
                   double scale, double softcap, int64_t left, int64_t right, int64_t shift, bool uniform,
                   int64_t threshold, int64_t seed, int64_t offset, const Tensor& pair, int64_t queue);
};
extern const Attention attention_cpu;

}  // namespace hfnn
