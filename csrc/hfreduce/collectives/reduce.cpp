// Reductions, in pieces of the output that fit into the L1 cache together with the intermediate results. 16-bit and
// 8-bit floats are widened into a buffer (bfloat16 sums: as they are added). Inputs are combined two at a time, in
// order, into a buffer; the last one into the output. Widened results are rounded once.
//
// Memory traffic: each input is read once and the output is written once. A plain store first reads the cache line that
// it writes to, which adds the output's bytes. `stream` avoids that: a piece is computed in a buffer and written with
// non-temporal stores.
//
// The loops are plain functions of their own, so that they vectorize and compile for several instruction sets.
#include "collectives/reduce.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>

#include "collectives/floats.h"
#ifdef __x86_64__
#include <immintrin.h>
#endif

// gcc selects among the clones by an ifunc, which runs before ThreadSanitizer is initialized.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && !defined(__SANITIZE_THREAD__)
#define HFREDUCE_CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define HFREDUCE_CLONES
#endif

namespace hfreduce {

namespace {
constexpr int64_t kPiece = 1024, kLine = 64;

// An element at any address, aligned or not.
template <class T>
struct __attribute__((packed, may_alias)) Cell {
  T value;
};
}  // namespace

// The loops: n elements of the dtype that is computed in. x, y and the output may be the same memory.

template <class F>
HFREDUCE_INLINE void with_float(DType dtype, F f) {
  if (dtype == DType::f32) f(float{});
  if (dtype == DType::f64) f(double{});
}

// Integers of 8, 16, 32 and 64 bits. Signed sums and products have the same bits as unsigned ones.
template <class F>
HFREDUCE_INLINE void with_unsigned(DType dtype, F f) {
  if (dtype >= DType::f16) return;
  if (size_of(dtype) == 1) f(uint8_t{});
  if (size_of(dtype) == 2) f(uint16_t{});
  if (size_of(dtype) == 4) f(uint32_t{});
  if (size_of(dtype) == 8) f(uint64_t{});
}

template <class F>
HFREDUCE_INLINE void with_type(DType dtype, F f) {
  with_float(dtype, f);
  if (dtype == DType::u8) f(uint8_t{});
  if (dtype == DType::i8) f(int8_t{});
  if (dtype == DType::i16) f(int16_t{});
  if (dtype == DType::i32) f(int32_t{});
  if (dtype == DType::i64) f(int64_t{});
}

template <class T, class F>
HFREDUCE_INLINE void each(void* out, const void* x, int64_t n, F f) {
  auto* to = static_cast<Cell<T>*>(out);
  const auto* from = static_cast<const Cell<T>*>(x);
#pragma GCC ivdep
  for (int64_t i = 0; i < n; ++i) to[i].value = f(from[i].value);
}

template <class T, class F>
HFREDUCE_INLINE void each(void* out, const void* x, const void* y, int64_t n, F f) {
  auto* to = static_cast<Cell<T>*>(out);
  const auto *a = static_cast<const Cell<T>*>(x), *b = static_cast<const Cell<T>*>(y);
#pragma GCC ivdep
  for (int64_t i = 0; i < n; ++i) to[i].value = f(a[i].value, b[i].value);
}

#define HFREDUCE_FLAT __attribute__((always_inline))  // for lambdas, where `inline` is not allowed
#define HFREDUCE_LOOP HFREDUCE_CLONES static void

HFREDUCE_LOOP add(DType dtype, void* out, const void* x, const void* y, int64_t n) {
  const auto loop = [=](auto t) HFREDUCE_FLAT {
    using T = decltype(t);
    each<T>(out, x, y, n, [](T a, T b) HFREDUCE_FLAT { return T(a + b); });
  };
  with_float(dtype, loop);
  with_unsigned(dtype, loop);
}

HFREDUCE_LOOP multiply(DType dtype, void* out, const void* x, const void* y, int64_t n) {
  with_float(dtype, [=](auto t) HFREDUCE_FLAT {
    using T = decltype(t);
    each<T>(out, x, y, n, [](T a, T b) HFREDUCE_FLAT { return a * b; });
  });
  with_unsigned(dtype, [=](auto t) HFREDUCE_FLAT {
    using T = decltype(t);
    each<T>(out, x, y, n,
            [](T a, T b) HFREDUCE_FLAT { return T(1u * a * b); });  // 16 bits would be multiplied in an int
  });
}

// Propagates NaN: comparisons with NaN are false.
HFREDUCE_LOOP minimum(DType dtype, void* out, const void* x, const void* y, int64_t n) {
  with_type(dtype, [=](auto t) HFREDUCE_FLAT {
    using T = decltype(t);
    each<T>(out, x, y, n, [](T a, T b) HFREDUCE_FLAT { return b < a || b != b ? b : a; });
  });
}
HFREDUCE_LOOP maximum(DType dtype, void* out, const void* x, const void* y, int64_t n) {
  with_type(dtype, [=](auto t) HFREDUCE_FLAT {
    using T = decltype(t);
    each<T>(out, x, y, n, [](T a, T b) HFREDUCE_FLAT { return b > a || b != b ? b : a; });
  });
}

HFREDUCE_LOOP bits(Op op, void* out, const void* x, const void* y, int64_t bytes) {
  using T = uint8_t;
  if (op == Op::band) each<T>(out, x, y, bytes, [](T a, T b) HFREDUCE_FLAT { return T(a & b); });
  if (op == Op::bor) each<T>(out, x, y, bytes, [](T a, T b) HFREDUCE_FLAT { return T(a | b); });
  if (op == Op::bxor) each<T>(out, x, y, bytes, [](T a, T b) HFREDUCE_FLAT { return T(a ^ b); });
}

HFREDUCE_LOOP scale(DType dtype, void* out, const void* x, double factor, int64_t n) {
  with_float(dtype, [=](auto t) HFREDUCE_FLAT {
    using T = decltype(t);
    each<T>(out, x, n, [f = T(factor)](T a) HFREDUCE_FLAT { return f * a; });
  });
}

// Integers round toward zero. 32-bit integers are divided in float64: a quotient that is not whole differs from the
// next whole number by more than float64's rounding error.
HFREDUCE_LOOP divide(DType dtype, void* out, const void* x, int64_t divisor, int64_t n) {
  with_type(dtype, [=](auto t) HFREDUCE_FLAT {
    using T = decltype(t);
    using W = std::conditional_t<std::is_integral_v<T>, std::conditional_t<sizeof(T) < 8, double, int64_t>, T>;
    each<T>(out, x, n, [d = W(divisor)](T a) HFREDUCE_FLAT { return T(W(a) / d); });
  });
}

template <class F>
HFREDUCE_INLINE void with_small(DType dtype, F f) {
  if (dtype == DType::f16) f(Float16{});
  if (dtype == DType::bf16) f(BFloat16{});
  if (dtype == DType::e4m3) f(E4M3{});
  if (dtype == DType::e5m2) f(E5M2{});
}

#ifdef __x86_64__
// float16 by F16C instructions, which the compiler does not generate from the loop: twice as fast.
#define HFREDUCE_F16C __attribute__((target("avx2,f16c"))) static void

HFREDUCE_F16C widen_f16c(float* out, const Cell<uint16_t>* x, int64_t n) {
  int64_t i = 0;
  for (; i + 8 <= n; i += 8)
    _mm256_storeu_ps(out + i, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(x + i))));
  for (; i < n; ++i) out[i] = _cvtsh_ss(x[i].value);
}

HFREDUCE_F16C narrow_f16c(Cell<uint16_t>* out, const float* x, int64_t n) {
  constexpr int kNearest = _MM_FROUND_TO_NEAREST_INT;
  int64_t i = 0;
  for (; i + 8 <= n; i += 8)
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out + i), _mm256_cvtps_ph(_mm256_loadu_ps(x + i), kNearest));
  for (; i < n; ++i) out[i].value = _cvtss_sh(x[i], kNearest);
}

static bool has_f16c() { return __builtin_cpu_supports("avx2"); }  // every processor with AVX2 has it
#endif

HFREDUCE_LOOP widen_any(DType dtype, float* out, const void* x, int64_t n) {
  with_small(dtype, [=](auto t) HFREDUCE_FLAT {
    const auto* from = static_cast<const Cell<decltype(t)>*>(x);
#pragma GCC ivdep
    for (int64_t i = 0; i < n; ++i) out[i] = load(from[i].value);
  });
}

HFREDUCE_LOOP narrow_any(DType dtype, void* out, const float* x, int64_t n) {
  with_small(dtype, [=](auto t) HFREDUCE_FLAT {
    auto* to = static_cast<Cell<decltype(t)>*>(out);
#pragma GCC ivdep
    for (int64_t i = 0; i < n; ++i) {
      auto y = t;
      store(y, x[i]);
      to[i].value = y;
    }
  });
}

// Sums of bfloat16, the usual dtype of gradients, in half the passes: terms are widened as they are added (the first
// two together), and the last sum is rounded as it is computed.
using BCell = Cell<BFloat16>;
HFREDUCE_LOOP add_two(float* out, const BCell* x, const BCell* y, int64_t n) {
#pragma GCC ivdep
  for (int64_t i = 0; i < n; ++i) out[i] = load(x[i].value) + load(y[i].value);
}
HFREDUCE_LOOP add_next(float* sum, const BCell* x, int64_t n) {
#pragma GCC ivdep
  for (int64_t i = 0; i < n; ++i) sum[i] += load(x[i].value);
}
HFREDUCE_LOOP round_two(BCell* out, const BCell* x, const BCell* y, int64_t n) {
#pragma GCC ivdep
  for (int64_t i = 0; i < n; ++i) {
    BFloat16 z;
    store(z, load(x[i].value) + load(y[i].value));
    out[i].value = z;
  }
}
HFREDUCE_LOOP round_next(BCell* out, const float* sum, const BCell* x, int64_t n) {
#pragma GCC ivdep
  for (int64_t i = 0; i < n; ++i) {
    BFloat16 z;
    store(z, sum[i] + load(x[i].value));
    out[i].value = z;
  }
}

static void widen(DType dtype, float* out, const void* x, int64_t n) {
#ifdef __x86_64__
  if (dtype == DType::f16 && has_f16c()) return widen_f16c(out, static_cast<const Cell<uint16_t>*>(x), n);
#endif
  widen_any(dtype, out, x, n);
}

static void narrow(DType dtype, void* out, const float* x, int64_t n) {
#ifdef __x86_64__
  if (dtype == DType::f16 && has_f16c()) return narrow_f16c(static_cast<Cell<uint16_t>*>(out), x, n);
#endif
  narrow_any(dtype, out, x, n);
}

// Writes whole cache lines with non-temporal stores, where available; the partial first and last lines normally.
static void write_past(char* out, const char* in, int64_t bytes) {
#ifdef __x86_64__
  const int64_t head = std::min<int64_t>(-reinterpret_cast<uintptr_t>(out) % kLine, bytes);
  std::memcpy(out, in, head);
  int64_t i = head;
  for (; i + kLine <= bytes; i += kLine)
    for (int64_t k = i; k < i + kLine; k += 16)
      _mm_stream_si128(reinterpret_cast<__m128i*>(out + k), _mm_loadu_si128(reinterpret_cast<const __m128i*>(in + k)));
  std::memcpy(out + i, in + i, bytes - i);
#else
  std::memcpy(out, in, bytes);
#endif
}

// Orders non-temporal stores before later stores, such as that of a flag.
static void fence() {
#ifdef __x86_64__
  _mm_sfence();
#endif
}

namespace {
class Job {
 public:
  Job(const void* const* inputs, const double* factors, int n, DType dtype, Op op, int64_t divisor)
      : inputs_(inputs),
        factors_(factors),
        n_(n),
        dtype_(dtype),
        wide_(size_of(dtype) < 4 && dtype >= DType::f16 ? DType::f32 : dtype),
        op_(op),
        divisor_(divisor) {}

  // Computes `count` elements (at most kPiece), from element `begin` of the inputs on.
  void make(char* out, int64_t begin, int64_t count) {
    if (dtype_ == DType::bf16 && op_ == Op::sum && n_ > 1) return sum_bf16(out, begin, count);
    const bool same = wide_ == dtype_;
    const void* x = term(0, begin, count, same && n_ == 1 ? out : sums_);
    for (int j = 1; j < n_; ++j) {
      const void* y = term(j, begin, count, other_);
      void* to = same && j == n_ - 1 ? out : sums_;
      combine(to, x, y, count);
      x = to;
    }
    if (op_ == Op::avg) {
      void* to = same ? out : sums_;
      divide(wide_, to, x, divisor_, count);
      x = to;
    }
    if (!same) narrow(dtype_, out, static_cast<const float*>(x), count);
  }

 private:
  // Input j as a term of the sum: the input itself, or computed into `room`.
  const void* term(int j, int64_t begin, int64_t count, void* room) const {
    const void* x = static_cast<const char*>(inputs_[j]) + begin * size_of(dtype_);
    if (wide_ != dtype_) {
      widen(dtype_, static_cast<float*>(room), x, count);
      x = room;
    }
    if (!factors_) return x;
    scale(wide_, room, x, factors_[j], count);
    return room;
  }

  void sum_bf16(char* out, int64_t begin, int64_t count) {
    const auto in = [&](int j) { return static_cast<const BCell*>(inputs_[j]) + begin; };
    auto* const to = reinterpret_cast<BCell*>(out);
    auto* const sum = reinterpret_cast<float*>(sums_);
    if (n_ == 2) return round_two(to, in(0), in(1), count);
    add_two(sum, in(0), in(1), count);
    for (int j = 2; j < n_ - 1; ++j) add_next(sum, in(j), count);
    round_next(to, sum, in(n_ - 1), count);
  }

  void combine(void* out, const void* x, const void* y, int64_t count) const {
    switch (op_) {
      case Op::sum:
      case Op::avg:
      case Op::premul_sum:
        return add(wide_, out, x, y, count);
      case Op::prod:
        return multiply(wide_, out, x, y, count);
      case Op::min:
        return minimum(wide_, out, x, y, count);
      case Op::max:
        return maximum(wide_, out, x, y, count);
      default:
        return bits(op_, out, x, y, count * size_of(wide_));
    }
  }

  alignas(kLine) char sums_[kPiece * 8], other_[kPiece * 8];
  const void* const* inputs_;
  const double* factors_;
  int n_;
  DType dtype_, wide_;
  Op op_;
  int64_t divisor_;
};

bool floating(DType dtype) { return dtype >= DType::f16; }
bool bitwise(Op op) { return op == Op::band || op == Op::bor || op == Op::bxor; }

// The bit operation that `op` means for booleans.
Op of_booleans(Op op) {
  if (op == Op::sum || op == Op::max) return Op::bor;
  if (op == Op::prod || op == Op::min) return Op::band;
  return op;
}

void copy(char* out, const void* in, int64_t bytes, bool stream) {
  if (out == in || bytes == 0) return;
  if (stream)
    write_past(out, static_cast<const char*>(in), bytes);
  else
    std::memcpy(out, in, bytes);
}
}  // namespace

bool supported(DType dtype, Op op) {
  if (bitwise(op)) return !floating(dtype);
  if (op == Op::premul_sum) return floating(dtype);
  return op != Op::avg || dtype != DType::boolean;
}

void reduce(void* out, const void* const* inputs, const double* factors, int n, int64_t count, DType dtype, Op op,
            int64_t divisor, bool stream) {
  if (!supported(dtype, op) || n < 1 || count < 0 || divisor < 1 || (factors && op != Op::premul_sum))
    throw std::invalid_argument(
        "reduce takes one input or more, a count from 0, a divisor from 1, factors with premul_sum only, bit "
        "operations "
        "on integers, premul_sum on floats, no avg of booleans; got " +
        std::to_string(n) + " inputs of " + std::to_string(count) + " " + name(dtype) + ", " + name(op) + ", divisor " +
        std::to_string(divisor) + (factors ? ", factors" : ""));
  if (dtype == DType::boolean) op = of_booleans(op);
  auto* to = static_cast<char*>(out);
  const int64_t size = size_of(dtype);
  if (n == 1 && !factors && (op != Op::avg || divisor == 1)) {
    copy(to, inputs[0], count * size, stream);
  } else {
    Job job(inputs, factors, n, dtype, op, divisor);
    alignas(kLine) char made[kPiece * 8];
    // When streaming, the first piece ends at a cache line of the output, so that the others consist of whole lines.
    int64_t next = stream ? -reinterpret_cast<uintptr_t>(out) % kLine / size : kPiece;
    for (int64_t i = 0; i < count; i += next, next = kPiece) {
      next = std::min(next, count - i);
      job.make(stream ? made : to + i * size, i, next);
      if (stream) write_past(to + i * size, made, next * size);
    }
  }
  if (stream) fence();
}

}  // namespace hfreduce
