// Parts of activations on the CPU, besides exp_cpu.h: the normal distribution for GELU, and the sigmoid of its tanh
// form. float32 uses approximations that vectorise, float64 the standard library.
#pragma once
#include "exp_cpu.h"

namespace hfnn {

// The normal distribution: cdf = Phi(x), pdf = exp(-x^2 / 2) / sqrt(2 pi).
template <class T>
struct Normal {
  T cdf, pdf;
};

// The upper tail Phi(-t) is exp(-t^2 / 2) times a smooth function: here a polynomial in v = pt / (1 + pt), p = 0.22,
// fitted to a relative error of 1e-8 below t = 4. At t = 0 it is exactly 1/2. For negative x nothing cancels.
HFNN_INLINE Normal<float> normal(float x) {
  const float t = std::fabs(x) > 14 ? 14 : std::fabs(x), pt = 0.22f * t, v = pt / (1 + pt);
  float smooth = -0.115025893f;
  smooth = madd(smooth, v, 0.397727698f);
  smooth = madd(smooth, v, -0.287985653f);
  smooth = madd(smooth, v, -0.956366837f);
  smooth = madd(smooth, v, 2.89431834f);
  smooth = madd(smooth, v, -3.97148776f);
  smooth = madd(smooth, v, 3.35191727f);
  smooth = madd(smooth, v, -1.81337428f);
  smooth = madd(smooth, v, 0.5f);
  const float bell = exp_negative(t * t * -0.5f), tail = bell * smooth;
  return {x < 0 ? tail : 1 - tail, bell * 0.398942280f};
}
HFNN_INLINE Normal<double> normal(double x) {
  return {std::erfc(x * -0.70710678118654752) * 0.5, std::exp(x * x * -0.5) * 0.39894228040143268};
}

// 0.5 (1 + tanh(u)) is the sigmoid of 2u, with u = sqrt(2 / pi) (x + 0.044715 x^3). This form does not cancel.
template <class T>
struct Sigmoid {
  T value, slope;  // the derivative with respect to 2u
};
template <class T>
HFNN_INLINE Sigmoid<T> sigmoid_2u(T x) {
  const T z = T(1.5957691216057308) * (x + T(0.044715) * (x * x * x));
  const T e = exp_negative(-std::fabs(z)), larger = 1 / (1 + e), smaller = e * larger;
  return {z < 0 ? smaller : larger, smaller * larger};
}

}  // namespace hfnn
