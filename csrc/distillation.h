// Divergence between the softmax p of student logits x (R, C) and the softmax q of teacher logits (R, C). Both logits
// are first multiplied by `scale` (1 / temperature).
//
//   beta = 0:  KL(q | p)        dx = scale * factor * (p - q)
//   beta = 1:  KL(p | q)        dx = scale * factor * p (log p - log q - loss)
//   between:   m = beta q + (1 - beta) p,  beta KL(q | m) + (1 - beta) KL(p | m)
//              dx = scale * factor * (1 - beta) p (log p - log m - KL(p | m))
//
// Generalised Jensen-Shannon divergence, Agarwal et al. 2024, https://arxiv.org/abs/2306.13649 x, teacher and dx have
// one dtype. loss (R,) or None and factor (R or 1 elements) are float32 (float64 for float64 x). dx may be x itself, or
// None.
#pragma once
#include "tensor.h"

namespace hfnn {

struct Distillation {
  void (*fused)(const Tensor& x, const Tensor& teacher, const Tensor& loss, const Tensor& factor, const Tensor& dx,
                double beta, double scale, int64_t queue);
};
extern const Distillation distillation_cpu;

}  // namespace hfnn
