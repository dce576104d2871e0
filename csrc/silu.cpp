// SiLU on the CPU. float32 and the 16-bit dtypes use an exponential that vectorises, float64 the standard library.
#include "silu.h"

#include "exp_cpu.h"

namespace hfnn {

template <class T>
HFNN_INLINE T silu(T x) {
  return x / (1 + exp_minus(x));
}

template <class T>
HFNN_INLINE T silu_slope(T x) {
  const T e = exp_minus(x), s = 1 / (1 + e);
  return s + x * s * (x > 0 ? e * s : 1 - s);  // 1 - s without cancellation
}

namespace {
// Forward's y is silu(x); backward's is dy * silu'(x).
struct Call {
  Tensor dy, x, y;
};
}  // namespace

HFNN_CLONES static void forward_runs(const Call& call, int64_t begin, int64_t end) {
  with_runs(call.x.dtype, [&](auto t) HFNN_FLAT {
    Runs<decltype(t)> xs(call.x, kRun), ys(call.y, kRun);
    for_runs(call.x.numel(), begin, end, [&](int64_t i, int64_t n) HFNN_FLAT {
      const auto* x = xs.read(i, n);
      auto* y = ys.open(i);
#pragma omp simd
      for (int64_t k = 0; k < n; ++k) store(y[k], silu(load(x[k])));
      ys.close(i, n);
    });
  });
}

HFNN_CLONES static void backward_runs(const Call& call, int64_t begin, int64_t end) {
  with_runs(call.x.dtype, [&](auto t) HFNN_FLAT {
    Runs<decltype(t)> dys(call.dy, kRun), xs(call.x, kRun), dxs(call.y, kRun);
    for_runs(call.x.numel(), begin, end, [&](int64_t i, int64_t n) HFNN_FLAT {
      const auto *dy = dys.read(i, n), *x = xs.read(i, n);
      auto* dx = dxs.open(i);
#pragma omp simd
      for (int64_t k = 0; k < n; ++k) store(dx[k], load(dy[k]) * silu_slope(load(x[k])));
      dxs.close(i, n);
    });
  });
}

static void forward(const Tensor& x, const Tensor& y, int64_t threads) {
  expect_floating("x", x.dtype);
  expect_alike("x", x, x);
  expect_alike("y", y, x);
  const Call call{{}, x, y};
  split_runs(x.numel(), threads, [&](int64_t begin, int64_t end) { forward_runs(call, begin, end); });
}

static void backward(const Tensor& dy, const Tensor& x, const Tensor& dx, int64_t threads) {
  expect_floating("x", x.dtype);
  expect_alike("x", x, x);
  expect_alike("dy", dy, x);
  expect_alike("dx", dx, x);
  const Call call{dy, x, dx};
  split_runs(x.numel(), threads, [&](int64_t begin, int64_t end) { backward_runs(call, begin, end); });
}

const Silu silu_cpu = {forward, backward};

}  // namespace hfnn
