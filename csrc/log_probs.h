// Log-probabilities and entropies of the rows of logits x (R, C), in parts. z and p: see cross_entropy.h.
//
//   picked = z[target], or 0 where target is not in 0..C-1 (another process has it);  lse;  mean = sum_c p_c z_c
//   dx_c = (p_c (a + b z_c) + t [c = target]) dz_c/dx_c
//
// log-probability = picked - lse, entropy = lse - mean. target: int64 (R,). lse: (R,), float64. picked, mean (or None),
// a, b (or None) and t: (R,), float32 (float64 for float64 x). dx may be x itself.
#pragma once
#include "tensor.h"

namespace hfnn {

struct LogProbs {
  void (*forward)(const Tensor& x, const Tensor& target, const Tensor& picked, const Tensor& lse, const Tensor& mean,
                  double logit_scale, double softcap, int64_t queue);
  void (*backward)(const Tensor& x, const Tensor& target, const Tensor& lse, const Tensor& a, const Tensor& b,
                   const Tensor& t, const Tensor& dx, double logit_scale, double softcap, int64_t queue);
};
extern const LogProbs log_probs_cpu;

}  // namespace hfnn
