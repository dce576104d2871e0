// GELU on the CPU. float32 and the 16-bit dtypes use approximations that vectorise, float64 the standard library.
#include "gelu.h"

#include "activation_cpu.h"

namespace hfnn {

template <bool kTanh, class T>
HFNN_INLINE T gelu(T x) {
  if constexpr (kTanh) return x * sigmoid_2u(x).value;
  return x * normal(x).cdf;
}

template <bool kTanh, class T>
HFNN_INLINE T gelu_slope(T x) {
  if constexpr (kTanh) {
    const Sigmoid<T> s = sigmoid_2u(x);
    return s.value + x * s.slope * (T(1.5957691216057308) + T(0.21406444881780073) * (x * x));
  }
  const Normal<T> n = normal(x);
  return n.cdf + x * n.pdf;
}

namespace {
// Forward's y is gelu(x); backward's is dy * gelu'(x).
struct Call {
  Tensor dy, x, y;
};
}  // namespace

template <bool kTanh>
HFNN_INLINE void forward_runs(const Call& call, int64_t begin, int64_t end) {
  with_runs(call.x.dtype, call.y.dtype, [&](auto t, auto u) HFNN_FLAT {
    Runs<decltype(t)> xs(call.x, kRun);
    Runs<decltype(u)> ys(call.y, kRun);
    for_runs(call.x.numel(), begin, end, [&](int64_t i, int64_t n) HFNN_FLAT {
      const auto* x = xs.read(i, n);
      auto* y = ys.open(i);
#pragma omp simd
      for (int64_t k = 0; k < n; ++k) store(y[k], gelu<kTanh>(load(x[k])));
      ys.close(i, n);
    });
  });
}

template <bool kTanh>
HFNN_INLINE void backward_runs(const Call& call, int64_t begin, int64_t end) {
  with_runs(call.x.dtype, call.dy.dtype, [&](auto t, auto u) HFNN_FLAT {
    Runs<decltype(t)> xs(call.x, kRun), dxs(call.y, kRun);
    Runs<decltype(u)> dys(call.dy, kRun);
    for_runs(call.x.numel(), begin, end, [&](int64_t i, int64_t n) HFNN_FLAT {
      const auto* dy = dys.read(i, n);
      const auto* x = xs.read(i, n);
      auto* dx = dxs.open(i);
#pragma omp simd
      for (int64_t k = 0; k < n; ++k) store(dx[k], load(dy[k]) * gelu_slope<kTanh>(load(x[k])));
      dxs.close(i, n);
    });
  });
}

HFNN_CLONES static void forward_erf(const Call& c, int64_t begin, int64_t end) { forward_runs<false>(c, begin, end); }
HFNN_CLONES static void forward_tanh(const Call& c, int64_t begin, int64_t end) { forward_runs<true>(c, begin, end); }
HFNN_CLONES static void backward_erf(const Call& c, int64_t begin, int64_t end) { backward_runs<false>(c, begin, end); }
HFNN_CLONES static void backward_tanh(const Call& c, int64_t begin, int64_t end) { backward_runs<true>(c, begin, end); }

static void forward(const Tensor& x, const Tensor& y, bool tanh, int64_t threads) {
  expect_pair("x", x.dtype, "y", y.dtype);
  expect_alike("x", x, x);
  expect_shape("y", y, x.shape, x.dims);
  const Call call{{}, x, y};
  split_runs(x.numel(), threads,
             [&](int64_t begin, int64_t end) { (tanh ? forward_tanh : forward_erf)(call, begin, end); });
}

static void backward(const Tensor& dy, const Tensor& x, const Tensor& dx, bool tanh, int64_t threads) {
  expect_pair("x", x.dtype, "dy", dy.dtype);
  expect_alike("x", x, x);
  expect_shape("dy", dy, x.shape, x.dims);
  expect_alike("dx", dx, x);
  const Call call{dy, x, dx};
  split_runs(x.numel(), threads,
             [&](int64_t begin, int64_t end) { (tanh ? backward_tanh : backward_erf)(call, begin, end); });
}

// All arithmetic is in float32, so rounding forward's y gives the same numbers for every storage dtype.
const Gelu gelu_cpu = {forward, forward, backward};

}  // namespace hfnn
