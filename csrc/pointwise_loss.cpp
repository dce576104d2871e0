// Pointwise losses on the CPU, with the gradient computed in the same pass.
#include "pointwise_loss.h"

#include "exp_cpu.h"

namespace hfnn {

namespace {
struct Call {
  Tensor x, target, sums, dx;
  double parameter;
};

enum Kind { kSquared, kHuber, kSmoothL1, kBinaryCrossEntropy };

template <class T>
struct Term {
  T value, slope;
};
}  // namespace

// In Huber and smooth L1, |d| < p fails for a NaN. Its slope is then a NaN, too.
template <Kind kKind, class T>
HFNN_INLINE Term<T> term(T x, T target, T p) {
  if constexpr (kKind == kBinaryCrossEntropy) {
    const T e = exp_negative(-std::fabs(x)), larger = 1 / (1 + e);
    return {x * ((x > 0 ? 1 : 0) - target) + log1p_positive(e), (x < 0 ? e * larger : larger) - target};
  }
  const T d = x - target, size = std::fabs(d);
  if constexpr (kKind == kSquared) return {d * d, 2 * d};
  const T sign = d > 0 ? T(1) : d < 0 ? T(-1) : d;
  if constexpr (kKind == kHuber)
    return size < p ? Term<T>{T(0.5) * d * d, d} : Term<T>{p * (size - T(0.5) * p), p * sign};
  return size < p ? Term<T>{T(0.5) * d * d / p, d / p} : Term<T>{size - T(0.5) * p, sign};
}

static int64_t partials(int64_t numel) { return std::clamp<int64_t>(count_runs(numel), 1, 1024); }

// Sums [begin, end), each over consecutive runs of elements.
template <Kind kKind>
HFNN_INLINE void forward_sums(const Call& c, int64_t begin, int64_t end) {
  const int64_t numel = c.x.numel(), runs = count_runs(numel), parts = partials(numel);
  with_runs(c.x.dtype, [&](auto stored) HFNN_FLAT {
    using T = decltype(stored);
    using W = Wide<T>;
    const W p = W(c.parameter);
    Runs<T> xs(c.x, kRun), targets(c.target, kRun), dxs(c.dx, kRun);
    for (int64_t part = begin; part < end; ++part) {
      double total = 0;
      for_runs(numel, runs * part / parts, runs * (part + 1) / parts, [&](int64_t i, int64_t n) HFNN_FLAT {
        const T *x = xs.read(i, n), *target = targets.read(i, n);
        total += sum<double>(
            n, [=](int64_t k) HFNN_FLAT { return double(term<kKind>(load(x[k]), load(target[k]), p).value); });
        if (!c.dx) return;
        T* dx = dxs.open(i);
#pragma omp simd
        for (int64_t k = 0; k < n; ++k) store(dx[k], term<kKind>(load(x[k]), load(target[k]), p).slope);
        dxs.close(i, n);
      });
      c.sums.as<W>()[part] = W(total);
    }
  });
}

HFNN_CLONES static void squared(const Call& c, int64_t begin, int64_t end) { forward_sums<kSquared>(c, begin, end); }
HFNN_CLONES static void huber(const Call& c, int64_t begin, int64_t end) { forward_sums<kHuber>(c, begin, end); }
HFNN_CLONES static void smooth_l1(const Call& c, int64_t begin, int64_t end) { forward_sums<kSmoothL1>(c, begin, end); }
HFNN_CLONES static void binary_cross_entropy(const Call& c, int64_t begin, int64_t end) {
  forward_sums<kBinaryCrossEntropy>(c, begin, end);
}

static void forward(const Tensor& x, const Tensor& target, const Tensor& sums, const Tensor& dx, int64_t kind,
                    double parameter, int64_t threads) {
  expect_floating("x", x.dtype);
  expect_alike("x", x, x);
  expect_alike("target", target, x);
  if (dx) expect_alike("dx", dx, x);
  const int64_t parts = partials(x.numel());
  expect_shape("sums", sums, {parts});
  expect_dtype("sums", sums, wide(x.dtype));
  HFNN_CHECK(kind >= kSquared && kind <= kBinaryCrossEntropy);
  const auto compute = kind == kSquared    ? squared
                       : kind == kHuber    ? huber
                       : kind == kSmoothL1 ? smooth_l1
                                           : binary_cross_entropy;
  const Call call{x, target, sums, dx, parameter};
  split(parts, x.numel(), threads, [&](int64_t begin, int64_t end) { compute(call, begin, end); });
}

const PointwiseLoss pointwise_loss_cpu = {partials, forward};

}  // namespace hfnn
