// Softmax and its logarithm on the CPU. A row is read once from memory and once from the cache.
#include "softmax.h"

#include "logits_cpu.h"

namespace hfnn {

namespace {
struct Call {
  Tensor x, y, dy, dx;
  int64_t cols() const { return y.shape[1]; }
};
}  // namespace

template <bool kLog>
HFNN_INLINE void forward_rows(const Call& c, int64_t begin, int64_t end) {
  const int64_t cols = c.cols();
  with_result(c.x.dtype, c.y.dtype, [&](auto in, auto out) HFNN_FLAT {
    using W = Wide<decltype(in)>;
    Runs<decltype(in)> xs(c.x, kRun);
    Runs<decltype(out)> ys(c.y, kRun);
    const Squash<W> widened(1, 0);
    for (int64_t first = begin * cols; first < end * cols; first += cols) {
      LogSumExp<W> sum;
      for_runs(cols, 0, count_runs(cols), [&](int64_t k, int64_t n) HFNN_FLAT {
        alignas(64) W x[kRun];
        widened.run(xs.read(first + k, n), x, n);
        sum.add(x, n);
      });
      // Subtracting the maximum first keeps more digits than subtracting lse at once.
      const W max = sum.max, inverse = W(1 / sum.total), log_total = W(sum.log_total());
      for_runs(cols, 0, count_runs(cols), [&](int64_t begin, int64_t n) HFNN_FLAT {
        const auto* x = xs.read(first + begin, n);
        auto* y = ys.open(first + begin);
#pragma omp simd
        for (int64_t k = 0; k < n; ++k)
          if constexpr (kLog)
            store(y[k], load(x[k]) - max - log_total);
          else
            store(y[k], exp_negative(load(x[k]) - max) * inverse);
        ys.close(first + begin, n);
      });
    }
  });
}

// dx = (dy - sum(dy * y)) * y; for the logarithm, dx = dy - exp(y) * sum(dy)
template <bool kLog>
HFNN_INLINE void backward_rows(const Call& c, int64_t begin, int64_t end) {
  const int64_t cols = c.cols();
  with_result(c.dx.dtype, c.y.dtype, [&](auto in, auto out) HFNN_FLAT {
    using W = Wide<decltype(in)>;
    Runs<decltype(out)> dys(c.dy, kRun), ys(c.y, kRun);
    Runs<decltype(in)> dxs(c.dx, kRun);
    for (int64_t first = begin * cols; first < end * cols; first += cols) {
      double total = 0;
      for_runs(cols, 0, count_runs(cols), [&](int64_t begin, int64_t n) HFNN_FLAT {
        const auto *dy = dys.read(first + begin, n), *y = ys.read(first + begin, n);
        total += sum<W>(n, [=](int64_t k) HFNN_FLAT { return kLog ? load(dy[k]) : load(dy[k]) * load(y[k]); });
      });
      const W sum = W(total);
      for_runs(cols, 0, count_runs(cols), [&](int64_t begin, int64_t n) HFNN_FLAT {
        const auto *dy = dys.read(first + begin, n), *y = ys.read(first + begin, n);
        auto* dx = dxs.open(first + begin);
#pragma omp simd
        for (int64_t k = 0; k < n; ++k)
          if constexpr (kLog)
            store(dx[k], load(dy[k]) - exp_negative(load(y[k])) * sum);
          else
            store(dx[k], (load(dy[k]) - sum) * load(y[k]));
        dxs.close(first + begin, n);
      });
    }
  });
}

HFNN_CLONES static void forward_plain(const Call& c, int64_t begin, int64_t end) { forward_rows<false>(c, begin, end); }
HFNN_CLONES static void forward_log(const Call& c, int64_t begin, int64_t end) { forward_rows<true>(c, begin, end); }
HFNN_CLONES static void backward_plain(const Call& c, int64_t begin, int64_t end) {
  backward_rows<false>(c, begin, end);
}
HFNN_CLONES static void backward_log(const Call& c, int64_t begin, int64_t end) { backward_rows<true>(c, begin, end); }

static void forward(const Tensor& x, const Tensor& y, bool log, int64_t threads) {
  expect_matrix("x", x);
  expect_shape("y", y, {x.shape[0], x.shape[1]});
  expect_result("x", x.dtype, "y", y.dtype);
  if (x.numel() == 0) return;
  const Call call{x, y, {}, {}};
  split(x.shape[0], x.numel(), threads,
        [&](int64_t begin, int64_t end) { (log ? forward_log : forward_plain)(call, begin, end); });
}

static void backward(const Tensor& dy, const Tensor& y, const Tensor& dx, bool log, int64_t threads) {
  expect_matrix("y", y);
  expect_alike("dy", dy, y);
  expect_shape("dx", dx, {y.shape[0], y.shape[1]});
  expect_result("dx", dx.dtype, "y", y.dtype);
  if (y.numel() == 0) return;
  const Call call{{}, y, dy, dx};
  split(y.shape[0], y.numel(), threads,
        [&](int64_t begin, int64_t end) { (log ? backward_log : backward_plain)(call, begin, end); });
}

const Softmax softmax_cpu = {forward, backward};

}  // namespace hfnn
