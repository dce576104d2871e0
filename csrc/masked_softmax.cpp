// Masked softmax on the CPU. A row is read once. Its exponentials are computed once, relative to the largest score so
// far, and are buffered until the sum is known.
#include "masked_softmax.h"

#include "logits_cpu.h"

namespace hfnn {

namespace {
struct Call {
  Tensor x, mask, y, dy, dx;
  double scale;
  bool causal;
  int64_t shift;

  int64_t cols() const { return y.shape[3]; }
  int64_t rows() const { return y.shape[0] * y.shape[1] * y.shape[2]; }
  // The number of included columns of a row, as far as `causal` decides.
  int64_t limit(int64_t row) const {
    if (!causal) return cols();
    return std::max<int64_t>(0, std::min(cols(), row % y.shape[2] + shift + 1));
  }
  // The offset of a row in the mask.
  int64_t masked(int64_t row) const {
    const int64_t t = row % y.shape[2], h = row / y.shape[2] % y.shape[1], n = row / y.shape[2] / y.shape[1];
    return n * mask.strides[0] + h * mask.strides[1] + t * mask.strides[2];
  }
};
}  // namespace

static int64_t bytes(Dtype dtype) { return dtype == Dtype::float64 ? 8 : dtype == Dtype::float32 ? 4 : 2; }

// Zeros n elements of t, from `first` on.
HFNN_INLINE void clear(const Tensor& t, int64_t first, int64_t n) {
  const int64_t size = bytes(t.dtype);
  std::memset(t.as<char>() + first * size, 0, n * size);
}

// Applies the mask of n columns, from element `at` on, to their scores.
template <class W>
HFNN_INLINE void put_on(const Tensor& mask, int64_t at, W* z, int64_t n) {
  constexpr W kNothing = -std::numeric_limits<W>::infinity();
  const bool alike = mask.strides[3] == 0;  // one number for all columns
  if (mask.dtype == Dtype::uint8) {
    const uint8_t* m = mask.as<uint8_t>() + at;
    if (alike) {
      if (!*m) std::fill_n(z, n, kNothing);
    } else {
#pragma omp simd
      for (int64_t k = 0; k < n; ++k) z[k] = m[k] ? z[k] : kNothing;
    }
    return;
  }
  with_dtype(mask.dtype, [&](auto stored) HFNN_FLAT {
    const auto* m = mask.as<decltype(stored)>() + at;
    if (alike) {
      const W add = W(load(*m));
#pragma omp simd
      for (int64_t k = 0; k < n; ++k) z[k] += add;
    } else {
#pragma omp simd
      for (int64_t k = 0; k < n; ++k) z[k] += W(load(m[k]));
    }
  });
}

// Exponentials of a row's scores, in runs that are each relative to their own base, and their sum.
template <class W>
struct Row {
  std::unique_ptr<W[]> e, about;
  LogSumExp<W> sum;

  explicit Row(int64_t cols) : e(new W[cols]), about(new W[count_runs(cols)]) {}

  // The scores of columns [begin, begin + n) are in `e`.
  HFNN_INLINE void add(int64_t begin, int64_t n) {
    W* z = e.get() + begin;
    sum.raise(z, n);
    const W base = sum.base();
#pragma omp simd
    for (int64_t k = 0; k < n; ++k) z[k] = exp_negative(z[k] - base);
    const W* done = z;
    sum.total += hfnn::sum<W>(n, [=](int64_t k) HFNN_FLAT { return done[k]; });
    about[begin / kRun] = sum.max;
  }
  // The factor from a run's exponentials to y. If all scores so far were -inf, its exponentials are 0 or NaN, relative
  // to 0.
  HFNN_INLINE W factor(int64_t begin) const {
    const W base = about[begin / kRun];
    if (base == sum.max) return W(1 / sum.total);
    return W(std::exp(double(base) - double(sum.max)) / sum.total);
  }
};

HFNN_INLINE void forward_rows(const Call& c, int64_t begin, int64_t end) {
  const int64_t cols = c.cols();
  with_runs(c.x.dtype, c.y.dtype, [&](auto in, auto out) HFNN_FLAT {
    using W = Wide<decltype(in)>;
    Runs<decltype(in)> xs(c.x, kRun);
    Runs<decltype(out)> ys(c.y, kRun);
    const Squash<W> scaled(c.scale, 0);
    Row<W> row(cols);
    for (int64_t r = begin; r < end; ++r) {
      const int64_t first = r * cols, limit = c.limit(r), masked = c.mask ? c.masked(r) : 0;
      row.sum = {};
      for_runs(limit, 0, count_runs(limit), [&](int64_t begin, int64_t n) HFNN_FLAT {
        scaled.run(xs.read(first + begin, n), row.e.get() + begin, n);
        if (c.mask) put_on(c.mask, masked + begin * c.mask.strides[3], row.e.get() + begin, n);
        row.add(begin, n);
      });
      if (row.sum.total == 0) {
        clear(c.y, first, cols);
        continue;
      }
      for_runs(limit, 0, count_runs(limit), [&](int64_t begin, int64_t n) HFNN_FLAT {
        const W factor = row.factor(begin);
        const W* e = row.e.get() + begin;
        auto* y = ys.open(first + begin);
#pragma omp simd
        for (int64_t k = 0; k < n; ++k) store(y[k], e[k] * factor);
        ys.close(first + begin, n);
      });
      clear(c.y, first + limit, cols - limit);
    }
  });
}

HFNN_INLINE void backward_rows(const Call& c, int64_t begin, int64_t end) {
  const int64_t cols = c.cols();
  with_runs(c.y.dtype, c.dx.dtype, [&](auto in, auto out) HFNN_FLAT {
    using W = Wide<decltype(in)>;
    Runs<decltype(in)> dys(c.dy, kRun), ys(c.y, kRun);
    Runs<decltype(out)> dxs(c.dx, kRun);
    const W scale = W(c.scale);
    for (int64_t r = begin; r < end; ++r) {
      const int64_t first = r * cols, limit = c.limit(r);
      double total = 0;
      for_runs(limit, 0, count_runs(limit), [&](int64_t begin, int64_t n) HFNN_FLAT {
        const auto *dy = dys.read(first + begin, n), *y = ys.read(first + begin, n);
        total += sum<W>(n, [=](int64_t k) HFNN_FLAT {
          const W at = load(y[k]), product = load(dy[k]) * at;
          return at == 0 ? 0 : product;
        });
      });
      const W sum = W(total);
      for_runs(limit, 0, count_runs(limit), [&](int64_t begin, int64_t n) HFNN_FLAT {
        const auto *dy = dys.read(first + begin, n), *y = ys.read(first + begin, n);
        auto* dx = dxs.open(first + begin);
#pragma omp simd
        for (int64_t k = 0; k < n; ++k) {
          const W at = load(y[k]), slope = (load(dy[k]) - sum) * at * scale;
          store(dx[k], at == 0 ? 0 : slope);
        }
        dxs.close(first + begin, n);
      });
      clear(c.dx, first + limit, cols - limit);
    }
  });
}

HFNN_CLONES static void forward_range(const Call& c, int64_t begin, int64_t end) { forward_rows(c, begin, end); }
HFNN_CLONES static void backward_range(const Call& c, int64_t begin, int64_t end) { backward_rows(c, begin, end); }

static void expect_scores(const char* what, const Tensor& t) {
  if (t.dims != 4) refuse(what, "have the shape (N, H, T, S)", text(t.shape, t.dims));
  expect_alike(what, t, t);
}

static void expect_shift(const Tensor& x, bool causal, int64_t shift) {
  if (causal) HFNN_CHECK(shift >= -x.shape[2] && shift <= x.shape[3]);
}

static void expect_mask(const Tensor& mask, const Tensor& x) {
  if (mask.device != -1) refuse("mask", "be on the CPU", "one on cuda:" + std::to_string(mask.device));
  if (mask.dims != 4 || !std::equal(x.shape, x.shape + 4, mask.shape))
    refuse("mask", "have the shape " + text(x.shape, 4), text(mask.shape, mask.dims));
  if (mask.dtype != Dtype::uint8 && mask.dtype != Dtype::float32 && mask.dtype != x.dtype)
    refuse("mask", std::string("be bool, float32 or ") + name(x.dtype), name(mask.dtype));
  if (x.shape[3] > 1 && mask.strides[3] != 0 && mask.strides[3] != 1)
    refuse("mask", "have a last stride of 0 or 1", text(mask.strides, 4));
}

static void forward(const Tensor& x, const Tensor& mask, const Tensor& y, double scale, bool causal, int64_t shift,
                    int64_t threads) {
  expect_scores("x", x);
  expect_shape("y", y, x.shape, 4);
  expect_pair("x", x.dtype, "y", y.dtype);
  expect_shift(x, causal, shift);
  if (mask) expect_mask(mask, x);
  if (x.numel() == 0) return;
  const Call call{x, mask, y, {}, {}, scale, causal, shift};
  split(call.rows(), x.numel(), threads, [&](int64_t begin, int64_t end) { forward_range(call, begin, end); });
}

static void backward(const Tensor& dy, const Tensor& y, const Tensor& dx, double scale, bool causal, int64_t shift,
                     int64_t threads) {
  expect_scores("y", y);
  expect_alike("dy", dy, y);
  expect_shape("dx", dx, y.shape, 4);
  expect_pair("y", y.dtype, "dx", dx.dtype);
  expect_shift(y, causal, shift);
  if (y.numel() == 0) return;
  const Call call{{}, {}, y, dy, dx, scale, causal, shift};
  split(call.rows(), y.numel(), threads, [&](int64_t begin, int64_t end) { backward_range(call, begin, end); });
}

const MaskedSoftmax masked_softmax_cpu = {forward, backward};

}  // namespace hfnn
