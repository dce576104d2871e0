// Exponentials, logarithms and tanh that vectorise, for float32. float64 uses the standard library.
#pragma once
#include "cpu.h"

namespace hfnn {

// exp(z) = 2^n * (1 + expm1(r)) to 1e-7, with |r| <= log(2) / 2. n is in the low bits.
struct Exp {
  uint32_t n;
  float expm1;
};
HFNN_INLINE Exp split_exp(float z) {
  constexpr float kRound = 12582912;  // 1.5 * 2^23: adding it leaves the nearest integer in the low bits
  const float shifted = madd(z, 1.44269504f, kRound), n = shifted - kRound;
  const float r = madd(n, 2.12194440e-4f, madd(n, -0.693359375f, z));  // log(2) in two parts
  const float tail =
      madd(madd(madd(madd(0.00139504857f, r, 0.00836888794f), r, 0.041666206f), r, 0.166665182f), r, 0.5f);
  return {bits_of(shifted), madd(tail, r * r, r)};
}

// exp(z) for z <= 0, and for values that rounding left slightly above 0. Subnormal results become 0.
HFNN_INLINE float exp_negative(float z) {
  const Exp e = split_exp(z);
  return z < -87 ? 0 : (e.expm1 + 1) * float_of((e.n + 127) << 23);
}
HFNN_INLINE double exp_negative(double z) { return std::exp(z); }

// exp(-x) for every x. Infinite where float32 overflows, as in torch; subnormal results become 0. The factor 2^n is
// applied as 2 * 2^(n - 1), because 2^128 is not a float32.
HFNN_INLINE float exp_minus(float x) {
  const float z = x < -89 ? 89 : -x;
  const Exp e = split_exp(z);
  return z < -87 ? 0 : (e.expm1 + 1) * 2 * float_of((e.n + 126) << 23);
}
HFNN_INLINE double exp_minus(double x) { return std::exp(-x); }

// tanh(u) = 1 - 2 e / (1 + e) with e = exp(-2 |u|). Near 0, where this cancels, a polynomial fitted to 5e-9.
HFNN_INLINE float tanh_of(float u) {
  const float size = std::fabs(u) > 10 ? 10 : std::fabs(u), square = size * size;  // from 10 on, tanh is 1 in float32
  const float e = exp_negative(-2 * size);
  float p = -0.000349694252f;
  p = madd(p, square, 0.00227287109f);
  p = madd(p, square, -0.00791004766f);
  p = madd(p, square, 0.021464346f);
  p = madd(p, square, -0.0538728721f);
  p = madd(p, square, 0.133322462f);
  p = madd(p, square, -0.333332896f);
  return std::copysign(size < 1 ? madd(p * square, size, size) : 1 - 2 * e / (1 + e), u);
}
HFNN_INLINE double tanh_of(double u) { return std::tanh(u); }

// log(y) for a normal, finite y > 0: k log(2) + log(1 + r), with y = 2^k (1 + r) and 1 + r between sqrt(1/2) and
// sqrt(2). The polynomial is fitted to a relative error of 6e-9.
HFNN_INLINE float log_positive(float y) {
  constexpr uint32_t kRootHalf = 0x3f3504f3;
  const uint32_t above = bits_of(y) - kRootHalf;
  const float k = float(int32_t(above) >> 23), r = float_of((above & 0x7fffff) + kRootHalf) - 1;
  float p = -0.0763442963f;
  p = madd(p, r, 0.127615497f);
  p = madd(p, r, -0.131601945f);
  p = madd(p, r, 0.142017618f);
  p = madd(p, r, -0.166233569f);
  p = madd(p, r, 0.200012267f);
  p = madd(p, r, -0.250008225f);
  p = madd(p, r, 0.333333313f);
  const float tail = madd(madd(p, r, -0.5f), r * r, k * -2.12194440e-4f);  // log(2) in two parts
  return y > 0 ? madd(k, 0.693359375f, tail + r) : y;
}
HFNN_INLINE double log_positive(double y) { return std::log(y); }

// log(1 + e) for e >= 0, corrected for the rounding of 1 + e.
HFNN_INLINE float log1p_positive(float e) {
  const float y = 1 + e;
  return log_positive(y) + (e - (y - 1)) / y;
}
HFNN_INLINE double log1p_positive(double e) { return std::log1p(e); }

}  // namespace hfnn
