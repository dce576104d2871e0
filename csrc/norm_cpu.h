// The arithmetic of layer_norm.cpp (kCentred) and rms_norm.cpp (not kCentred). RMSNorm is LayerNorm with mean 0 and no
// bias. W is the dtype of the arithmetic, and of weight, bias, mean, rstd and partials here.
#pragma once
#include "cpu.h"

namespace hfnn {

// Stands for no bias: fma(a, w, -0.0) is a * w rounded, signed zeros included.
constexpr double kNoBias = -0.0;

// A call. In backward, y is dy.
struct Norm {
  Tensor x, y, dx, mean, rstd, partials;
  const Vector &weight, &bias;
  double eps = 0;
  int64_t rows() const { return x.shape[0]; }
  int64_t cols() const { return x.shape[1]; }
};

// Parameter gradients are summed over `chunks` runs of rows, then over the chunks. Their number depends only on the
// shape, so the result does not depend on the threads. At most 64 chunks, of at least 32 rows each: partial sums stay a
// small part of the memory traffic.
inline int64_t norm_chunks(int64_t rows, int64_t) { return std::clamp<int64_t>(rows / 32, 1, 64); }

// Used by forward and rebuild, so their bits are equal. Outputs are written in short runs, so float16's buffer stays in
// the L1 cache.
template <bool kCentred, class X, class Y, class W>
HFNN_INLINE void norm_output(const X* x, const W* weight, const W* bias, W mean, W rstd, Runs<Y>& ys, int64_t first,
                             int64_t cols) {
  for_runs(cols, 0, count_runs(cols), [&](int64_t begin, int64_t n) HFNN_FLAT {
    Y* y = ys.open(first + begin);
#pragma omp simd
    for (int64_t c = begin; c < begin + n; ++c)
      if constexpr (kCentred)
        store(y[c - begin], fused((load(x[c]) - mean) * rstd, weight[c], bias[c]));
      else
        store(y[c - begin], load(x[c]) * rstd * weight[c]);
    ys.close(first + begin, n);
  });
}

template <bool kCentred, bool kRebuild>
HFNN_INLINE void norm_forward(const Norm& n, int64_t begin, int64_t end) {
  const int64_t cols = n.cols();
  with_runs(n.x.dtype, n.y.dtype, [&](auto in, auto out) HFNN_FLAT {
    using W = Wide<decltype(in)>;
    Runs<decltype(in)> xs(n.x, cols);
    Runs<decltype(out)> ys(n.y, kRun);
    const W *weight = n.weight.as<W>(), *bias = n.bias.as<W>();
    W *means = n.mean.as<W>(), *rstds = n.rstd.as<W>(), mean = 0, rstd;
    for (int64_t r = begin; r < end; ++r) {
      const auto* x = xs.read(r * cols, cols);
      if constexpr (kRebuild) {
        if (kCentred) mean = means[r];
        rstd = rstds[r];
      } else {
        // Two passes, because E[x^2] - E[x]^2 would cancel. The second one reads a row that is in the cache.
        if (kCentred) mean = sum<W>(cols, [=](int64_t c) HFNN_FLAT { return load(x[c]); }) / W(cols);
        const W squares = sum<W>(cols, [=](int64_t c) HFNN_FLAT { return (load(x[c]) - mean) * (load(x[c]) - mean); });
        rstd = 1 / std::sqrt(squares / W(cols) + W(n.eps));
        if (means) means[r] = mean;
        if (rstds) rstds[r] = rstd;
      }
      norm_output<kCentred>(x, weight, bias, mean, rstd, ys, r * cols, cols);
    }
  });
}

// One row of backward. kParams: dweight += dy * xhat, dbias += dy. kInput, with g = dy * weight:
// dx = rstd * (g - mean(g) - xhat * mean(g * xhat)).
template <bool kCentred, bool kParams, bool kInput, class X, class Y, class W>
HFNN_INLINE void norm_gradients(const Y* dy, const X* x, const W* weight, W mean, W rstd, Runs<X>& dxs, int64_t first,
                                W* dweight, W* dbias, int64_t cols) {
  const auto xhat = [=](int64_t c) HFNN_FLAT { return (load(x[c]) - mean) * rstd; };
  Sums<W, kCentred ? 2 : 1> sums;
  const auto add = [=](int64_t c, W& sum_gx, auto&... sum_g) HFNN_FLAT {
    const W d = load(dy[c]), h = xhat(c), g = d * weight[c];
    if constexpr (kParams) dweight[c] += d * h;
    if constexpr (kParams && kCentred) dbias[c] += d;
    if constexpr (kInput) sum_gx += g * h;
    if constexpr (kInput) ((sum_g += g), ...);
  };
  sums.run(cols, add);
  if constexpr (!kInput) return;
  const W mean_gx = sums.total(0) / W(cols), mean_g = kCentred ? sums.total(kCentred) / W(cols) : 0;
  for_runs(cols, 0, count_runs(cols), [&](int64_t begin, int64_t n) HFNN_FLAT {
    X* dx = dxs.open(first + begin);
#pragma omp simd
    for (int64_t c = begin; c < begin + n; ++c)
      store(dx[c - begin], rstd * (load(dy[c]) * weight[c] - mean_g - xhat(c) * mean_gx));
    dxs.close(first + begin, n);
  });
}

// The rows of chunks [begin, end): dx, and one row of partials per chunk.
template <bool kCentred>
HFNN_INLINE void norm_backward(const Norm& n, int64_t begin, int64_t end) {
  if (!n.dx && !n.partials) return;
  const int64_t rows = n.rows(), cols = n.cols(), chunks = norm_chunks(rows, cols);
  with_runs(n.x.dtype, n.y.dtype, [&](auto in, auto out) HFNN_FLAT {
    using W = Wide<decltype(in)>;
    Runs<decltype(in)> xs(n.x, cols), dxs(n.dx, kRun);
    Runs<decltype(out)> dys(n.y, cols);
    const W *weight = n.weight.as<W>(), *means = n.mean.as<W>(), *rstds = n.rstd.as<W>();
    for (int64_t chunk = begin; chunk < end; ++chunk) {
      W *dweight = n.partials.as<W>() + chunk * cols, *dbias = dweight + chunks * cols;
      if (n.partials) std::fill_n(dweight, cols, W(0));
      if (n.partials && kCentred) std::fill_n(dbias, cols, W(0));
      for (int64_t r = rows * chunk / chunks; r < rows * (chunk + 1) / chunks; ++r) {
        const auto* x = xs.read(r * cols, cols);
        const auto* dy = dys.read(r * cols, cols);
        const W mean = kCentred ? means[r] : 0, rstd = rstds[r];
        if (n.partials && n.dx)
          norm_gradients<kCentred, true, true>(dy, x, weight, mean, rstd, dxs, r * cols, dweight, dbias, cols);
        else if (n.dx)
          norm_gradients<kCentred, false, true>(dy, x, weight, mean, rstd, dxs, r * cols, dweight, dbias, cols);
        else
          norm_gradients<kCentred, true, false>(dy, x, weight, mean, rstd, dxs, r * cols, dweight, dbias, cols);
      }
    }
  });
}

// Columns [begin, end) of one plane of partials, summed pairwise and stored in out's dtype.
HFNN_CLONES static void norm_sum_columns(const Tensor& partials, int64_t plane, const Tensor& out, int64_t begin,
                                         int64_t end) {
  const int64_t chunks = partials.shape[1], cols = partials.shape[2];
  with_wide(partials.dtype, [&](auto wide) HFNN_FLAT {
    auto* total = partials.as<decltype(wide)>() + plane * chunks * cols;
    for (int64_t left = chunks; left > 1; left -= left / 2) {
      auto* upper = total + (left - left / 2) * cols;
      for (int64_t chunk = 0; chunk < left / 2; ++chunk) {
#pragma omp simd
        for (int64_t c = begin; c < end; ++c) total[chunk * cols + c] += upper[chunk * cols + c];
      }
    }
    with_dtype(out.dtype, [&](auto stored) HFNN_FLAT {
      auto* y = out.as<decltype(stored)>();
      for (int64_t c = begin; c < end; ++c) store(y[c], static_cast<Wide<decltype(stored)>>(total[c]));
    });
  });
}

inline void norm_sum_partials(const Tensor& partials, int64_t plane, const Tensor& out, int64_t threads) {
  split(out.shape[0], partials.shape[1] * out.shape[0], threads,
        [&](int64_t begin, int64_t end) { norm_sum_columns(partials, plane, out, begin, end); });
}

// Processes rows [begin, end), or chunks of rows, of a call.
using NormRows = void (*)(const Norm& n, int64_t begin, int64_t end);
// target_clones does not work on templates.
#define HFNN_NORM(kCentred)                                                            \
  HFNN_CLONES static void forward_rows(const Norm& n, int64_t begin, int64_t end) {    \
    norm_forward<kCentred, false>(n, begin, end);                                      \
  }                                                                                    \
  HFNN_CLONES static void rebuild_rows(const Norm& n, int64_t begin, int64_t end) {    \
    norm_forward<kCentred, true>(n, begin, end);                                       \
  }                                                                                    \
  HFNN_CLONES static void backward_chunks(const Norm& n, int64_t begin, int64_t end) { \
    norm_backward<kCentred>(n, begin, end);                                            \
  }

inline void norm_run(NormRows rows, const Norm& n, int64_t count, int64_t threads) {
  split(count, n.rows() * n.cols(), threads, [&](int64_t begin, int64_t end) { rows(n, begin, end); });
}

// Checks common to both norms and their three calls. `y_name` is dy in backward.
inline void norm_check(const Tensor& x, const char* y_name, const Tensor& y, const Tensor& weight, const Tensor& bias) {
  if (x.dims != 2 || x.shape[1] < 1) refuse("x", "have the shape (R, C) with C > 0", text(x.shape, x.dims));
  const int64_t rows = x.shape[0], cols = x.shape[1];
  expect_shape("x", x, {rows, cols});
  expect_pair("x", x.dtype, y_name, y.dtype);
  expect_shape(y_name, y, {rows, cols});
  const auto parameter = [=](const char* name, const Tensor& t) {
    if (!t) return;
    expect_shape(name, t, {cols});
    expect_floating(name, t.dtype);
  };
  parameter("weight", weight);
  parameter("bias", bias);
  if (weight && bias) HFNN_CHECK_EQ(weight.dtype, bias.dtype);
}

inline void norm_check_statistic(const char* name, const Tensor& t, const Tensor& x) {
  expect_shape(name, t, {x.shape[0]});
  expect_dtype(name, t, wide(x.dtype));
}

inline void norm_check_dx(const Tensor& dx, const Tensor& x) {
  if (!dx) return;
  expect_shape("dx", dx, {x.shape[0], x.shape[1]});
  expect_dtype("dx", dx, x.dtype);
}

// Checks a parameter's gradient and its partial sums. `planes`: the number of parameters of the norm.
inline void norm_check_gradient(const char* name, const Tensor& t, const Tensor& weight, const Tensor& x,
                                const Tensor& partials, int64_t planes) {
  if (!t) return;
  const int64_t rows = x.shape[0], cols = x.shape[1];
  expect_shape(name, t, {cols});
  expect_floating(name, t.dtype);
  if (weight) expect_dtype(name, t, weight.dtype);
  expect_shape("partials", partials, {planes, norm_chunks(rows, cols), cols});
  expect_dtype("partials", partials, wide(x.dtype));
}

}  // namespace hfnn
