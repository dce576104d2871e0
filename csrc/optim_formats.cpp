// The formats of optim.h on the CPU.
#include "optim_formats.h"

#include <limits>

#include "philox.h"

namespace hfnn {

static_assert(Optim::kTile % Optim::kBlock == 0);
constexpr int64_t kBlock = Optim::kBlock;
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

// Codes, with m in units of kUnit: there the bits of 4 value(m) are 3 times those of m.
template <int kWidth, bool kSigned>
struct Cubic {
  static constexpr int kBits = kWidth, kTop = kSigned ? kBits - 1 : kBits;
  static constexpr int kZero = kSigned ? (1 << kTop) - 1 : -1;  // the code of m = 0
  static constexpr float kUnit = 0x1p-80f / float(1 << (kTop + 4));

  static HFNN_INLINE float four_values(int32_t code) { return float_of(bits_of(float(code - kZero) * kUnit) * 3); }

  // inverse: 4 / |scale|. units: 1 / kUnit with the sign of scale.
  static HFNN_INLINE uint8_t encode(float x, float inverse, float units) {
    const float third = float_of(bits_of(std::fabs(x) * inverse) / 3);
    // From 2^23 to 2^24 floats are integers, so the sum is rounded to one. A code below the first becomes the first.
    const float whole = (kSigned ? std::copysign(third, x) : third) * units + (0x1p23f + kZero);
    return uint8_t(bits_of(std::max(whole, 0x1p23f)));
  }

  template <class W>
  static HFNN_INLINE float scale(const W* in, int64_t n) {
    int32_t up = std::numeric_limits<int32_t>::min();
    uint32_t down = 0;
    // Compared as integers, positive floats keep their order, with infinity and then NaN above them. Negative ones are
    // in reverse order, above all positive ones (unsigned) or below them (signed).
#pragma omp simd reduction(max : up, down)
    for (int64_t i = 0; i < n; ++i) {
      const uint32_t bits = bits_of(kSigned ? float(in[i]) : std::fabs(float(in[i])));
      up = std::max(up, int32_t(bits));
      down = std::max(down, bits);
    }
    const float a = float_of(uint32_t(up)), b = float_of(down);
    const float largest = (up & 0x7fffffff) >= int32_t(down & 0x7fffffff) ? a : b;
    return std::isfinite(largest) ? std::fabs(largest) < 0x1p-100f ? 0 : largest : kNan;
  }
};

// f(code) with the code in which the array is stored.
template <class F>
HFNN_INLINE void with_code(const Kept& kept, F f) {
  if (kept.format == Optim::kInt8)
    kept.has_sign ? f(Cubic<8, true>{}) : f(Cubic<8, false>{});
  else
    kept.has_sign ? f(Cubic<4, true>{}) : f(Cubic<4, false>{});
}

template <class Code, class W>
HFNN_INLINE void decode_block(const uint8_t* kept, float scale, int64_t n, W* out) {
  uint8_t halves[kBlock];
  if constexpr (Code::kBits == 4) {
    for (int64_t i = 0; i < (n + 1) / 2; ++i) {
      halves[2 * i] = kept[i] & 15;
      halves[2 * i + 1] = kept[i] >> 4;
    }
  }
  const uint8_t* codes = Code::kBits == 4 ? halves : kept;
  const float quarter = scale / 4;
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) out[i] = W(Code::four_values(codes[i]) * quarter);
}

// Returns the scale.
template <class Code, class W>
HFNN_INLINE float encode_block(const W* in, int64_t n, uint8_t* kept) {
  const float scale = Code::template scale<W>(in, n);
  uint8_t halves[kBlock + 1];
  uint8_t* codes = Code::kBits == 4 ? halves : kept;
  if (std::fabs(scale) > 0) {
    const float inverse = 4 / std::fabs(scale), units = std::copysign(1 / Code::kUnit, scale);
#pragma omp simd
    for (int64_t i = 0; i < n; ++i) codes[i] = Code::encode(float(in[i]), inverse, units);
  } else {
    std::fill_n(codes, n, uint8_t(std::max(Code::kZero, 0)));
  }
  if constexpr (Code::kBits == 4) {
    if (n % 2) codes[n] = 0;
    for (int64_t i = 0; i < (n + 1) / 2; ++i) kept[i] = uint8_t(codes[2 * i] | codes[2 * i + 1] << 4);
  }
  return scale;
}

template <class W>
HFNN_INLINE void decode(const Kept& kept, int64_t first, int64_t n, W* out) {
  with_code(kept, [&](auto code) HFNN_FLAT {
    for (int64_t i = 0; i < n; i += kBlock)
      decode_block<decltype(code)>(static_cast<uint8_t*>(kept.data) + (first + i) * code.kBits / 8,
                                   kept.scale[(first + i) / kBlock], std::min(kBlock, n - i), out + i);
  });
}

template <class W>
HFNN_INLINE void encode(const W* in, int64_t first, int64_t n, const Kept& kept) {
  with_code(kept, [&](auto code) HFNN_FLAT {
    for (int64_t i = 0; i < n; i += kBlock)
      kept.scale[(first + i) / kBlock] = encode_block<decltype(code)>(
          in + i, std::min(kBlock, n - i), static_cast<uint8_t*>(kept.data) + (first + i) * code.kBits / 8);
  });
}

// f(T{}) with the type in which single elements are stored.
template <class F>
HFNN_INLINE void with_format(int64_t format, F f) {
  if (format == Optim::kFloat32) f(float{});
  if (format == Optim::kBfloat16) f(bfloat16{});
  if (format == Optim::kFloat16) f(float16{});
  if (format == Optim::kFloat64) f(double{});
}

template <class W>
HFNN_INLINE void widen_run(const Kept& kept, int64_t first, int64_t n, W* out) {
  if (kept.format >= Optim::kInt8) return decode(kept, first, n, out);
  with_format(kept.format, [&](auto stored) HFNN_FLAT {
    using T = decltype(stored);
    const T* in = static_cast<T*>(kept.data) + first;
    if constexpr (std::is_same_v<T, float16> && std::is_same_v<W, float>) return widen(Dtype::float16, in, out, n);
#pragma omp simd
    for (int64_t i = 0; i < n; ++i) out[i] = W(load(in[i]));
  });
}

template <class W>
HFNN_INLINE void narrow_run(const W* in, int64_t first, int64_t n, const Kept& kept) {
  if (kept.format >= Optim::kInt8) return encode(in, first, n, kept);
  with_format(kept.format, [&](auto stored) HFNN_FLAT {
    using T = decltype(stored);
    T* out = static_cast<T*>(kept.data) + first;
    if constexpr (std::is_same_v<T, float16> && std::is_same_v<W, float>) return narrow(Dtype::float16, in, out, n);
#pragma omp simd
    for (int64_t i = 0; i < n; ++i) store(out[i], static_cast<Wide<T>>(in[i]));
  });
}

HFNN_CLONES void widen(const Kept& kept, int64_t first, int64_t n, float* out) { widen_run(kept, first, n, out); }
HFNN_CLONES void widen(const Kept& kept, int64_t first, int64_t n, double* out) { widen_run(kept, first, n, out); }
HFNN_CLONES void narrow(const float* in, int64_t first, int64_t n, const Kept& kept) { narrow_run(in, first, n, kept); }
HFNN_CLONES void narrow(const double* in, int64_t first, int64_t n, const Kept& kept) {
  narrow_run(in, first, n, kept);
}

HFNN_CLONES void widen_master(const bfloat16* parameter, const int16_t* remainder, int64_t n, float* out) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i)
    out[i] = float_of((uint32_t(parameter[i].bits) << 16) + uint32_t(int32_t(remainder[i])));
}

HFNN_CLONES void narrow_master(const float* in, int64_t n, bfloat16* parameter, int16_t* remainder) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) {
    const uint32_t bits = bits_of(in[i]);
    const bool nan = (bits & 0x7fffffff) > 0x7f800000;
    parameter[i].bits = uint16_t(nan ? 0x7fc0 : (bits + 0x8000) >> 16);
    remainder[i] = int16_t(nan ? 0 : bits);
  }
}

// Adds 16 random bits below those that bfloat16 keeps. Infinity has zeros there and stays infinity.
HFNN_INLINE void store_stochastic(bfloat16& y, float x, uint32_t random) {
  const uint32_t bits = bits_of(x);
  y.bits = uint16_t((bits & 0x7fffffff) > 0x7f800000 ? 0x7fc0 : (bits + random) >> 16);
}
// The same with 13 bits; the 8-bit exponent becomes one of 5 bits. What is not normal is rounded to nearest.
HFNN_INLINE void store_stochastic(float16& y, float x, uint32_t random) {
  const uint32_t bits = bits_of(x), magnitude = bits & 0x7fffffff;
  const uint32_t rounded = (magnitude - ((127u - 15u) << 23) + (random & 0x1fff)) >> 13;
  float16 nearest;
  store(nearest, x);
  const bool normal = magnitude >= 0x38800000 && magnitude < 0x7f800000;
  y.bits = uint16_t(normal ? std::min(rounded, 0x7c00u) | (bits >> 16 & 0x8000) : nearest.bits);
}

HFNN_CLONES void narrow_stochastic(const float* in, int64_t first, int64_t n, const Kept& kept, uint64_t seed,
                                   uint64_t counter) {
  uint32_t words[Optim::kTile / 2];
  uint16_t halves[Optim::kTile];
  for (int64_t k = 0; k < (n + 7) / 8; ++k) {
    const Words four = dropout_words(seed, counter + uint64_t(k));
    words[4 * k] = four.a;
    words[4 * k + 1] = four.b;
    words[4 * k + 2] = four.c;
    words[4 * k + 3] = four.d;
  }
  for (int64_t k = 0; k < (n + 7) / 8 * 4; ++k) {
    halves[2 * k] = uint16_t(words[k]);
    halves[2 * k + 1] = uint16_t(words[k] >> 16);
  }
  const auto round = [&](auto* out) HFNN_FLAT {
#pragma omp simd
    for (int64_t i = 0; i < n; ++i) store_stochastic(out[i], in[i], halves[i]);
  };
  if (kept.format == Optim::kBfloat16)
    round(static_cast<bfloat16*>(kept.data) + first);
  else
    round(static_cast<float16*>(kept.data) + first);
}

}  // namespace hfnn
