// Divergences between the softmaxes of two rows of logits, on the CPU. Both rows are read once from memory, and again
// from the cache for loss and gradient.
#include "distillation.h"

#include "logits_cpu.h"

namespace hfnn {

namespace {
struct Call {
  Tensor x, teacher, loss, factor, dx;
  double beta, scale;
  int64_t cols() const { return x.shape[1]; }
};

enum Divergence { kForward, kReverse, kBetween };

template <class W>
struct Probabilities {
  W p, q, d;  // d = log(p / q)
};

// Both softmaxes of a row, from their sums. `shift` is the difference of the two log-sum-exps.
template <class W>
struct Pair {
  W scale, max_p, max_q, inverse_p, inverse_q, shift;

  Pair(const LogSumExp<W>& p, const LogSumExp<W>& q, double scale)
      : scale(W(scale)),
        max_p(p.max),
        max_q(q.max),
        inverse_p(W(1 / p.total)),
        inverse_q(W(1 / q.total)),
        shift(W((double(p.max) - double(q.max)) + (p.log_total() - q.log_total()))) {}
  HFNN_INLINE Probabilities<W> at(W x, W teacher) const {
    return {exp_negative(scale * x - max_p) * inverse_p, exp_negative(scale * teacher - max_q) * inverse_q,
            scale * (x - teacher) - shift};
  }
};

// A term of the sum; 0 * log(0) is 0.
template <class W>
HFNN_INLINE W times(W p, W log) {
  return p == 0 ? 0 : p * log;
}

// log(p / m) and log(q / m) with m = beta q + (1 - beta) p, from d = log(p / q). The larger of p and q is factored out
// of m: with e = exp(-|d|), m is (beta + (1 - beta) e) q, or (beta e + (1 - beta)) p.
template <class W>
struct Mixed {
  W p, q;
};
template <class W>
HFNN_INLINE Mixed<W> mixed(W d, W beta, W rest) {
  const W e = exp_negative(-std::fabs(d));
  const W log = log_positive(d > 0 ? rest + beta * e : beta + rest * e);
  return {d > 0 ? -log : d - log, d > 0 ? -d - log : -log};
}
}  // namespace

template <class X, class W>
HFNN_INLINE LogSumExp<W> reduce(Runs<X>& xs, int64_t first, int64_t cols, const Squash<W>& squash) {
  LogSumExp<W> sum;
  for_runs(cols, 0, count_runs(cols), [&](int64_t begin, int64_t n) HFNN_FLAT {
    alignas(64) W z[kRun];
    squash.run(xs.read(first + begin, n), z, n);
    sum.add(z, n);
  });
  return sum;
}

// The two parts of a row's loss: KL(q | p or m) and KL(p | q or m).
struct Parts {
  double q = 0, p = 0;
};
template <Divergence kDivergence, class X, class W>
HFNN_INLINE Parts divergences(Runs<X>& xs, Runs<X>& teachers, int64_t first, int64_t cols, const Pair<W> pair, W beta,
                              W rest) {
  Parts parts;
  for_runs(cols, 0, count_runs(cols), [&](int64_t begin, int64_t n) HFNN_FLAT {
    const X *x = xs.read(first + begin, n), *teacher = teachers.read(first + begin, n);
    Sums<W, 2> sums;
    sums.run(n, [=](int64_t k, W& q_part, W& p_part) HFNN_FLAT {
      const Probabilities<W> at = pair.at(load(x[k]), load(teacher[k]));
      if constexpr (kDivergence == kForward) q_part += times(at.q, -at.d);
      if constexpr (kDivergence == kReverse) p_part += times(at.p, at.d);
      if constexpr (kDivergence == kBetween) {
        const Mixed<W> log = mixed(at.d, beta, rest);
        q_part += times(at.q, log.q);
        p_part += times(at.p, log.p);
      }
    });
    parts.q += sums.total(0);
    parts.p += sums.total(1);
  });
  return parts;
}

template <Divergence kDivergence, class X, class W>
HFNN_INLINE void gradient(Runs<X>& xs, Runs<X>& teachers, Runs<X>& dxs, int64_t first, int64_t cols, const Pair<W> pair,
                          W beta, W rest, W divergence, W g) {
  for_runs(cols, 0, count_runs(cols), [&](int64_t begin, int64_t n) HFNN_FLAT {
    const X *x = xs.read(first + begin, n), *teacher = teachers.read(first + begin, n);
    X* dx = dxs.open(first + begin);
#pragma omp simd
    for (int64_t k = 0; k < n; ++k) {
      const Probabilities<W> at = pair.at(load(x[k]), load(teacher[k]));
      if constexpr (kDivergence == kForward) store(dx[k], g * (at.p - at.q));
      if constexpr (kDivergence == kReverse) store(dx[k], g * times(at.p, at.d - divergence));
      if constexpr (kDivergence == kBetween)
        store(dx[k], g * rest * times(at.p, mixed(at.d, beta, rest).p - divergence));
    }
    dxs.close(first + begin, n);
  });
}

template <Divergence kDivergence>
HFNN_INLINE void rows(const Call& c, int64_t begin, int64_t end) {
  const int64_t cols = c.cols();
  with_runs(c.x.dtype, [&](auto stored) HFNN_FLAT {
    using X = decltype(stored);
    using W = Wide<X>;
    const Squash<W> squash(c.scale, 0);
    const W beta = W(c.beta), rest = W(1 - c.beta);
    Runs<X> xs(c.x, kRun), teachers(c.teacher, kRun), dxs(c.dx, kRun);
    for (int64_t r = begin; r < end; ++r) {
      const int64_t first = r * cols;
      const Pair<W> pair(reduce(xs, first, cols, squash), reduce(teachers, first, cols, squash), c.scale);
      Parts parts;
      if (c.loss || kDivergence != kForward)
        parts = divergences<kDivergence>(xs, teachers, first, cols, pair, beta, rest);
      if (c.loss)
        c.loss.as<W>()[r] = W(kDivergence == kBetween ? c.beta * parts.q + (1 - c.beta) * parts.p : parts.q + parts.p);
      if (!c.dx) continue;
      const W g = W(c.scale * double(factor_of<W>(c.factor, r)));
      gradient<kDivergence>(xs, teachers, dxs, first, cols, pair, beta, rest, W(parts.p), g);
    }
  });
}

HFNN_CLONES static void forward_rows(const Call& c, int64_t begin, int64_t end) { rows<kForward>(c, begin, end); }
HFNN_CLONES static void reverse_rows(const Call& c, int64_t begin, int64_t end) { rows<kReverse>(c, begin, end); }
HFNN_CLONES static void between_rows(const Call& c, int64_t begin, int64_t end) { rows<kBetween>(c, begin, end); }

static void both(const Tensor& x, const Tensor& teacher, const Tensor& loss, const Tensor& factor, const Tensor& dx,
                 double beta, double scale, int64_t threads) {
  expect_matrix("x", x);
  expect_alike("teacher", teacher, x);
  if (loss) expect_rows("loss", loss, x);
  if (dx) {
    expect_alike("dx", dx, x);
    expect_factor(factor, x);
  }
  HFNN_CHECK(beta >= 0 && beta <= 1);
  if (x.numel() == 0) return;
  const Call call{x, teacher, loss, factor, dx, beta, scale};
  const auto rows = beta == 0 ? forward_rows : beta == 1 ? reverse_rows : between_rows;
  split(x.shape[0], x.numel(), threads, [&](int64_t begin, int64_t end) { rows(call, begin, end); });
}

const Distillation distillation_cpu = {both};

}  // namespace hfnn
