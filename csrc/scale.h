// y = factor * x, computed in float32 (float64 for float64) and rounded once. factor is one element, float32 (float64).
//
// y may be x itself. Then nothing is read or written if the factor is 1.
#pragma once
#include "tensor.h"

namespace hfnn {

struct Scale {
  void (*forward)(const Tensor& x, const Tensor& factor, const Tensor& y, int64_t queue);
};
extern const Scale scale_cpu;

}  // namespace hfnn
