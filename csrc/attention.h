// Attention: everything that torch.nn.functional.scaled_dot_product_attention leaves to a dense mask, in O(T + S)
// memory.
//
// q (B, H, T, D), k (B, G, S, D), v (B, G, S, E), o (B, H, T, E), one dtype; the last stride of each is 1, the others
// are any. H is a multiple of G: query head h reads key head h / (H / G). Statistics are float32 (float64 for float64),
// contiguous: lse, delta (B, H, T). For query i and key j of batch b and head h:
//
//   u = scale q_i . k_j                 s = softcap tanh(u / softcap) + bias_ij - slope |i + shift - j|
//   p = exp(s - lse_i),                 lse_i = log(sum_j exp(s) + exp(sink_h)),     o_i = sum_j p m v_j
//   m = 0 or 1 / (1 - p'), the dropout: see below.
//
// softcap 0: none. A pair counts where all of these hold, and a query without any key has o = 0 and lse = -inf (the
// sink alone, with sinks):
//   -left <= j - (i + shift) <= right   left, right: -1 for no limit; causal is right = 0
//   first <= j < last                   bounds (B, 2) int32: {first, last}; none: all keys
//   bit j of bits_i is 1                bits (B, H, T, ceil(S / 8)) uint8, little-endian along the keys
// tiles (B, H, ceil(T / 128), ceil(S / 128)) uint8 come with bits: 0 where no bit of a tile of 128 x 128 is set, 2
// where all are that belong to a pair, 1 otherwise; a kernel may skip tiles of 0 and read no bits in tiles of 2.
//
// bias (B, H, T, S) of the dtype of q or float32; slopes (B, H) float32; sinks (H,) float32. bits, tiles, bias and
// slopes have any strides: 0 where they are broadcast.
//
// starts_q, starts_k (n + 1) int32, both or neither: B is 1, and the queries starts_q[n] <= i < starts_q[n + 1] see the
// keys starts_k[n] <= j < starts_k[n + 1] of the same sequence alone. i and j above then count from the sequence's
// start, in the window and for slopes and dropout's j. bits, tiles, bias and bounds do not go with them. Rows of no
// sequence are not written. A sequence's result does not depend, to the bit, on the others beside it.
//
// Dropout, threshold > 0: m = 1 / (1 - threshold / 65536) where the pair's random number is >= threshold, else 0. The
// number of pair (b, h, i, j): half j % 2 (0: low) of word j % 8 / 2 of Philox4x32-10 (philox.h) with key (seed low,
// seed high) and counter (c low, c high, 0, 0x68666e61), c = offset + ((b H + h) T + i) ceil(S / 8) + j / 8 in 64 bits;
// here i counts in all of T, j from its sequence's start. `pair` as in dropout.h.
//
// Backward, with delta_i = do_i . o_i, from which the room subtracts the gradient of lse where there is one:
//   dp = m do_i . v_j,  ds = p (dp - delta_i),  dv_j = sum_i p m do_i,  dbias = ds,  du = ds (1 - tanh(u / softcap)^2),
//   dq_i = scale sum_j du k_j,  dk_j = scale sum_i du q_i
// dq, dk, dv: any strides but for the last, 1. A dk, dv sums over the query heads of its key head. dbias (B or 1, H or
// 1, T, S), contiguous, of the dtype of bias: sums over what is 1 there. dq, dk, dv, dbias may be absent. No atomics:
// the same bits in every run.
#pragma once
#include "tensor.h"

namespace hfnn {

struct Attention {
  void (*forward)(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& o, const Tensor& lse,
                  const Tensor& bits, const Tensor& tiles, const Tensor& bias, const Tensor& slopes,
                  const Tensor& sinks, const Tensor& bounds, const Tensor& starts_q, const Tensor& starts_k,
                  double scale, double softcap, int64_t left, int64_t right, int64_t shift, int64_t threshold,
                  int64_t seed, int64_t offset, const Tensor& pair, int64_t queue);
  void (*delta)(const Tensor& o, const Tensor& dout, const Tensor& delta, int64_t queue);
  void (*backward)(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& lse, const Tensor& dout,
                   const Tensor& delta, const Tensor& dq, const Tensor& dk, const Tensor& dv, const Tensor& dbias,
                   const Tensor& bits, const Tensor& tiles, const Tensor& bias, const Tensor& slopes,
                   const Tensor& bounds, const Tensor& starts_q, const Tensor& starts_k, double scale, double softcap,
                   int64_t left, int64_t right, int64_t shift, int64_t threshold, int64_t seed, int64_t offset,
                   const Tensor& pair, int64_t queue);
};
extern const Attention attention_cpu;

}  // namespace hfnn
