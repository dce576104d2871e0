// Smooth functions of one input on the CPU. float32 and the 16-bit dtypes use exponentials and logarithms that
// vectorise, float64 the standard library.
#include "unary.h"

#include "exp_cpu.h"

namespace hfnn {

namespace {
enum Kind {
  kSigmoid,
  kTanh,
  kSoftplus,
  kLogSigmoid,
  kElu,
  kSoftsign,
  kExp,
  kSqrt,
  kMish,
  kHardswish,
  kQuickGelu,
  kReluSquared,
};

// Forward: x is the input and y the output. Backward: x is the kept tensor and y is dx. limit: elu's limit, rounded to
// the dtype.
struct Call {
  Tensor dy, x, y;
  double a, b, c, limit;
};

template <class T>
struct Options {
  T a, b, c, limit;
};
}  // namespace

// exp(x) for every x, including subnormal results: 2^n is applied as two factors, each a normal number.
HFNN_INLINE float exp_of(float x) {
  const float z = x > 89 ? 89 : x < -104 ? -104 : x;
  const Exp e = split_exp(z);
  const int32_t n = int32_t(e.n - 0x4b400000), half = n >> 1;
  return (e.expm1 + 1) * float_of(uint32_t(half + 127) << 23) * float_of(uint32_t(n - half + 127) << 23);
}
HFNN_INLINE double exp_of(double x) { return std::exp(x); }

// exp(z) - 1 for z <= 0. A zero keeps the sign of z.
HFNN_INLINE float expm1_negative(float z) {
  const Exp e = split_exp(z);
  const float power = float_of((e.n + 127) << 23), value = madd(e.expm1, power, power - 1);
  return std::copysign(z < -18 ? 1 : value, z);
}
HFNN_INLINE double expm1_negative(double z) { return std::expm1(z); }

template <class T>
struct Mish {
  T e, w, share;  // exp(x), e (e + 2), 1 / (w + 2): tanh(log(1 + e)) is w * share
};
// From 20 on (40 in float64), w * share is 1, and e squared does not overflow.
template <class T>
constexpr T kMishEnd = sizeof(T) == 8 ? 40 : 20;
template <class T>
HFNN_INLINE Mish<T> mish(T x) {
  const T e = exp_minus(x > kMishEnd<T> ? -kMishEnd<T> : -x), w = e * (e + 2);
  return {e, w, 1 / (w + 2)};
}

constexpr double kQuick = 1.702;

template <Kind kKind, class T>
HFNN_INLINE T value(T x, const Options<T>& o) {
  if constexpr (kKind == kSigmoid) return 1 / (1 + exp_minus(x));
  if constexpr (kKind == kTanh) return tanh_of(x);
  if constexpr (kKind == kSoftplus) {
    const T z = o.a * x, log = log1p_positive(exp_negative(-std::fabs(z)));
    return z > o.b ? x : ((z > 0 ? z : 0) + log) / o.a;
  }
  if constexpr (kKind == kLogSigmoid) return (x > 0 ? 0 : x) - log1p_positive(exp_negative(-std::fabs(x)));
  if constexpr (kKind == kElu) return x > 0 ? o.b * x : o.a * o.b * expm1_negative(o.c * (x > 0 ? 0 : x));
  if constexpr (kKind == kSoftsign) return x / (1 + std::fabs(x));
  if constexpr (kKind == kExp) return exp_of(x);
  if constexpr (kKind == kSqrt) return std::sqrt(x);
  if constexpr (kKind == kMish) {
    const Mish<T> m = mish(x);
    return x * (m.w * m.share);
  }
  if constexpr (kKind == kHardswish) {
    const T above = x + 3, inner = above < 0 ? 0 : above;
    return x >= 3 ? x : x * inner * T(1 / 6.0);  // x * 6 would overflow
  }
  if constexpr (kKind == kReluSquared) {
    const T r = x < 0 ? 0 : x;  // a NaN stays a NaN
    return r * r;
  }
  return x / (1 + exp_minus(T(kQuick) * x));
}

template <Kind kKind, class T>
HFNN_INLINE T gradient(T dy, T kept, const Options<T>& o) {
  if constexpr (kKind == kSigmoid) return dy * (kept * (1 - kept));
  if constexpr (kKind == kTanh) return dy * (1 - kept * kept);
  if constexpr (kKind == kSoftplus) {
    const T z = o.a * kept;
    return z > o.b ? dy : dy * (0 - expm1_negative(-z));
  }
  if constexpr (kKind == kLogSigmoid) return dy * (0 - expm1_negative(kept));
  if constexpr (kKind == kElu) {
    const T below = kept <= o.limit ? 0 : o.c * (kept + o.a * o.b);
    return dy * (kept > 0 ? o.b : below);
  }
  if constexpr (kKind == kSoftsign) {
    const T rest = 1 - std::fabs(kept);
    return dy * (rest * rest);
  }
  if constexpr (kKind == kExp) return dy * kept;
  if constexpr (kKind == kSqrt) return dy / (2 * kept);
  if constexpr (kKind == kMish) {
    const Mish<T> m = mish(kept);
    const T bend = 4 * (m.e * m.share) * ((1 + m.e) * m.share);
    return dy * (m.w * m.share + kept * (kept > kMishEnd<T> ? 0 : bend));
  }
  if constexpr (kKind == kHardswish) return kept <= -3 ? 0 : dy * (kept >= 3 ? 1 : kept * T(1 / 3.0) + T(0.5));
  if constexpr (kKind == kReluSquared) return kept <= 0 ? 0 : dy * (2 * kept);
  const T e = exp_minus(T(kQuick) * kept), s = 1 / (1 + e), rest = kept > 0 ? e * s : 1 - s;  // without cancellation
  return dy * (s + kept * s * (T(kQuick) * rest));
}

template <class T>
HFNN_INLINE Options<T> options(const Call& call) {
  return {T(call.a), T(call.b), T(call.c), T(call.limit)};
}

template <Kind kKind>
HFNN_INLINE void forward_runs(const Call& call, int64_t begin, int64_t end) {
  with_runs(call.x.dtype, [&](auto t) HFNN_FLAT {
    using T = decltype(t);
    const auto o = options<Wide<T>>(call);
    Runs<T> xs(call.x, kRun), ys(call.y, kRun);
    for_runs(call.x.numel(), begin, end, [&](int64_t i, int64_t n) HFNN_FLAT {
      const T* x = xs.read(i, n);
      T* y = ys.open(i);
#pragma omp simd
      for (int64_t k = 0; k < n; ++k) store(y[k], value<kKind>(load(x[k]), o));
      ys.close(i, n);
    });
  });
}

template <Kind kKind>
HFNN_INLINE void backward_runs(const Call& call, int64_t begin, int64_t end) {
  with_runs(call.x.dtype, [&](auto t) HFNN_FLAT {
    using T = decltype(t);
    const auto o = options<Wide<T>>(call);
    Runs<T> dys(call.dy, kRun), kepts(call.x, kRun), dxs(call.y, kRun);
    for_runs(call.x.numel(), begin, end, [&](int64_t i, int64_t n) HFNN_FLAT {
      const T *dy = dys.read(i, n), *kept = kepts.read(i, n);
      T* dx = dxs.open(i);
#pragma omp simd
      for (int64_t k = 0; k < n; ++k) store(dx[k], gradient<kKind>(load(dy[k]), load(kept[k]), o));
      dxs.close(i, n);
    });
  });
}

HFNN_PASSES(kSigmoid)
HFNN_PASSES(kTanh)
HFNN_PASSES(kSoftplus)
HFNN_PASSES(kLogSigmoid)
HFNN_PASSES(kElu)
HFNN_PASSES(kSoftsign)
HFNN_PASSES(kExp)
HFNN_PASSES(kSqrt)
HFNN_PASSES(kMish)
HFNN_PASSES(kHardswish)
HFNN_PASSES(kQuickGelu)
HFNN_PASSES(kReluSquared)

// For each kind, in the order of the enum.
struct Passes {
  void (*forward)(const Call& call, int64_t begin, int64_t end);
  void (*backward)(const Call& call, int64_t begin, int64_t end);
};

static const Passes& passes_of(int64_t kind) {
  static const Passes all[] = {
      {forward_kSigmoid, backward_kSigmoid},
      {forward_kTanh, backward_kTanh},
      {forward_kSoftplus, backward_kSoftplus},
      {forward_kLogSigmoid, backward_kLogSigmoid},
      {forward_kElu, backward_kElu},
      {forward_kSoftsign, backward_kSoftsign},
      {forward_kExp, backward_kExp},
      {forward_kSqrt, backward_kSqrt},
      {forward_kMish, backward_kMish},
      {forward_kHardswish, backward_kHardswish},
      {forward_kQuickGelu, backward_kQuickGelu},
      {forward_kReluSquared, backward_kReluSquared},
  };
  HFNN_CHECK(kind >= kSigmoid && kind <= kReluSquared);
  return all[kind];
}

// A number rounded to a dtype.
static double rounded(double number, Dtype dtype) {
  double found = number;
  with_dtype(dtype, [&](auto stored) {
    store(stored, Wide<decltype(stored)>(number));
    found = load(stored);
  });
  return found;
}

static void forward(const Tensor& x, const Tensor& y, int64_t kind, double a, double b, double c, int64_t threads) {
  expect_floating("x", x.dtype);
  expect_alike("x", x, x);
  expect_alike("y", y, x);
  const auto pass = passes_of(kind).forward;
  const Call call{{}, x, y, a, b, c, 0};
  split_runs(x.numel(), threads, [&](int64_t begin, int64_t end) { pass(call, begin, end); });
}

static void backward(const Tensor& dy, const Tensor& kept, const Tensor& dx, int64_t kind, double a, double b, double c,
                     int64_t threads) {
  expect_floating("kept", kept.dtype);
  expect_alike("kept", kept, kept);
  expect_alike("dy", dy, kept);
  expect_alike("dx", dx, kept);
  const auto pass = passes_of(kind).backward;
  const Call call{dy, kept, dx, a, b, c, rounded(-a * b, kept.dtype)};
  split_runs(kept.numel(), threads, [&](int64_t begin, int64_t end) { pass(call, begin, end); });
}

const Unary unary_cpu = {forward, backward};

}  // namespace hfnn
