// The arithmetic of dropout on the CPU, for dropout.cpp and add_norm.cpp. dropout.h defines the bits.
#pragma once
#include "cpu.h"
#include "philox.h"

namespace hfnn {

// A dropout mask and the scale. If everything is kept or everything is dropped, no words are drawn: all words are 0.
struct Drop {
  uint32_t threshold;
  bool draws;
  double scale;
  uint64_t seed, offset;
};

inline Drop drop_of(int64_t threshold, double scale, int64_t seed, int64_t offset, const Tensor& pair) {
  HFNN_CHECK(threshold >= 0);
  HFNN_CHECK(threshold <= int64_t(1) << 32);
  if (pair) {
    expect_shape("pair", pair, {2});
    expect_dtype("pair", pair, Dtype::int64);
    seed = pair.as<int64_t>()[0];
    offset = pair.as<int64_t>()[1];
  }
  const bool nothing = threshold == int64_t(1) << 32;
  return {nothing ? 1 : uint32_t(threshold), threshold > 0 && !nothing, scale, uint64_t(seed), uint64_t(offset)};
}

// y = dropped x (kAdd: residual + dropped x) for the elements [first, last). first is a multiple of 4.
template <bool kAdd, class X, class Y>
HFNN_INLINE void drop_elements(const Drop& drop, Runs<X>& xs, Runs<Y>& residuals, Runs<Y>& ys, int64_t first,
                               int64_t last) {
  using W = Wide<Y>;
  const W scale = W(drop.scale);
  const uint32_t threshold = drop.threshold;
  const uint64_t seed = drop.seed, offset = drop.offset;
  uint32_t words[kRun] = {};
  for_runs(last - first, 0, count_runs(last - first), [&](int64_t begin, int64_t n) HFNN_FLAT {
    const int64_t i = first + begin;
    if (drop.draws) {
      // Words for a full run, even if the run is shorter: simple loops over counters, then over elements.
      const uint64_t counter = offset + uint64_t(i) / 4;
      for (int k = 0; k < kRun / 4; ++k) {
        const Words four = dropout_words(seed, counter + k);
        words[4 * k] = four.a;
        words[4 * k + 1] = four.b;
        words[4 * k + 2] = four.c;
        words[4 * k + 3] = four.d;
      }
    }
    const X* x = xs.read(i, n);
    const Y* residual = kAdd ? residuals.read(i, n) : nullptr;
    Y* y = ys.open(i);
#pragma omp simd
    for (int64_t k = 0; k < n; ++k) {
      const W kept = words[k] >= threshold ? W(load(x[k])) * scale : 0;
      if constexpr (kAdd)
        store(y[k], load(residual[k]) + kept);
      else
        store(y[k], kept);
    }
    ys.close(i, n);
  });
}

// Checks x and y: one dtype, or float32 and a 16-bit dtype.
inline void drop_check(const Tensor& x, const char* y_name, const Tensor& y) {
  expect_pair("x", x.dtype, y_name, y.dtype);
  expect_shape("x", x, x.shape, x.dims);
  expect_shape(y_name, y, x.shape, x.dims);
}
inline void drop_check_sum(const Tensor& x, const Tensor& residual, const char* sum_name, const Tensor& sum) {
  drop_check(x, sum_name, sum);
  expect_alike("residual", residual, sum);
  if (x.dtype != sum.dtype) expect_dtype(sum_name, sum, Dtype::float32);
}

}  // namespace hfnn
