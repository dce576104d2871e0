// The arithmetic of reduce.h on 32-bit words in registers, with the same bits as on the CPU (except for NaN payloads).
// Sums and averages of float32, bfloat16 and float16 are fast: in registers, for up to kRanks ranks. Everything else
// uses Any, element by element through local memory: slow but correct.
#pragma once

#include "collectives/floats.h"
#include "cuda/p2p/device.cuh"
#include "cuda/p2p/peers.h"

namespace hfreduce::gpu {

// How elements are reduced. Each thread has a copy.
struct Rule {
  DType dtype;
  Op op;
  int ranks;
  double factors[kMaxRanks];  // of premul_sum
};

// The elements of a word, in float32.
template <DType kDType>
struct Packed;
template <>
struct Packed<DType::f32> {
  static constexpr int kLanes = 1;
  static __device__ __forceinline__ void widen(uint32_t word, float (&x)[1]) { x[0] = float_of(word); }
  static __device__ __forceinline__ uint32_t narrow(const float (&x)[1]) { return bits_of(x[0]); }
};
template <>
struct Packed<DType::bf16> {
  static constexpr int kLanes = 2;
  static __device__ __forceinline__ void widen(uint32_t word, float (&x)[2]) {
    x[0] = float_of(word << 16), x[1] = float_of(word & 0xffff0000);
  }
  static __device__ __forceinline__ uint32_t narrow(const float (&x)[2]) { return narrow_bf16(x[0], x[1]); }
};
template <>
struct Packed<DType::f16> {
  static constexpr int kLanes = 2;
  static __device__ __forceinline__ void widen(uint32_t word, float (&x)[2]) { widen_f16(word, x[0], x[1]); }
  static __device__ __forceinline__ uint32_t narrow(const float (&x)[2]) { return narrow_f16(x[0], x[1]); }
};

// Sums (scaled: premul_sum) and averages.
template <DType kDType, bool kScaled, int kRanks_>
struct Sums {
  static constexpr int kRanks = kRanks_;
  using L = Packed<kDType>;
  static __device__ __forceinline__ int ranks(const Rule& rule) { return kRanks == 2 ? 2 : rule.ranks; }

  static __device__ __forceinline__ void term(uint32_t word, int rank, const Rule& rule, float (&x)[L::kLanes]) {
    L::widen(word, x);
    if constexpr (kScaled) {
#pragma unroll
      for (int lane = 0; lane < L::kLanes; ++lane) x[lane] = multiply(float(rule.factors[rank]), x[lane]);
    }
  }

  template <int kWords>
  static __device__ __forceinline__ Words<kWords> of(const Words<kWords> (&inputs)[kRanks], const Rule& rule) {
    Words<kWords> out;
#pragma unroll
    for (int w = 0; w < kWords; ++w) {
      float sum[L::kLanes], x[L::kLanes];
      term(inputs[0].words[w], 0, rule, sum);
#pragma unroll
      for (int i = 1; i < kRanks; ++i) {
        if (i >= ranks(rule)) break;
        term(inputs[i].words[w], i, rule, x);
#pragma unroll
        for (int lane = 0; lane < L::kLanes; ++lane) sum[lane] = add(sum[lane], x[lane]);
      }
      if (!kScaled && rule.op == Op::avg) average(sum, ranks(rule));
      out.words[w] = L::narrow(sum);
    }
    return out;
  }

  // Multiplying by the inverse of a power of two is exact, and faster.
  static __device__ __forceinline__ void average(float (&sum)[L::kLanes], int ranks) {
    const bool exact = (ranks & (ranks - 1)) == 0;
    const float inverse = 1.0f / float(ranks);
#pragma unroll
    for (int lane = 0; lane < L::kLanes; ++lane)
      sum[lane] = exact ? multiply(sum[lane], inverse) : divide(sum[lane], float(ranks));
  }
};

// The type that is stored, and the type that is computed in.
template <class T>
struct Wide {
  using Type = T;
  static __device__ __forceinline__ T load(T x) { return x; }
  static __device__ __forceinline__ T store(T x) { return x; }
};
template <class T>
struct Narrow {
  using Type = float;
  static __device__ __forceinline__ float load(T x) { return hfreduce::load(x); }
  static __device__ __forceinline__ T store(float x) {
    T y;
    hfreduce::store(y, x);
    return y;
  }
};
template <>
struct Wide<Float16> : Narrow<Float16> {};
template <>
struct Wide<BFloat16> : Narrow<BFloat16> {};
template <>
struct Wide<E4M3> : Narrow<E4M3> {};
template <>
struct Wide<E5M2> : Narrow<E5M2> {};

struct Any {
  static constexpr int kRanks = kMaxRanks;
  static __device__ __forceinline__ int ranks(const Rule& rule) { return rule.ranks; }

  template <int kWords>
  static __device__ __noinline__ Words<kWords> of(const Words<kWords> (&inputs)[kRanks], const Rule& rule) {
    switch (rule.dtype) {
      case DType::u8:
        return as<uint8_t>(inputs, rule);
      case DType::i8:
        return as<int8_t>(inputs, rule);
      case DType::i16:
        return as<int16_t>(inputs, rule);
      case DType::i32:
        return as<int32_t>(inputs, rule);
      case DType::i64:
        return as<int64_t>(inputs, rule);
      case DType::boolean:
        return as<bool>(inputs, rule);
      case DType::f16:
        return as<Float16>(inputs, rule);
      case DType::bf16:
        return as<BFloat16>(inputs, rule);
      case DType::f32:
        return as<float>(inputs, rule);
      case DType::f64:
        return as<double>(inputs, rule);
      case DType::e4m3:
        return as<E4M3>(inputs, rule);
      default:
        return as<E5M2>(inputs, rule);
    }
  }

 private:
  template <class T, int kWords>
  static __device__ T element(const Words<kWords>& words, int i) {
    T x;
    memcpy(&x, reinterpret_cast<const char*>(words.words) + i * sizeof(T), sizeof(T));
    return x;
  }

  // bool is treated as its byte: values other than 0 and 1 are combined bitwise, as on the CPU.
  template <class B, int kWords>
  static __device__ Words<kWords> as(const Words<kWords> (&inputs)[kRanks], const Rule& rule) {
    constexpr bool kBoolean = std::is_same_v<B, bool>;
    using T = std::conditional_t<kBoolean, uint8_t, B>;
    const Op op = kBoolean ? of_booleans(rule.op) : rule.op;
    Words<kWords> out;
#pragma unroll 1
    for (int e = 0; e < int(sizeof(out) / sizeof(T)); ++e) {
      auto sum = term(element<T>(inputs[0], e), rule, 0);
#pragma unroll 1
      for (int i = 1; i < rule.ranks; ++i) sum = combine(op, sum, term(element<T>(inputs[i], e), rule, i));
      if (op == Op::avg) sum = average(sum, rule.ranks);
      const T y = Wide<T>::store(sum);
      memcpy(reinterpret_cast<char*>(out.words) + e * sizeof(T), &y, sizeof(T));
    }
    return out;
  }

  static __device__ Op of_booleans(Op op) {
    if (op == Op::sum || op == Op::max) return Op::bor;
    if (op == Op::prod || op == Op::min) return Op::band;
    return op;
  }

  template <class T>
  static __device__ auto term(T x, const Rule& rule, int rank) {
    auto wide = Wide<T>::load(x);
    using W = decltype(wide);
    if constexpr (std::is_floating_point_v<W>)
      if (rule.op == Op::premul_sum) wide = multiply(W(rule.factors[rank]), wide);
    return wide;
  }

  template <class W>
  static __device__ W combine(Op op, W a, W b) {
    if (op == Op::min) return b < a || b != b ? b : a;
    if (op == Op::max) return b > a || b != b ? b : a;
    if constexpr (std::is_floating_point_v<W>) {
      return op == Op::prod ? multiply(a, b) : add(a, b);
    } else {
      // Unsigned, and wide enough to avoid promotion to int: overflow wraps around.
      using U = std::conditional_t<sizeof(W) < 8, uint32_t, uint64_t>;
      if (op == Op::prod) return W(U(a) * U(b));
      if (op == Op::band) return W(a & b);
      if (op == Op::bor) return W(a | b);
      if (op == Op::bxor) return W(a ^ b);
      return W(U(a) + U(b));
    }
  }

  // Integers round toward zero.
  template <class W>
  static __device__ W average(W sum, int ranks) {
    if constexpr (std::is_floating_point_v<W>) return divide(sum, W(ranks));
    return W(sum / W(ranks));
  }
};

// Calls f with the arithmetic: the fast one, if there is one.
template <bool kScaled, class F>
void with_lanes(DType dtype, int ranks, F f) {
  const auto of = [&](auto lanes) {
    constexpr DType kDType = decltype(lanes)::value;
    if (kScaled || ranks > 4) return f(Sums<kDType, kScaled, 8>());
    if constexpr (!kScaled) {
      if (ranks > 2) return f(Sums<kDType, kScaled, 4>());
      f(Sums<kDType, kScaled, 2>());
    }
  };
  if (dtype == DType::f32) return of(std::integral_constant<DType, DType::f32>());
  if (dtype == DType::bf16) return of(std::integral_constant<DType, DType::bf16>());
  if (dtype == DType::f16) return of(std::integral_constant<DType, DType::f16>());
  f(Any());
}

template <class F>
void with_arithmetic(DType dtype, Op op, int ranks, F f) {
  if (op == Op::sum || op == Op::avg) return with_lanes<false>(dtype, ranks, f);
  if (op == Op::premul_sum) return with_lanes<true>(dtype, ranks, f);
  f(Any());
}

}  // namespace hfreduce::gpu
