// SiLU on the CPU. float32 and the 16-bit dtypes use an exponential that vectorises, float64 the standard library.
#include "silu.h"

#include "cpu.h"

namespace hfnn {

// exp(-x) to 1e-7 for every x: 2^n * exp(r) with |r| <= log(2) / 2. Infinite where float32 overflows, as torch's is;
// what would be subnormal is 0. Half of 2^n is a float32 for every n that is left, 2^128 is not.
HFNN_INLINE float exp_minus(float x) {
  constexpr float kRound = 12582912;  // 1.5 * 2^23: adding it leaves the nearest integer in the low bits
  const float z = x < -89 ? 89 : -x;
  const float shifted = madd(z, 1.44269504f, kRound), n = shifted - kRound;
  const float r = madd(n, 2.12194440e-4f, madd(n, -0.693359375f, z));  // log(2) in two parts
  const float tail =
      madd(madd(madd(madd(0.00139504857f, r, 0.00836888794f), r, 0.041666206f), r, 0.166665182f), r, 0.5f);
  const float half_power = float_of((bits_of(shifted) + 126) << 23);
  return z < -87 ? 0 : (madd(tail, r * r, r) + 1) * 2 * half_power;
}
HFNN_INLINE double exp_minus(double x) { return std::exp(-x); }

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
