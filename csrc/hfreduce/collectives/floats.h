// 16-bit and 8-bit floats: exact conversion to float32, and back with rounding to nearest even, in integer arithmetic
// that vectorizes. The results equal torch's casts bit for bit, except for NaN payloads. Overflow in e4m3fn gives its
// largest number, as in torch 2.13 (2.11: NaN).
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#ifdef __CUDACC__
#define HFREDUCE_INLINE __host__ __device__ __forceinline__
#else
#define HFREDUCE_INLINE inline __attribute__((always_inline))
#endif

namespace hfreduce {

// A sign, kExponent bits, kMantissa bits, as in IEEE 754. Without infinities (e4m3fn), only all ones is a NaN; the
// other codes with the highest exponent are numbers.
template <int kExponent, int kMantissa, bool kInfinities>
struct Small {
  using Bits = std::conditional_t<kExponent + kMantissa == 15, uint16_t, uint8_t>;
  Bits bits;
};
using Float16 = Small<5, 10, true>;
using E5M2 = Small<5, 2, true>;
using E4M3 = Small<4, 3, false>;

struct BFloat16 {
  uint16_t bits;
};

HFREDUCE_INLINE uint32_t bits_of(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return bits;
}
HFREDUCE_INLINE float float_of(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}
HFREDUCE_INLINE constexpr float power_of_two(int exponent) {
  float x = 1;
  for (; exponent > 0; --exponent) x *= 2;
  for (; exponent < 0; ++exponent) x /= 2;
  return x;
}

HFREDUCE_INLINE float load(BFloat16 x) { return float_of(uint32_t(x.bits) << 16); }

HFREDUCE_INLINE void store(BFloat16& y, float x) {
  const uint32_t bits = bits_of(x), rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
  y.bits = uint16_t((bits & 0x7fffffff) > 0x7f800000 ? 0x7fc0 : rounded);
}

// Constants derived from the widths. A subnormal is an integer times 2^-kUnit.
template <int kExponent, int kMantissa>
struct FloatFormat {
  static constexpr int kShift = 23 - kMantissa;
  static constexpr int kBias = (1 << (kExponent - 1)) - 1;
  static constexpr int kUnit = kBias - 1 + kMantissa;
  static constexpr uint32_t kSign = 1u << (kExponent + kMantissa);
  static constexpr uint32_t kOnes = kSign - 1;  // all bits but the sign
  static constexpr uint32_t kInfinity = kOnes & ~((1u << kMantissa) - 1);
  static constexpr uint32_t kRebias = uint32_t(127 - kBias) << 23;
};

template <int kExponent, int kMantissa, bool kInfinities>
HFREDUCE_INLINE float load(Small<kExponent, kMantissa, kInfinities> x) {
  using L = FloatFormat<kExponent, kMantissa>;
  const uint32_t magnitude = x.bits & L::kOnes, sign = uint32_t(x.bits & L::kSign) << (31 - kExponent - kMantissa);
  // Infinities and NaNs get float32's highest exponent.
  const bool special = kInfinities ? magnitude >= L::kInfinity : magnitude == L::kOnes;
  const uint32_t high = kInfinities ? (255u - ((1u << kExponent) - 1)) << 23 : 0x7fc00000 - (L::kOnes << L::kShift);
  const uint32_t normal = (magnitude << L::kShift) + (special ? high : L::kRebias);
  const uint32_t subnormal = bits_of(float(int32_t(magnitude)) * power_of_two(-L::kUnit));
  return float_of((magnitude < (1u << kMantissa) ? subnormal : normal) | sign);
}

// Below the smallest normal, adding 2^(23 - kUnit) leaves the rounded multiple of 2^-kUnit in the low bits of the sum.
template <int kExponent, int kMantissa, bool kInfinities>
HFREDUCE_INLINE void store(Small<kExponent, kMantissa, kInfinities>& y, float x) {
  using L = FloatFormat<kExponent, kMantissa>;
  constexpr float kMagic = power_of_two(23 - L::kUnit);
  constexpr uint32_t kBelowHalf = (1u << (L::kShift - 1)) - 1;
  // The result of an overflow: infinity, or the largest number.
  constexpr uint32_t kOverflow = kInfinities ? L::kInfinity : L::kOnes - 1;
  const uint32_t magnitude = bits_of(x) & 0x7fffffff, sign = bits_of(x) >> 31 << (kExponent + kMantissa);
  const uint32_t normal = (magnitude - L::kRebias + kBelowHalf + (magnitude >> L::kShift & 1)) >> L::kShift;
  const uint32_t subnormal = bits_of(float_of(magnitude) + kMagic) - bits_of(kMagic);
  const uint32_t rounded = magnitude < L::kRebias + (1u << 23) ? subnormal : normal;
  const uint32_t number = rounded < kOverflow ? rounded : kOverflow;
  y.bits = typename Small<kExponent, kMantissa, kInfinities>::Bits((magnitude > 0x7f800000 ? L::kOnes : number) | sign);
}

}  // namespace hfreduce
