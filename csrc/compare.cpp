// Two-bit comparisons on the CPU. The codes of a run are bytes in a buffer before they are packed.
#include "compare.h"

#include "bits_cpu.h"

namespace hfnn {

namespace {
struct Call {
  Tensor a, b, y, codes;
};
struct Slope {
  Tensor dy, codes, dx;
  double factor[4];  // finite, or NaN: dx is 0
};

enum Kind { kAbs, kMaximum, kMinimum, kCodes };
}  // namespace

template <Kind kKind, class T>
HFNN_INLINE T choose(T a, T b) {
  if constexpr (kKind == kAbs) return std::fabs(a);
  if constexpr (kKind == kMaximum) return a >= b ? a : b > a ? b : a + b;  // NaN if neither comparison holds
  return a <= b ? a : b < a ? b : a + b;
}

template <Kind kKind, bool kHasCodes>
HFNN_INLINE void forward_as(const Call& call, int64_t begin, int64_t end) {
  with_runs(call.a.dtype, [&](auto stored) HFNN_FLAT {
    using T = decltype(stored);
    using W = Wide<T>;
    Runs<T> as(call.a, kRun), bs(call.b, kRun), ys(call.y, kRun);
    uint8_t codes[kRun];
    for_runs(call.a.numel(), begin, end, [&](int64_t i, int64_t n) HFNN_FLAT {
      const T *a = as.read(i, n), *b = kKind == kAbs ? a : bs.read(i, n);
      if constexpr (kKind != kCodes) {
        T* y = ys.open(i);
#pragma omp simd
        for (int64_t k = 0; k < n; ++k) store(y[k], choose<kKind>(load(a[k]), load(b[k])));
        ys.close(i, n);
      }
      if constexpr (kHasCodes) {
#pragma omp simd
        for (int64_t k = 0; k < n; ++k) {
          const W p = load(a[k]), q = kKind == kAbs ? W(0) : load(b[k]);
          codes[k] = uint8_t(p < q ? 1 : p > q ? 2 : p == q ? 0 : 3);
        }
        pack_run<2>(codes, call.codes.as<uint8_t>() + i / 4, n);
      }
    });
  });
}

HFNN_CLONES static void abs_alone(const Call& c, int64_t begin, int64_t end) { forward_as<kAbs, false>(c, begin, end); }
HFNN_CLONES static void abs_runs(const Call& c, int64_t begin, int64_t end) { forward_as<kAbs, true>(c, begin, end); }
HFNN_CLONES static void maximum_alone(const Call& c, int64_t begin, int64_t end) {
  forward_as<kMaximum, false>(c, begin, end);
}
HFNN_CLONES static void maximum_runs(const Call& c, int64_t begin, int64_t end) {
  forward_as<kMaximum, true>(c, begin, end);
}
HFNN_CLONES static void minimum_alone(const Call& c, int64_t begin, int64_t end) {
  forward_as<kMinimum, false>(c, begin, end);
}
HFNN_CLONES static void minimum_runs(const Call& c, int64_t begin, int64_t end) {
  forward_as<kMinimum, true>(c, begin, end);
}
HFNN_CLONES static void codes_runs(const Call& c, int64_t begin, int64_t end) {
  forward_as<kCodes, true>(c, begin, end);
}

HFNN_CLONES static void backward_runs(const Slope& call, int64_t begin, int64_t end) {
  const bool one = call.dy.dtype != call.dx.dtype || call.dy.numel() != call.dx.numel();
  with_runs(call.dx.dtype, [&](auto stored) HFNN_FLAT {
    using T = decltype(stored);
    using W = Wide<T>;
    const W f0 = W(call.factor[0]), f1 = W(call.factor[1]), f2 = W(call.factor[2]), f3 = W(call.factor[3]);
    Runs<T> dys(one ? call.dx : call.dy, kRun), dxs(call.dx, kRun);
    uint8_t codes[kRun];
    for_runs(call.dx.numel(), begin, end, [&](int64_t i, int64_t n) HFNN_FLAT {
      unpack_run<2>(call.codes.as<uint8_t>() + i / 4, codes, n);
      const auto product = [=](W dy, uint8_t code) HFNN_FLAT {
        const W low = code & 1 ? f1 : f0, high = code & 1 ? f3 : f2, factor = code & 2 ? high : low;
        return factor == factor ? dy * factor : W(0);
      };
      const T* dy = one ? nullptr : dys.read(i, n);
      T* dx = dxs.open(i);
      if (one) {
        const W all = *call.dy.as<W>();
#pragma omp simd
        for (int64_t k = 0; k < n; ++k) store(dx[k], product(all, codes[k]));
      } else {
#pragma omp simd
        for (int64_t k = 0; k < n; ++k) store(dx[k], product(load(dy[k]), codes[k]));
      }
      dxs.close(i, n);
    });
  });
}

static void expect_codes(const Tensor& codes, int64_t elements) {
  expect_shape("codes", codes, {packed_bytes(elements, 2)});
  expect_dtype("codes", codes, Dtype::uint8);
}

static void forward(const Tensor& a, const Tensor& b, const Tensor& y, const Tensor& codes, int64_t kind,
                    int64_t threads) {
  HFNN_CHECK(kind >= kAbs && kind <= kCodes);
  expect_floating("a", a.dtype);
  expect_alike("a", a, a);
  if (kind != kAbs) expect_alike("b", b, a);
  if (kind != kCodes) expect_alike("y", y, a);
  if (codes || kind == kCodes) expect_codes(codes, a.numel());
  const auto compute = kind == kAbs       ? (codes ? abs_runs : abs_alone)
                       : kind == kMaximum ? (codes ? maximum_runs : maximum_alone)
                       : kind == kMinimum ? (codes ? minimum_runs : minimum_alone)
                                          : codes_runs;
  const Call call{a, b, y, codes};
  split_runs(a.numel(), threads, [&](int64_t begin, int64_t end) { compute(call, begin, end); });
}

static void backward(const Tensor& dy, const Tensor& codes, const Tensor& dx, double equal, double less, double greater,
                     double unordered, int64_t threads) {
  expect_floating("dx", dx.dtype);
  expect_alike("dx", dx, dx);
  if (dy.dims == 1 && dy.numel() == 1 && dy.dtype == wide(dx.dtype))
    expect_shape("dy", dy, {1});
  else
    expect_alike("dy", dy, dx);
  expect_codes(codes, dx.numel());
  const Slope call{dy, codes, dx, {equal, less, greater, unordered}};
  split_runs(dx.numel(), threads, [&](int64_t begin, int64_t end) { backward_runs(call, begin, end); });
}

const Compare compare_cpu = {forward, backward};

}  // namespace hfnn
