// RMS norm of each head of queries and keys, then rotary position embedding, in one pass.
//
//   n = x * rstd * (offset + weight),    rstd = 1 / sqrt(mean(x^2) + eps),    y = rope(n)
//
// q, k, yq, yk, cos, sin, positions, rotary and interleaved are as in rope.h; for the gradients, dyq is as yq and dq as
// q. wq, wk (D) and their gradients have one dtype. rstd_q (B, S, H), rstd_k (B, S, G): contiguous, float32 (float64
// for float64). Everything of k may be absent together; forward's rstd_q and rstd_k may be absent.
//
// rebuild: forward's yq, bit for bit, from forward's rstd.
// backward: dwq and dwk (both or neither) are summed over partials (2, P, D) in the dtype of rstd, with
// P = partials(B, S, D). Plane 0 belongs to the queries. No atomics: the same bits in every run.
#pragma once
#include "tensor.h"

namespace hfnn {

struct QkNormRope {
  int64_t (*partials)(int64_t batch, int64_t sequence, int64_t dims);
  void (*forward)(const Tensor& q, const Tensor& k, const Tensor& wq, const Tensor& wk, const Tensor& cos,
                  const Tensor& sin, const Tensor& positions, const Tensor& yq, const Tensor& yk, const Tensor& rstd_q,
                  const Tensor& rstd_k, double eps, double offset, int64_t rotary, bool interleaved, int64_t queue);
  void (*rebuild)(const Tensor& q, const Tensor& wq, const Tensor& rstd_q, const Tensor& cos, const Tensor& sin,
                  const Tensor& positions, const Tensor& yq, double offset, int64_t rotary, bool interleaved,
                  int64_t queue);
  void (*backward)(const Tensor& dyq, const Tensor& dyk, const Tensor& q, const Tensor& k, const Tensor& wq,
                   const Tensor& wk, const Tensor& rstd_q, const Tensor& rstd_k, const Tensor& cos, const Tensor& sin,
                   const Tensor& positions, const Tensor& dq, const Tensor& dk, const Tensor& dwq, const Tensor& dwk,
                   const Tensor& partials, double offset, int64_t rotary, bool interleaved, int64_t queue);
};
extern const QkNormRope qk_norm_rope_cpu;

}  // namespace hfnn
