// Batch normalisation on the CPU with the channels last in memory. A run of elements may start anywhere in a row.
// Per-channel numbers are laid out so that those of a run are contiguous.
#pragma once
#include "batch_norm_cpu.h"

namespace hfnn {

namespace {
// Elements of a block of rows, which is read for the means and again for the squares.
constexpr int64_t kBlock = 16384;
}  // namespace

// Flags of eight rows fill whole bytes, so chunks consist of groups of eight rows.
inline int64_t count_chunks(int64_t planes, int64_t channels, int64_t size) {
  return size != 1 ? 1 : std::clamp<int64_t>(std::min(planes / 8, planes * channels / (4 * kBlock)), 1, 64);
}
inline int64_t first_row(const BatchNormCall& c, int64_t chunk) {
  return std::min(c.planes(), (c.planes() + 7) / 8 * chunk / c.partials.shape[1] * 8);
}

// block(first row, rows) for the rows of each chunk in [begin, end), then chunk(its index).
template <class Block, class Chunk>
HFNN_INLINE void row_blocks(const BatchNormCall& c, int64_t begin, int64_t end, Block block, Chunk chunk) {
  const int64_t several = std::max<int64_t>(16, kBlock / c.channels() / 8 * 8);
  for (int64_t k = begin; k < end; ++k) {
    const int64_t last = first_row(c, k + 1);
    for (int64_t row = first_row(c, k); row < last; row += several) block(row, std::min(several, last - row));
    chunk(k);
  }
}

// Writes mean, squares and count of each chunk of rows to its rows of partials.
HFNN_CLONES static void rows_moments(const BatchNormCall& c, int64_t begin, int64_t end) {
  const int64_t C = c.channels(), chunks = c.partials.shape[1];
  with_runs(c.x.dtype, [&](auto t) HFNN_FLAT {
    using T = decltype(t);
    using W = Wide<T>;
    Runs<T> x[4] = {{c.x, kRun}, {c.x, kRun}, {c.x, kRun}, {c.x, kRun}};
    Laid<W> sums(C, 1), near(C, 1);
    const std::unique_ptr<double[]> of_chunk(new double[3 * C]());
    double *means = of_chunk.get(), *squares = means + C, *mean = squares + C, count = 0;
    // Four parts of a block at a time, to access the lanes less often.
    const auto total = [&](int64_t row, int64_t rows, auto term) HFNN_FLAT {
      sums.clear();
      const int64_t quarter = rows / 4 * C, whole = row * C, rest = rows % 4 * C;
      for_runs(quarter, 0, count_runs(quarter), [&](int64_t i, int64_t n) HFNN_FLAT {
        const T *a = x[0].read(whole + i, n), *b = x[1].read(whole + quarter + i, n),
                *d = x[2].read(whole + 2 * quarter + i, n), *e = x[3].read(whole + 3 * quarter + i, n);
        W *lanes = sums.at(0, i), *m = near.at(0, i);
#pragma omp simd
        for (int64_t k = 0; k < n; ++k)
          lanes[k] +=
              (term(load(a[k]), m[k]) + term(load(b[k]), m[k])) + (term(load(d[k]), m[k]) + term(load(e[k]), m[k]));
      });
      for_runs(rest, 0, count_runs(rest), [&](int64_t i, int64_t n) HFNN_FLAT {
        const T* a = x[0].read(whole + 4 * quarter + i, n);
        W *lanes = sums.at(0, i), *m = near.at(0, i);
#pragma omp simd
        for (int64_t k = 0; k < n; ++k) lanes[k] += term(load(a[k]), m[k]);
      });
      return sums.folded(0);
    };
    const auto block = [&](int64_t row, int64_t rows) HFNN_FLAT {
      const W* sum = total(row, rows, [](W v, W) HFNN_FLAT { return v; });
      for (int64_t k = 0; k < C; ++k) mean[k] = double(sum[k]) / double(rows);
      near.fill(0, [=](int64_t k) HFNN_FLAT { return W(mean[k]); });
      sum = total(row, rows, [](W v, W m) HFNN_FLAT { return (v - m) * (v - m); });
      const double all = count + double(rows), share = double(rows) / all, both = count * share;
#pragma omp simd
      for (int64_t k = 0; k < C; ++k) {
        const double delta = mean[k] - means[k];
        means[k] += delta * share;
        squares[k] += double(sum[k]) + delta * delta * both;
      }
      count = all;
    };
    row_blocks(c, begin, end, block, [&](int64_t chunk) HFNN_FLAT {
      W *mean_out = c.partials.as<W>() + chunk * C, *squares_out = mean_out + chunks * C;
      std::fill_n(squares_out + chunks * C, C, W(count));
      for (int64_t k = 0; k < C; ++k) {
        mean_out[k] = W(means[k]);
        squares_out[k] = W(squares[k]);
        means[k] = squares[k] = 0;
      }
      count = 0;
    });
  });
}

inline void rows_settle(const BatchNormCall& c) {
  const int64_t C = c.channels(), chunks = c.partials.shape[1];
  with_wide(c.x.dtype, [&](auto wide) {
    using W = decltype(wide);
    const W* means = c.partials.as<W>();
    for (int64_t k = 0; k < C; ++k) {
      Moments m;
      for (int64_t chunk = 0; chunk < chunks; ++chunk) {
        const W* of = means + chunk * C + k;
        if (of[2 * chunks * C] > 0) m.add(double(of[2 * chunks * C]), double(of[0]), double(of[chunks * C]));
      }
      settle<W>(c, k, m);
    }
  });
}

// The numbers of all channels as runs need them. Those for dx are 0 except in training.
template <class W>
HFNN_INLINE Laid<W> laid_out(const BatchNormCall& c, bool training) {
  Laid<W> laid(c.channels(), training ? 5 : 4);
  const W *mean = c.mean.as<W>(), *rstd = c.rstd.as<W>(), *weight = c.weight.as<W>(), *bias = c.bias.as<W>();
  laid.fill(0, [=](int64_t k) HFNN_FLAT { return mean[k]; });
  laid.fill(1, [=](int64_t k) HFNN_FLAT { return rstd[k] * weight[k]; });
  laid.fill(2, [=](int64_t k) HFNN_FLAT { return bias[k]; });
  if (!training) return laid;
  const W *sum_gx = c.partials.as<W>(), *sum_g = sum_gx + c.partials.shape[1] * c.channels(), n = W(c.terms());
  laid.fill(3, [=](int64_t k) HFNN_FLAT { return sum_g[k] / n; });
  laid.fill(4, [=](int64_t k) HFNN_FLAT { return sum_gx[k] / n * (rstd[k] * weight[k]) * rstd[k]; });
  return laid;
}
template <class W>
HFNN_INLINE Each<W> of_run(Laid<W>& laid, int64_t first, bool training) {
  return {laid.at(0, first), laid.at(1, first), laid.at(2, first), laid.at(3, first), laid.at(training ? 4 : 3, first)};
}

HFNN_CLONES static void rows_forward(const BatchNormCall& c, int64_t begin, int64_t end) {
  with_runs(c.x.dtype, [&](auto t) HFNN_FLAT {
    Lanes<decltype(t), true> lanes(c);
    auto laid = laid_out<Wide<decltype(t)>>(c, false);
    for_runs(c.x.numel(), begin, end, [&](int64_t first, int64_t n) HFNN_FLAT {
      lanes.forward(c, of_run(laid, first, false), first, n, first / 8);
    });
  });
}

// The sums of g * xhat and of g over each chunk of rows.
HFNN_CLONES static void rows_sums(const BatchNormCall& c, int64_t begin, int64_t end) {
  const int64_t C = c.channels(), chunks = c.partials.shape[1];
  with_runs(c.x.dtype, [&](auto t) HFNN_FLAT {
    using T = decltype(t);
    using W = Wide<T>;
    Lanes<T, true> lanes(c);
    auto laid = laid_out<W>(c, false);
    Laid<W> sums(C, 2);
    const std::unique_ptr<double[]> total(new double[2 * C]());
    const auto block = [&](int64_t row, int64_t rows) HFNN_FLAT {
      sums.clear();
      for_runs(rows * C, 0, count_runs(rows * C), [&](int64_t i, int64_t n) HFNN_FLAT {
        const int64_t first = row * C + i;
        W *gx = sums.at(0, i), *alone = sums.at(1, i);
        const Each<W> at = of_run(laid, i, false);
        lanes.sums(c, at, first, n, first / 8, [=](auto g, auto x) HFNN_FLAT {
#pragma omp simd
          for (int64_t k = 0; k < n; ++k) {
            const W d = g(k);
            gx[k] += d * at.centred(x(k), k);
            alone[k] += d;
          }
        });
      });
      for (int64_t which = 0; which < 2; ++which) {
        const W* of_block = sums.folded(which);
        for (int64_t k = 0; k < C; ++k) total[which * C + k] += double(of_block[k]);
      }
    };
    row_blocks(c, begin, end, block, [&](int64_t chunk) HFNN_FLAT {
      for (int64_t k = 0; k < C; ++k) {
        c.partials.as<W>()[chunk * C + k] = W(total[k] * double(c.rstd.as<W>()[k]));
        c.partials.as<W>()[(chunks + chunk) * C + k] = W(total[C + k]);
      }
      std::fill_n(total.get(), 2 * C, 0.0);
    });
  });
}

HFNN_CLONES static void rows_backward(const BatchNormCall& c, int64_t begin, int64_t end) {
  const bool training = c.training && c.dx;
  with_runs(c.x.dtype, [&](auto t) HFNN_FLAT {
    Lanes<decltype(t), true> lanes(c);
    auto laid = laid_out<Wide<decltype(t)>>(c, training);
    for_runs(c.x.numel(), begin, end, [&](int64_t first, int64_t n) HFNN_FLAT {
      lanes.backward(c, of_run(laid, first, training), first, n, first / 8);
    });
  });
}

}  // namespace hfnn
