// The inner loops of all passes of attention on the CPU: matrix products whose tiles of c stay in registers, and
// loading and storing rows.
#include "attention_cpu.h"

// Contraction to fma is allowed here: every element is computed in a full vector, so all elements round alike.
#if defined(__GNUC__) && !defined(__clang__)
#define HFNN_CONTRACT __attribute__((optimize("fp-contract=fast")))
#else
#define HFNN_CONTRACT
#endif

namespace hfnn::attention {

namespace {
template <class W>
struct Lanes;
template <>
struct Lanes<float> {
  typedef float type __attribute__((vector_size(64)));
};
template <>
struct Lanes<double> {
  typedef double type __attribute__((vector_size(64)));
};
}  // namespace

// A register tile of c: kRows rows of kVectors vectors.
template <int kRows, int kVectors, class W>
HFNN_INLINE void tile(W* c, int64_t c_row, const W* a, Matrix strides, const W* b, int64_t b_row, int64_t K, bool add) {
  using V = typename Lanes<W>::type;
  constexpr int kLanes = 64 / sizeof(W);
  V sums[kRows][kVectors] = {};
  for (int64_t k = 0; k < K; ++k) {
    V x[kVectors];
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) x[v] = *reinterpret_cast<const V*>(b + k * b_row + v * kLanes);
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      const W scalar = a[r * strides.row + k * strides.column];
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) sums[r][v] += scalar * x[v];
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
      V* out = reinterpret_cast<V*>(c + r * c_row + v * kLanes);
      *out = add ? *out + sums[r][v] : sums[r][v];
    }
  }
}

// A panel of kVectors vectors of columns. Its part of b stays in the L1 cache.
template <int kRows, int kVectors, class W>
HFNN_INLINE void panel(W* c, int64_t c_row, const W* a, Matrix strides, const W* b, int64_t b_row, int64_t M, int64_t K,
                       bool add) {
  int64_t i = 0;
  for (; i + kRows <= M; i += kRows)
    tile<kRows, kVectors>(c + i * c_row, c_row, a + i * strides.row, strides, b, b_row, K, add);
  for (; i < M; ++i) tile<1, kVectors>(c + i * c_row, c_row, a + i * strides.row, strides, b, b_row, K, add);
}

template <int kRows, int kVectors, class W>
HFNN_INLINE void panels(W* c, int64_t c_row, const W* a, Matrix strides, const W* b, int64_t b_row, int64_t M,
                        int64_t N, int64_t K, bool add) {
  constexpr int64_t kLanes = 64 / sizeof(W);
  int64_t j = 0;
  for (; j + kVectors * kLanes <= N; j += kVectors * kLanes)
    panel<kRows, kVectors>(c + j, c_row, a, strides, b + j, b_row, M, K, add);
  for (; j < N; j += kLanes) panel<kRows, 1>(c + j, c_row, a, strides, b + j, b_row, M, K, add);
}

// AVX-512 has registers for 8 x 2 vectors of 64 bytes. Elsewhere such a vector takes two or four registers.
#if defined(HFNN_HAS_CLONES)
static const bool many_registers = __builtin_cpu_supports("avx512f");
#elif defined(__AVX512F__)
constexpr bool many_registers = true;
#else
constexpr bool many_registers = false;
#endif

HFNN_CLONES HFNN_CONTRACT void multiply(float* c, int64_t c_row, const float* a, Matrix strides, const float* b,
                                        int64_t b_row, int64_t M, int64_t N, int64_t K, bool add) {
  if (many_registers)
    panels<8, 2>(c, c_row, a, strides, b, b_row, M, N, K, add);
  else
    panels<4, 1>(c, c_row, a, strides, b, b_row, M, N, K, add);
}
HFNN_CLONES HFNN_CONTRACT void multiply(double* c, int64_t c_row, const double* a, Matrix strides, const double* b,
                                        int64_t b_row, int64_t M, int64_t N, int64_t K, bool add) {
  panels<4, 1>(c, c_row, a, strides, b, b_row, M, N, K, add);
}

// Sixteen rows at a time, so that each cache line of `out` is written at once.
template <class W>
HFNN_INLINE void transposed(const W* in, int64_t rows, int64_t n, W* out) {
  const int64_t width = padded(n);
  for (int64_t r = 0; r < padded(rows); r += 16) {
    const int64_t some = std::min<int64_t>(rows - r, 16);
    for (int64_t k = 0; k < n; ++k) {
      W line[16] = {};
      if (some == 16)
        for (int l = 0; l < 16; ++l) line[l] = in[(r + l) * width + k];
      else
        for (int l = 0; l < some; ++l) line[l] = in[(r + l) * width + k];
      std::copy_n(line, 16, out + k * kBlock + r);
    }
  }
}
HFNN_CLONES void transpose(const float* in, int64_t rows, int64_t n, float* out) { transposed(in, rows, n, out); }
HFNN_CLONES void transpose(const double* in, int64_t rows, int64_t n, double* out) { transposed(in, rows, n, out); }

// A row of n elements times `factor`, padded with zeros to padded(n).
template <class W>
HFNN_INLINE void load_row(const Tensor& t, int64_t at, int64_t n, W factor, W* out) {
  if (t.dtype == Dtype::float16) {
    if constexpr (std::is_same_v<W, float>) {
      widen(t.dtype, t.as<float16>() + at, out, n);
      for (int64_t i = 0; i < n; ++i) out[i] *= factor;
    }
  } else {
    with_runs(t.dtype, [&](auto stored) HFNN_FLAT {
      const auto* in = t.as<decltype(stored)>() + at;
      for (int64_t i = 0; i < n; ++i) out[i] = W(load(in[i])) * factor;
    });
  }
  for (int64_t i = n; i < padded(n); ++i) out[i] = 0;
}
template <class W>
HFNN_INLINE void stored_row(const Tensor& t, int64_t at, int64_t n, W factor, W* in) {
  for (int64_t i = 0; i < n; ++i) in[i] *= factor;
  if (t.dtype == Dtype::float32) std::copy_n(in, n, t.as<float>() + at);
  if constexpr (std::is_same_v<W, double>) {
    if (t.dtype == Dtype::float64) std::copy_n(in, n, t.as<double>() + at);
  } else {
    if (t.dtype == Dtype::float16) narrow(t.dtype, in, t.as<float16>() + at, n);
    if (t.dtype == Dtype::bfloat16)
      for (int64_t i = 0; i < n; ++i) store(t.as<bfloat16>()[at + i], in[i]);
  }
}

// Rows [begin, begin + rows) of head (b, h) of a tensor of n columns.
template <class W>
HFNN_INLINE void loaded_rows(const Tensor& t, int64_t b, int64_t h, int64_t begin, int64_t rows, double factor,
                             W* out) {
  const int64_t n = t.shape[3], base = b * t.strides[0] + h * t.strides[1];
  for (int64_t r = 0; r < rows; ++r) load_row(t, base + (begin + r) * t.strides[2], n, W(factor), out + r * padded(n));
}
template <class W>
HFNN_INLINE void stored_rows(const Tensor& t, int64_t b, int64_t h, int64_t begin, int64_t rows, double factor, W* in) {
  const int64_t n = t.shape[3], base = b * t.strides[0] + h * t.strides[1];
  for (int64_t r = 0; r < rows; ++r) stored_row(t, base + (begin + r) * t.strides[2], n, W(factor), in + r * padded(n));
}

// target_clones does not work on templates.
#define HFNN_ROWS(W)                                                                                             \
  HFNN_CLONES void load_rows(const Tensor& t, int64_t b, int64_t h, int64_t begin, int64_t rows, double factor,  \
                             W* out) {                                                                           \
    loaded_rows(t, b, h, begin, rows, factor, out);                                                              \
  }                                                                                                              \
  HFNN_CLONES void store_rows(const Tensor& t, int64_t b, int64_t h, int64_t begin, int64_t rows, double factor, \
                              W* in) {                                                                           \
    stored_rows(t, b, h, begin, rows, factor, in);                                                               \
  }                                                                                                              \
  HFNN_CLONES void store_row(const Tensor& t, int64_t at, int64_t n, W factor, W* in) {                          \
    stored_row(t, at, n, factor, in);                                                                            \
  }
HFNN_ROWS(float)
HFNN_ROWS(double)
#undef HFNN_ROWS

}  // namespace hfnn::attention
