// Dropout on the CPU.
#include "dropout.h"

#include "cpu.h"
#include "philox.h"

namespace hfnn {

namespace {
struct Call {
  Tensor x, y;
  uint32_t threshold;
  double scale;
  uint64_t seed, offset;
};
}  // namespace

HFNN_CLONES static void forward_runs(const Call& call, int64_t begin, int64_t end) {
  with_runs(call.x.dtype, [&](auto t) HFNN_FLAT {
    using T = decltype(t);
    const Wide<T> scale = Wide<T>(call.scale);
    const uint32_t threshold = call.threshold;
    const uint64_t seed = call.seed, offset = call.offset;
    Runs<T> xs(call.x, kRun), ys(call.y, kRun);
    uint32_t words[kRun];
    for_runs(call.x.numel(), begin, end, [&](int64_t i, int64_t n) HFNN_FLAT {
      // The words of a whole run, even for a shorter one: straight loops over counters, then over elements.
      const uint64_t first = offset + uint64_t(i) / 4;
      for (int k = 0; k < kRun / 4; ++k) {
        const Words four = dropout_words(seed, first + k);
        words[4 * k] = four.a;
        words[4 * k + 1] = four.b;
        words[4 * k + 2] = four.c;
        words[4 * k + 3] = four.d;
      }
      const T* x = xs.read(i, n);
      T* y = ys.open(i);
#pragma omp simd
      for (int64_t k = 0; k < n; ++k) store(y[k], words[k] >= threshold ? load(x[k]) * scale : 0);
      ys.close(i, n);
    });
  });
}

static void forward(const Tensor& x, const Tensor& y, int64_t threshold, double scale, int64_t seed, int64_t offset,
                    const Tensor& pair, int64_t threads) {
  expect_floating("x", x.dtype);
  expect_alike("x", x, x);
  expect_alike("y", y, x);
  HFNN_CHECK(threshold >= 0);
  HFNN_CHECK(threshold <= int64_t(1) << 32);
  if (pair) {
    expect_shape("pair", pair, {2});
    expect_dtype("pair", pair, Dtype::int64);
    seed = pair.as<int64_t>()[0];
    offset = pair.as<int64_t>()[1];
  }
  if (threshold == int64_t(1) << 32) {
    with_dtype(x.dtype, [&](auto t) { std::memset(y.data, 0, size_t(y.numel()) * sizeof(t)); });
    return;
  }
  const Call call{x, y, uint32_t(threshold), scale, uint64_t(seed), uint64_t(offset)};
  split_runs(x.numel(), threads, [&](int64_t begin, int64_t end) { forward_runs(call, begin, end); });
}

const Dropout dropout_cpu = {forward};

}  // namespace hfnn
