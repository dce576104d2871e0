// Shared by the kernels over rows of logits: reading a run of them, the log-sum-exp of a row, checks.
#pragma once
#include <limits>

#include "exp_cpu.h"

namespace hfnn {

// z = s x, or cap * tanh(s x / cap) if cap is not 0. slope(z) = dz/dx.
template <class W>
struct Squash {
  W scale, cap, inverse, rest;  // 1 / cap in two parts
  Squash(double scale, double cap)
      : scale(W(scale)), cap(W(cap)), inverse(W(cap == 0 ? 0 : 1 / cap)), rest(W(cap == 0 ? 0 : 1 / cap - inverse)) {}

  template <class X>
  HFNN_INLINE void run(const X* x, W* z, int64_t n) const {
    const W scale = this->scale, cap = this->cap, inverse = this->inverse, rest = this->rest;
    if (cap == 0) {
#pragma omp simd
      for (int64_t k = 0; k < n; ++k) z[k] = load(x[k]) * scale;
    } else {
#pragma omp simd
      for (int64_t k = 0; k < n; ++k) {
        const W scaled = load(x[k]) * scale;
        z[k] = tanh_of(scaled * inverse + scaled * rest) * cap;
      }
    }
  }
  template <bool kCapped>
  HFNN_INLINE W slope(W z) const {
    if constexpr (kCapped) return scale * (1 - (z * inverse) * (z * inverse));
    return scale;
  }
};

// The largest of n values, ignoring NaNs: the sum of exponentials becomes NaN anyway.
template <class W>
HFNN_INLINE W largest(const W* z, int64_t n) {
  constexpr int kLanes = 64;
  W lane[kLanes];
  std::fill_n(lane, kLanes, -std::numeric_limits<W>::infinity());
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
#pragma omp simd
    for (int l = 0; l < kLanes; ++l) lane[l] = z[i + l] > lane[l] ? z[i + l] : lane[l];
  }
#pragma omp simd
  for (int l = 0; l < int(n - i); ++l) lane[l] = z[i + l] > lane[l] ? z[i + l] : lane[l];
  for (int half = kLanes / 2; half > 0; half /= 2)
    for (int l = 0; l < half; ++l) lane[l] = lane[l + half] > lane[l] ? lane[l + half] : lane[l];
  return lane[0];
}

// sum(exp(z)) = total * exp(max), accumulated run by run while a run is in the L1 cache, so a row is read once. Runs
// are added in float64, so their number does not affect the accuracy.
template <class W>
struct LogSumExp {
  W max = -std::numeric_limits<W>::infinity();
  double total = 0;

  // What to subtract from logits before exp(): 0 while all are -inf, because exp(-inf - -inf) is NaN.
  HFNN_INLINE W base() const { return max == -std::numeric_limits<W>::infinity() ? 0 : max; }

  // Raises the maximum to include a run. Returns the factor for sums computed before.
  HFNN_INLINE double raise(const W* z, int64_t n) {
    const W most = largest(z, n);
    if (!(most > max)) return 1;
    const double factor = std::exp(double(max) - double(most));  // 0 the first time
    max = most;
    total *= factor;
    return factor;
  }
  HFNN_INLINE void add(const W* z, int64_t n) {
    raise(z, n);
    const W base = this->base();
    total += sum<W>(n, [=](int64_t k) HFNN_FLAT { return exp_negative(z[k] - base); });
  }
  double log_total() const { return std::log(total); }
  double value() const { return double(max) + log_total(); }
};

// f(X{}, Y{}) for x, and a y in x's dtype or that of the arithmetic.
template <class F>
HFNN_INLINE void with_result(Dtype x, Dtype y, F f) {
  if (x == Dtype::bfloat16 && y == Dtype::float32) return f(bfloat16{}, float{});
  with_runs(x, [=](auto t) HFNN_FLAT { f(t, t); });
}
inline void expect_result(const char* name_x, Dtype x, const char* name_y, Dtype y) {
  expect_floating(name_x, x);
  if (y == x || y == wide(x)) return;
  refuse(name_y,
         std::string("be ") + name(x) + (wide(x) == x ? "" : " or float32") + " when " + name_x + " is " + name(x),
         name(y));
}

inline void expect_matrix(const char* name, const Tensor& t) {
  expect_floating(name, t.dtype);
  if (t.dims != 2) refuse(name, "have the shape (R, C)", text(t.shape, t.dims));
  expect_alike(name, t, t);
}

// Checks for one number per row of x, in the dtype of the arithmetic.
inline void expect_rows(const char* name, const Tensor& t, const Tensor& x) {
  expect_shape(name, t, {x.shape[0]});
  expect_dtype(name, t, wide(x.dtype));
}
// The same, or one number for all rows.
inline void expect_factor(const Tensor& factor, const Tensor& x) {
  if (!factor) refuse("factor", "be a tensor", "None");
  if (factor.numel() != 1) return expect_rows("factor", factor, x);
  expect_shape("factor", factor, factor.shape, factor.dims);
  expect_dtype("factor", factor, wide(x.dtype));
}
template <class W>
HFNN_INLINE W factor_of(const Tensor& factor, int64_t row) {
  return factor.as<W>()[factor.numel() == 1 ? 0 : row];
}

}  // namespace hfnn
