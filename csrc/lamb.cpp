// LAMB on the CPU. lamb.h has the contract. As in optim.cpp, a tile is processed in runs that stay in the L1 cache.
#include "lamb.h"

#include "optim_row.h"

namespace hfnn {

using O = Optim;

namespace {
// The coefficients of a row's step; then the part of a row that a thread processes.
struct Rule {
  int64_t options;
  double gradient, coupled, decay, beta1, share, beta2, eps, root1, root2, lr;

  Rule(const double* hyper, const int64_t* row, double factor) : options(int64_t(hyper[O::kOptions])) {
    const double step = step_of(row), wd = hyper[O::kWeightDecay];
    const bool correct = options & Lamb::kBiasCorrection;
    gradient = options & O::kMaximize ? -factor : factor;
    coupled = options & O::kDecoupled ? 0 : wd;
    decay = options & O::kDecoupled ? wd : 0;
    beta1 = hyper[O::kBeta1];
    share = options & Lamb::kSum ? 1 : 1 - beta1;
    beta2 = hyper[O::kBeta2];
    eps = hyper[O::kEps];
    root1 = correct ? 1 / (1 - std::pow(beta1, step)) : 1;
    root2 = correct ? 1 / std::sqrt(1 - std::pow(beta2, step)) : 1;
    lr = hyper[O::kLr];
  }
};

struct Span {
  const int64_t* row;
  int64_t first, last;  // elements
};
}  // namespace

static Span span_of(const Tensor& rows, const Tensor& owner, int64_t tile) {
  const int64_t* row = rows.as<int64_t>() + owner.as<int32_t>()[tile] * O::kColumns;
  const int64_t first = (tile - row[O::kFirstTile]) * O::kTile;
  return {row, first, std::min(first + O::kTile, row[O::kNumel])};
}

// u of a run, from the states as stored.
template <class W>
HFNN_INLINE void direction(const Rule& rule, const W* p, const W* m, const W* v, int64_t n, W* u) {
  const W root1 = W(rule.root1), root2 = W(rule.root2), eps = W(rule.eps), decay = W(rule.decay);
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) u[i] = m[i] * root1 / (std::sqrt(v[i]) * root2 + eps) + decay * p[i];
}

template <class W>
HFNN_INLINE void moments_tile(const Rule& rule, const Span& span, double* partial) {
  alignas(64) W buffer[4][kRun], u[kRun];
  const W gradient = W(rule.gradient), coupled = W(rule.coupled), beta1 = W(rule.beta1), share = W(rule.share);
  const W beta2 = W(rule.beta2), rest2 = W(1 - rule.beta2);
  const Kept kept_m = state_of(span.row, 0), kept_v = state_of(span.row, 1);
  double total_p = 0, total_u = 0;
  for (int64_t first = span.first; first < span.last; first += kRun) {
    const int64_t n = std::min(kRun, span.last - first);
    const W* p = open_parameter(span.row, first, n, buffer[0]);
    const W* gs = open<W>(gradient_of(span.row), first, n, buffer[1]);
    W *m = open<W>(kept_m, first, n, buffer[2]), *v = open<W>(kept_v, first, n, buffer[3]);
#pragma omp simd
    for (int64_t i = 0; i < n; ++i) {
      const W g = gs[i] * gradient + coupled * p[i];
      m[i] = beta1 * m[i] + share * g;
      v[i] = beta2 * v[i] + rest2 * g * g;
    }
    keep(m, first, n, kept_m);
    keep(v, first, n, kept_v);
    direction(rule, p, m, v, n, u);
    total_p += sum<W>(n, [=](int64_t i) HFNN_FLAT { return p[i] * p[i]; });
    total_u += sum<W>(n, [&](int64_t i) HFNN_FLAT { return u[i] * u[i]; });
  }
  partial[0] = total_p;
  partial[1] = total_u;
}

template <class W>
HFNN_INLINE void update_tile(const Rule& rule, const Span& span, double ratio, const Keeping& keeping,
                             uint64_t counter) {
  alignas(64) W buffer[3][kRun], u[kRun];
  const W rate = W(rule.lr * ratio);
  for (int64_t first = span.first; first < span.last; first += kRun) {
    const int64_t n = std::min(kRun, span.last - first);
    W* p = open_parameter(span.row, first, n, buffer[0]);
    const W *m = open<W>(state_of(span.row, 0), first, n, buffer[1]),
            *v = open<W>(state_of(span.row, 1), first, n, buffer[2]);
    direction(rule, p, m, v, n, u);
#pragma omp simd
    for (int64_t i = 0; i < n; ++i) p[i] -= rate * u[i];
    close_parameter(keeping, span.row, p, first, n, counter + uint64_t(first - span.first) / 8);
  }
}

HFNN_CLONES static void moments_tiles(const Tensor& rows, const Tensor& owner, const Tensor& hyper, double factor,
                                      double* partials, int64_t begin, int64_t end) {
  for (int64_t tile = begin; tile < end; ++tile) {
    const Span span = span_of(rows, owner, tile);
    const Rule rule(group_of(hyper, span.row), span.row, factor);
    with_row(span.row, [&](auto wide) HFNN_FLAT { moments_tile<decltype(wide)>(rule, span, partials + 2 * tile); });
  }
}

HFNN_CLONES static void update_tiles(const Tensor& rows, const Tensor& owner, const Tensor& hyper, const double* norms,
                                     const Keeping& keeping, int64_t begin, int64_t end) {
  for (int64_t tile = begin; tile < end; ++tile) {
    const Span span = span_of(rows, owner, tile);
    const double* group = group_of(hyper, span.row);
    const Rule rule(group, span.row, 1);
    const double* squares = norms + 2 * ((span.row - rows.as<int64_t>()) / O::kColumns);
    const bool adapts = group[O::kWeightDecay] != 0 || rule.options & Lamb::kAlways;
    const double ratio = adapts && squares[0] != 0 && squares[1] != 0 ? std::sqrt(squares[0] / squares[1]) : 1;
    const uint64_t counter = uint64_t(tile) * (O::kTile / 8);
    with_row(span.row, [&](auto wide) HFNN_FLAT { update_tile<decltype(wide)>(rule, span, ratio, keeping, counter); });
  }
}

static void moments(const Tensor& rows, const Tensor& owner, const Tensor& hyper, const Tensor& control,
                    const Tensor& squares, const Tensor& partials, int64_t threads) {
  expect_call(rows, hyper, control, squares);
  expect("owner", owner, {owner.shape[0]}, Dtype::int32);
  expect("partials", partials, {owner.shape[0], 2}, Dtype::float64);
  if (found_inf(control)) return;
  const double factor = gradient_factor(control, squares, control.as<float>() + O::kNorm);
  split(owner.shape[0], work_of(rows), threads, [&](int64_t begin, int64_t end) {
    moments_tiles(rows, owner, hyper, factor, partials.as<double>(), begin, end);
  });
}

static void norms(const Tensor& rows, const Tensor& partials, const Tensor& norms, int64_t) {
  expect("rows", rows, {rows.shape[0], O::kColumns}, Dtype::int64);
  expect("partials", partials, {partials.shape[0], 2}, Dtype::float64);
  expect("norms", norms, {rows.shape[0], 2}, Dtype::float64);
  const int64_t* row = rows.as<int64_t>();
  double* out = norms.as<double>();
  for (int64_t n = 0; n < rows.shape[0]; ++n, row += O::kColumns, out += 2) {
    const double* in = partials.as<double>() + 2 * row[O::kFirstTile];
    out[0] = out[1] = 0;
    for (int64_t tile = 0; tile < (row[O::kNumel] + O::kTile - 1) / O::kTile; ++tile, in += 2) {
      out[0] += in[0];
      out[1] += in[1];
    }
  }
}

static void update(const Tensor& rows, const Tensor& owner, const Tensor& hyper, const Tensor& control,
                   const Tensor& norms, double ema_decay, int64_t seed, int64_t offset, int64_t threads) {
  expect_call(rows, hyper, control, {});
  expect("owner", owner, {owner.shape[0]}, Dtype::int32);
  expect("norms", norms, {rows.shape[0], 2}, Dtype::float64);
  if (found_inf(control)) return;
  const Keeping keeping{ema_decay, seed, offset};
  split(owner.shape[0], work_of(rows), threads,
        [&](int64_t begin, int64_t end) { update_tiles(rows, owner, hyper, norms.as<double>(), keeping, begin, end); });
}

const Lamb lamb_cpu = {moments, norms, update};

}  // namespace hfnn
