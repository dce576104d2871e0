// Piecewise linear functions on the CPU, one run of elements at a time. Flags are bytes before they are packed.
#include "piecewise.h"

#include "bits_cpu.h"

namespace hfnn {

namespace {
// Forward: y is f(x). Backward: x is dy, y is dx. first and second: a and b, or inside and outside.
struct Call {
  Tensor x, y, bits;
  double first, second;
};

enum Kind { kRelu, kLeakyRelu, kHardtanh, kClamp, kThreshold, kHardshrink, kSoftshrink, kHardsigmoid, kKinds };
}  // namespace

// Comparisons fail for a NaN, so it reaches the last branch and stays a NaN.
template <Kind kKind, class T>
HFNN_INLINE T value(T x, T a, T b) {
  if constexpr (kKind == kRelu) return x < 0 ? T(0) : x;
  if constexpr (kKind == kLeakyRelu) return x > 0 ? x : x * a;
  if constexpr (kKind == kThreshold) return x <= a ? b : x;
  if constexpr (kKind == kHardshrink) return std::fabs(x) <= a ? T(0) : x;
  if constexpr (kKind == kSoftshrink) return x > a ? x - a : x < -a ? x + a : x * 0;
  if constexpr (kKind == kHardsigmoid) return value<kHardtanh>(x + 3, T(0), T(6)) / 6;
  const T above = x < a ? a : x;
  return above > b ? b : above;
}

template <Kind kKind, class T>
HFNN_INLINE bool flag(T x, T a, T b) {
  if constexpr (kKind == kRelu) return !(x <= 0);
  if constexpr (kKind == kLeakyRelu) return x > 0;
  if constexpr (kKind == kHardtanh) return !((x <= a) | (x >= b));
  if constexpr (kKind == kClamp) return (x >= a) & (x <= b);
  if constexpr (kKind == kThreshold) return !(x <= a);
  if constexpr (kKind == kHardshrink) return !(std::fabs(x) <= a);
  if constexpr (kKind == kSoftshrink) return !(std::fabs(x) <= b);
  return (x > -3) & (x < 3);
}

template <Kind kKind>
HFNN_INLINE void forward_map(const Call& call, int64_t begin, int64_t end) {
  with_runs(call.x.dtype, [&](auto t) HFNN_FLAT {
    using W = Wide<decltype(t)>;
    const W a = W(call.first), b = W(call.second);
    Runs<decltype(t)> xs(call.x, kRun), ys(call.y, kRun);
    uint8_t flags[kRun];
    for_runs(call.x.numel(), begin, end, [&](int64_t i, int64_t n) HFNN_FLAT {
      const auto* x = xs.read(i, n);
      auto* y = ys.open(i);
#pragma omp simd
      for (int64_t k = 0; k < n; ++k) store(y[k], value<kKind>(load(x[k]), a, b));
      ys.close(i, n);
      if (!call.bits) return;
#pragma omp simd
      for (int64_t k = 0; k < n; ++k) flags[k] = flag<kKind>(load(x[k]), a, b);
      pack_run<1>(flags, call.bits.as<uint8_t>() + i / 8, n);
    });
  });
}

using Runner = void (*)(const Call&, int64_t, int64_t);
HFNN_CLONES static void relu(const Call& c, int64_t begin, int64_t end) { forward_map<kRelu>(c, begin, end); }
HFNN_CLONES static void leaky_relu(const Call& c, int64_t begin, int64_t end) {
  forward_map<kLeakyRelu>(c, begin, end);
}
HFNN_CLONES static void hardtanh(const Call& c, int64_t begin, int64_t end) { forward_map<kHardtanh>(c, begin, end); }
HFNN_CLONES static void clamp(const Call& c, int64_t begin, int64_t end) { forward_map<kClamp>(c, begin, end); }
HFNN_CLONES static void threshold(const Call& c, int64_t begin, int64_t end) { forward_map<kThreshold>(c, begin, end); }
HFNN_CLONES static void hardshrink(const Call& c, int64_t begin, int64_t end) {
  forward_map<kHardshrink>(c, begin, end);
}
HFNN_CLONES static void softshrink(const Call& c, int64_t begin, int64_t end) {
  forward_map<kSoftshrink>(c, begin, end);
}
HFNN_CLONES static void hardsigmoid(const Call& c, int64_t begin, int64_t end) {
  forward_map<kHardsigmoid>(c, begin, end);
}

HFNN_CLONES static void backward_runs(const Call& call, int64_t begin, int64_t end) {
  with_runs(call.x.dtype, [&](auto t) HFNN_FLAT {
    using W = Wide<decltype(t)>;
    const W inside = W(call.first), outside = W(call.second);
    Runs<decltype(t)> dys(call.x, kRun), dxs(call.y, kRun);
    uint8_t flags[kRun];
    for_runs(call.x.numel(), begin, end, [&](int64_t i, int64_t n) HFNN_FLAT {
      unpack_run<1>(call.bits.as<uint8_t>() + i / 8, flags, n);
      const auto* dy = dys.read(i, n);
      auto* dx = dxs.open(i);
#pragma omp simd
      for (int64_t k = 0; k < n; ++k) {
        const W factor = flags[k] ? inside : outside;
        store(dx[k], factor == 0 ? W(0) : load(dy[k]) * factor);
      }
      dxs.close(i, n);
    });
  });
}

static void expect_bits(const Tensor& bits, int64_t numel) {
  expect_shape("bits", bits, {packed_bytes(numel, 1)});
  expect_dtype("bits", bits, Dtype::uint8);
}

static void forward(const Tensor& x, const Tensor& y, const Tensor& bits, int64_t kind, double a, double b,
                    int64_t threads) {
  constexpr Runner runners[kKinds] = {relu,      leaky_relu, hardtanh,   clamp,
                                      threshold, hardshrink, softshrink, hardsigmoid};
  expect_floating("x", x.dtype);
  expect_alike("x", x, x);
  expect_alike("y", y, x);
  if (bits) expect_bits(bits, x.numel());
  HFNN_CHECK(kind >= 0 && kind < kKinds);
  const Call call{x, y, bits, a, b};
  split_runs(x.numel(), threads, [&](int64_t begin, int64_t end) { runners[kind](call, begin, end); });
}

static void backward(const Tensor& dy, const Tensor& bits, const Tensor& dx, double inside, double outside,
                     int64_t threads) {
  expect_floating("dy", dy.dtype);
  expect_alike("dy", dy, dy);
  expect_alike("dx", dx, dy);
  expect_bits(bits, dy.numel());
  const Call call{dy, dx, bits, inside, outside};
  split_runs(dy.numel(), threads, [&](int64_t begin, int64_t end) { backward_runs(call, begin, end); });
}

const Piecewise piecewise_cpu = {forward, backward};

}  // namespace hfnn
