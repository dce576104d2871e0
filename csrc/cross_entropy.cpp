// Cross-entropy on the CPU. A row is read from memory once for its loss, and from the cache for its gradient.
#include "cross_entropy.h"

#include "logits_cpu.h"

namespace hfnn {

namespace {
// A call. Losses are computed if `loss` is given, gradients if `dx` is.
struct Call {
  Tensor x, target, weight, loss, share, lse, slope, factor, dx;
  int64_t ignore_index;
  double smoothing, z_loss, logit_scale, softcap;

  int64_t rows() const { return x.shape[0]; }
  int64_t cols() const { return x.shape[1]; }
  bool classes() const { return target.dtype == Dtype::int64; }
  bool all_weights() const { return !classes() || smoothing != 0; }
};

enum Target { kClass, kSmoothedClass, kProbabilities };

// For a row q of probabilities: b_c = w_c (keep q_c + spread). For classes: b_c = unit * even(c), plus keep w_t for the
// class itself.
template <Target kTarget, class W>
struct Coefficients {
  const W* weight;
  double keep, unit;
  W near, spread;  // for probabilities: keep and smoothing / C

  Coefficients(const W* weight, double smoothing, int64_t cols)
      : weight(weight),
        keep(1 - smoothing),
        unit(kTarget == kProbabilities ? 1 : smoothing / double(cols)),
        near(W(keep)),
        spread(W(smoothing / double(cols))) {}

  template <class Q>
  HFNN_INLINE W even(const Q* q, int64_t c) const {
    if constexpr (kTarget == kProbabilities) return weight[c] * (near * load(*q) + spread);
    if constexpr (kTarget == kSmoothedClass) return weight[c];
    return 0;
  }
  HFNN_INLINE double share(int64_t t) const { return weight && t >= 0 ? weight[t] : 1; }
};

// What a row of logits is reduced to: slope = sum(b), dot = sum(b (z - sum.base())).
template <class W>
struct Row {
  LogSumExp<W> sum;
  double slope = 0, dot = 0;
};
}  // namespace

// t is the row's class, or -1 for probabilities.
template <Target kTarget, class X, class Q, class W>
HFNN_INLINE Row<W> reduce(Runs<X>& xs, Runs<Q>& qs, int64_t first, int64_t cols, int64_t t, const Squash<W>& squash,
                          const Coefficients<kTarget, W> b) {
  Row<W> row;
  for_runs(cols, 0, count_runs(cols), [&](int64_t begin, int64_t n) HFNN_FLAT {
    alignas(64) W z[kRun];
    squash.run(xs.read(first + begin, n), z, n);
    const double before = row.sum.base();
    row.sum.add(z, n);
    const W base = row.sum.base();
    row.dot += row.slope * (before - double(base));
    if constexpr (kTarget != kClass) {
      const Q* q = kTarget == kProbabilities ? qs.read(first + begin, n) : nullptr;
      const W* logits = z;
      Sums<double, 2> sums;
      sums.run(n, [=](int64_t k, double& slope, double& dot) HFNN_FLAT {
        const W b_k = b.even(q + k, begin + k);
        slope += double(b_k);
        dot += double(b_k * (logits[k] - base));
      });
      row.slope += b.unit * sums.total(0);
      row.dot += b.unit * sums.total(1);
    }
    if (t >= begin && t < begin + n) {
      const double b_t = b.keep * b.share(t);
      row.slope += b_t;
      row.dot += b_t * (double(z[t - begin]) - double(base));
    }
  });
  return row;
}

// dx_c = (a exp(z_c - base) - g b_c) dz_c/dx_c. That of the class is computed in float64, because the difference
// cancels.
template <bool kCapped, Target kTarget, class X, class Q, class W>
HFNN_INLINE void gradient(Runs<X>& xs, Runs<Q>& qs, Runs<X>& dxs, int64_t first, int64_t cols, int64_t t,
                          const Squash<W> squash, const Coefficients<kTarget, W> b, W base, double a, double g) {
  const W a_W = W(a), g_W = W(g * b.unit);
  for_runs(cols, 0, count_runs(cols), [&](int64_t begin, int64_t n) HFNN_FLAT {
    alignas(64) W z[kRun];
    squash.run(xs.read(first + begin, n), z, n);
    const Q* q = kTarget == kProbabilities ? qs.read(first + begin, n) : nullptr;
    const W* logits = z;
    X* dx = dxs.open(first + begin);
#pragma omp simd
    for (int64_t k = 0; k < n; ++k) {
      const W difference = a_W * exp_negative(logits[k] - base) - g_W * b.even(q + k, begin + k);
      store(dx[k], difference * squash.template slope<kCapped>(logits[k]));
    }
    const int64_t k = t - begin;
    if (k >= 0 && k < n) {
      const double b_t = b.unit * b.even(q + k, t) + b.keep * b.share(t);
      const double difference = a * std::exp(double(z[k]) - double(base)) - g * b_t;
      store(dx[k], W(difference * squash.template slope<kCapped>(z[k])));
    }
    dxs.close(first + begin, n);
  });
}

template <class W>
HFNN_INLINE void put(const Tensor& t, int64_t row, double value) {
  if (t) t.as<W>()[row] = W(value);
}

// Rows [begin, end): losses, gradients, or both.
template <Target kTarget, class X, class Q>
HFNN_INLINE void rows(const Call& c, const Vector& weight, int64_t begin, int64_t end) {
  using W = Wide<X>;
  const int64_t cols = c.cols();
  const Squash<W> squash(c.logit_scale, c.softcap);
  const Coefficients<kTarget, W> b(c.weight || c.all_weights() ? weight.as<W>() : nullptr, c.smoothing, cols);
  Runs<X> xs(c.x, kRun), dxs(c.dx, kRun);
  Runs<Q> qs(c.target, kRun);
  for (int64_t r = begin; r < end; ++r) {
    const int64_t t = kTarget == kProbabilities ? -1 : c.target.as<int64_t>()[r];
    const bool ignored = kTarget != kProbabilities && t == c.ignore_index;
    // p = exp(z - base) / total: from the maximum and the sum, or from lse and its rounding error in W.
    double lse = 0, slope = 0, base = 0, total = 1;
    if (c.loss) {
      double loss = 0;
      if (!ignored) {
        const Row<W> row = reduce<kTarget>(xs, qs, r * cols, cols, t, squash, b);
        lse = row.sum.value(), slope = row.slope, base = row.sum.max, total = row.sum.total;
        loss = slope * row.sum.log_total() - row.dot + (c.z_loss == 0 ? 0 : c.z_loss * lse * lse);
      }
      put<W>(c.loss, r, loss);
      put<W>(c.share, r, ignored ? 0 : kTarget == kProbabilities ? 1 : b.share(t));
      put<double>(c.lse, r, lse);
      put<W>(c.slope, r, slope);
    } else {
      lse = c.lse.as<double>()[r], base = W(lse), total = std::exp(lse - base);
      slope = c.slope ? c.slope.as<W>()[r] : c.weight && !ignored ? b.share(t) : 1;
    }
    if (!c.dx) continue;
    if (ignored) {
      with_dtype(c.dx.dtype, [&](auto stored) {
        std::memset(c.dx.as<decltype(stored)>() + r * cols, 0, size_t(cols) * sizeof(stored));
      });
      continue;
    }
    const double g = factor_of<W>(c.factor, r), a = g * (slope + 2 * c.z_loss * lse) / total;
    if (c.softcap != 0)
      gradient<true>(xs, qs, dxs, r * cols, cols, t, squash, b, W(base), a, g);
    else
      gradient<false>(xs, qs, dxs, r * cols, cols, t, squash, b, W(base), a, g);
  }
}

HFNN_CLONES static void class_rows(const Call& c, const Vector& weight, int64_t begin, int64_t end) {
  with_runs(c.x.dtype, [&](auto x) HFNN_FLAT { rows<kClass, decltype(x), decltype(x)>(c, weight, begin, end); });
}
HFNN_CLONES static void smoothed_rows(const Call& c, const Vector& weight, int64_t begin, int64_t end) {
  with_runs(c.x.dtype,
            [&](auto x) HFNN_FLAT { rows<kSmoothedClass, decltype(x), decltype(x)>(c, weight, begin, end); });
}
HFNN_CLONES static void probability_rows(const Call& c, const Vector& weight, int64_t begin, int64_t end) {
  with_result(c.x.dtype, c.target.dtype,
              [&](auto x, auto q) HFNN_FLAT { rows<kProbabilities, decltype(x), decltype(q)>(c, weight, begin, end); });
}

static void check(const Call& c) {
  expect_matrix("x", c.x);
  const int64_t rows = c.rows(), cols = c.cols();
  if (c.classes()) {
    expect_shape("target", c.target, {rows});
  } else {
    expect_shape("target", c.target, {rows, cols});
    expect_result("x", c.x.dtype, "target", c.target.dtype);
  }
  if (c.weight) {
    expect_shape("weight", c.weight, {cols});
    expect_floating("weight", c.weight.dtype);
  }
  for (const auto& [name, t] : {std::pair("loss", &c.loss), {"share", &c.share}, {"slope", &c.slope}})
    if (*t) expect_rows(name, *t, c.x);
  if (c.lse) {
    expect_shape("lse", c.lse, {rows});
    expect_dtype("lse", c.lse, Dtype::float64);
  }
  if (c.dx) {
    expect_alike("dx", c.dx, c.x);
    expect_factor(c.factor, c.x);
  }
  HFNN_CHECK(c.smoothing >= 0 && c.smoothing <= 1);
  for (int64_t r = 0; c.classes() && r < rows; ++r) {
    const int64_t t = c.target.as<int64_t>()[r];
    if (t != c.ignore_index && (t < 0 || t >= cols))
      throw std::out_of_range("Target " + std::to_string(t) + " is out of bounds.");
  }
}

static void run(const Call& c, int64_t threads) {
  check(c);
  if (c.x.numel() == 0) return;
  // Without smoothing, only the class's entry of `weight` is read.
  const Vector weight(c.weight, wide(c.x.dtype), c.weight || c.all_weights() ? c.cols() : 0, 1);
  const auto rows = !c.classes() ? probability_rows : c.smoothing != 0 ? smoothed_rows : class_rows;
  split(c.rows(), c.x.numel(), threads, [&](int64_t begin, int64_t end) { rows(c, weight, begin, end); });
}

static void forward(const Tensor& x, const Tensor& target, const Tensor& weight, const Tensor& loss,
                    const Tensor& share, const Tensor& lse, const Tensor& slope, int64_t ignore_index, double smoothing,
                    double z_loss, double logit_scale, double softcap, int64_t threads) {
  if (!loss) refuse("loss", "be a tensor", "None");
  run({x, target, weight, loss, share, lse, slope, {}, {}, ignore_index, smoothing, z_loss, logit_scale, softcap},
      threads);
}

static void backward(const Tensor& x, const Tensor& target, const Tensor& weight, const Tensor& lse,
                     const Tensor& slope, const Tensor& factor, const Tensor& dx, int64_t ignore_index,
                     double smoothing, double z_loss, double logit_scale, double softcap, int64_t threads) {
  const Call c{x,      target, weight,       {},        {},     lse,         slope,
               factor, dx,     ignore_index, smoothing, z_loss, logit_scale, softcap};
  if (!lse) refuse("lse", "be a tensor", "None");
  if (!dx) refuse("dx", "be a tensor", "None");
  if (!slope && (!c.classes() || (weight && smoothing != 0)))
    refuse("slope", "be a tensor for probabilities, and for weights with smoothing", "None");
  run(c, threads);
}

static void both(const Tensor& x, const Tensor& target, const Tensor& weight, const Tensor& loss, const Tensor& share,
                 const Tensor& lse, const Tensor& slope, const Tensor& factor, const Tensor& dx, int64_t ignore_index,
                 double smoothing, double z_loss, double logit_scale, double softcap, int64_t threads) {
  if (!loss) refuse("loss", "be a tensor", "None");
  if (!dx) refuse("dx", "be a tensor", "None");
  run({x, target, weight, loss, share, lse, slope, factor, dx, ignore_index, smoothing, z_loss, logit_scale, softcap},
      threads);
}

const CrossEntropy cross_entropy_cpu = {forward, backward, both};

}  // namespace hfnn
