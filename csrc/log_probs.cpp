// Parts of log-probabilities on the CPU. A row of logits is read once.
#include "log_probs.h"

#include "logits_cpu.h"

namespace hfnn {

namespace {
struct Call {
  Tensor x, target, picked, lse, mean, a, b, t, dx;
  double logit_scale, softcap;
  int64_t cols() const { return x.shape[1]; }
};

// sum(exp(z) (z - base)) and sum(exp(z)), both times exp(-base).
template <class W>
struct Mean {
  LogSumExp<W> sum;
  double moment = 0;

  HFNN_INLINE void add(const W* z, int64_t n) {
    const double before = sum.base(), total = sum.total, factor = sum.raise(z, n);
    const W base = sum.base();
    if (total > 0) moment = (moment + (before - double(base)) * total) * factor;
    constexpr W kLowest = std::numeric_limits<W>::lowest();
    Sums<W, 2> sums;
    sums.run(n, [=](int64_t k, W& total, W& moment) HFNN_FLAT {
      const W shifted = z[k] - base, e = exp_negative(shifted);
      total += e;
      moment += e * (shifted > kLowest ? shifted : kLowest);  // 0 * -inf counts as 0
    });
    sum.total += sums.total(0);
    moment += sums.total(1);
  }
  double value() const { return double(sum.max) + moment / sum.total; }
};
}  // namespace

HFNN_CLONES static void forward_rows(const Call& c, int64_t begin, int64_t end) {
  const int64_t cols = c.cols();
  with_runs(c.x.dtype, [&](auto in) HFNN_FLAT {
    using W = Wide<decltype(in)>;
    const Squash<W> squash(c.logit_scale, c.softcap);
    Runs<decltype(in)> xs(c.x, kRun);
    for (int64_t r = begin; r < end; ++r) {
      Mean<W> mean;
      W picked = 0;
      const int64_t t = c.target.as<int64_t>()[r];
      for_runs(cols, 0, count_runs(cols), [&](int64_t begin, int64_t n) HFNN_FLAT {
        alignas(64) W z[kRun];
        squash.run(xs.read(r * cols + begin, n), z, n);
        if (c.mean)
          mean.add(z, n);
        else
          mean.sum.add(z, n);
        if (t >= begin && t < begin + n) picked = z[t - begin];
      });
      c.picked.as<W>()[r] = picked;
      c.lse.as<double>()[r] = mean.sum.value();
      if (c.mean) c.mean.as<W>()[r] = W(mean.value());
    }
  });
}

// dx_c = (p_c (a + b z_c) + t [c = target]) dz_c/dx_c, with p = exp(z - base) * rest, from lse and its rounding error.
template <bool kCapped, class X, class W>
HFNN_INLINE void gradient(Runs<X>& xs, Runs<X>& dxs, int64_t first, int64_t cols, int64_t target,
                          const Squash<W> squash, double lse, W a, W b, W t) {
  const W base = W(lse), rest = W(std::exp(double(base) - lse));
  for_runs(cols, 0, count_runs(cols), [&](int64_t begin, int64_t n) HFNN_FLAT {
    alignas(64) W z[kRun];
    squash.run(xs.read(first + begin, n), z, n);
    const W* logits = z;
    const auto value = [=](int64_t k, W t) HFNN_FLAT {
      const W p = exp_negative(logits[k] - base) * rest;
      const W all = p == 0 ? 0 : p * (a + b * logits[k]);  // 0 * -inf counts as 0
      return (all + t) * squash.template slope<kCapped>(logits[k]);
    };
    X* dx = dxs.open(first + begin);
#pragma omp simd
    for (int64_t k = 0; k < n; ++k) store(dx[k], value(k, 0));
    if (target >= begin && target < begin + n) store(dx[target - begin], value(target - begin, t));
    dxs.close(first + begin, n);
  });
}

HFNN_CLONES static void backward_rows(const Call& c, int64_t begin, int64_t end) {
  const int64_t cols = c.cols();
  with_runs(c.x.dtype, [&](auto in) HFNN_FLAT {
    using W = Wide<decltype(in)>;
    const Squash<W> squash(c.logit_scale, c.softcap);
    Runs<decltype(in)> xs(c.x, kRun), dxs(c.dx, kRun);
    const double* lse = c.lse.as<double>();
    const W *a = c.a.as<W>(), *b = c.b.as<W>(), *t = c.t.as<W>();
    for (int64_t r = begin; r < end; ++r) {
      const int64_t target = c.target.as<int64_t>()[r];
      if (c.softcap != 0)
        gradient<true>(xs, dxs, r * cols, cols, target, squash, lse[r], a[r], b ? b[r] : 0, t[r]);
      else
        gradient<false>(xs, dxs, r * cols, cols, target, squash, lse[r], a[r], b ? b[r] : 0, t[r]);
    }
  });
}

static void check(const Tensor& x, const Tensor& target) {
  expect_matrix("x", x);
  expect_shape("target", target, {x.shape[0]});
  expect_dtype("target", target, Dtype::int64);
}

static void forward(const Tensor& x, const Tensor& target, const Tensor& picked, const Tensor& lse, const Tensor& mean,
                    double logit_scale, double softcap, int64_t threads) {
  check(x, target);
  expect_rows("picked", picked, x);
  expect_shape("lse", lse, {x.shape[0]});
  expect_dtype("lse", lse, Dtype::float64);
  if (mean) expect_rows("mean", mean, x);
  if (x.numel() == 0) return;
  const Call call{x, target, picked, lse, mean, {}, {}, {}, {}, logit_scale, softcap};
  split(x.shape[0], x.numel(), threads, [&](int64_t begin, int64_t end) { forward_rows(call, begin, end); });
}

static void backward(const Tensor& x, const Tensor& target, const Tensor& lse, const Tensor& a, const Tensor& b,
                     const Tensor& t, const Tensor& dx, double logit_scale, double softcap, int64_t threads) {
  check(x, target);
  expect_shape("lse", lse, {x.shape[0]});
  expect_dtype("lse", lse, Dtype::float64);
  expect_rows("a", a, x);
  if (b) expect_rows("b", b, x);
  expect_rows("t", t, x);
  expect_alike("dx", dx, x);
  if (x.numel() == 0) return;
  const Call call{x, target, {}, lse, {}, a, b, t, dx, logit_scale, softcap};
  split(x.shape[0], x.numel(), threads, [&](int64_t begin, int64_t end) { backward_rows(call, begin, end); });
}

const LogProbs log_probs_cpu = {forward, backward};

}  // namespace hfnn
