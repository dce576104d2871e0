// Adafactor on the CPU. adafactor.h has the contract.
#include "adafactor.h"

#include "optim_row.h"

namespace hfnn {

using O = Optim;
using A = Adafactor;

namespace {
// A row of the table as matrices (none for a vector), and where it starts in `work`.
struct Matrices {
  const int64_t* row;
  int64_t R, C, M, numel, first_tile, first_block, bands, across;
  double *means, *row_sums, *col_sums;
  bool large, vector;

  Matrices(const Tensor& rows, const Tensor& shapes, const Tensor& work, int64_t n)
      : row(rows.as<int64_t>() + n * O::kColumns) {
    const int64_t* shape = shapes.as<int64_t>() + n * A::kShape;
    R = shape[A::kR];
    C = shape[A::kC];
    vector = R * C == 0;
    large = R * C > A::kSmall;
    numel = row[O::kNumel];
    M = vector ? 0 : numel / (R * C);
    first_tile = shape[A::kFirstTile];
    first_block = shape[A::kFirstBlock];
    bands = (R + A::kSide - 1) / A::kSide;
    across = (C + A::kSide - 1) / A::kSide;
    means = work.as<double>() + shape[A::kWork];
    row_sums = means + M * bands;
    col_sums = row_sums + across * M * R;
  }
};

// A tile of a large matrix.
struct Square {
  int64_t m, band, r0, r1, c0, n;  // matrix, rows [r0, r1), n columns from c0 on

  Square(const Matrices& x, int64_t tile) {
    tile -= x.first_tile;
    m = tile / (x.across * x.bands);
    band = tile / x.across % x.bands;
    r0 = band * A::kSide;
    r1 = std::min(r0 + A::kSide, x.R);
    c0 = tile % x.across * A::kSide;
    n = std::min(A::kSide, x.C - c0);
  }
};

// The coefficients of a row.
struct Rule {
  double gradient, decay, eps1, eps2, lr, weight_decay, threshold, step;

  Rule(const double* hyper, const int64_t* row, double factor)
      : eps1(hyper[A::kEps1]),
        eps2(hyper[A::kEps2]),
        lr(hyper[O::kLr]),
        weight_decay(hyper[O::kWeightDecay]),
        threshold(hyper[A::kThreshold]),
        step(step_of(row)) {
    gradient = int64_t(hyper[O::kOptions]) & O::kMaximize ? -factor : factor;
    decay = std::pow(step, hyper[A::kDecay]);
  }
};

struct Call {
  const Tensor &rows, &shapes, &owner, &hyper, &work;  // owner: the row of each tile or block
  double factor;

  Matrices matrices(int64_t item) const { return {rows, shapes, work, owner.as<int32_t>()[item]}; }
  Rule rule(const Matrices& x) const { return {group_of(hyper, x.row), x.row, factor}; }
};
}  // namespace

template <class W>
HFNN_INLINE void sums_tile(const Matrices& x, const Square& at, double factor) {
  alignas(64) W buffer[A::kSide], columns[A::kSide] = {};
  const W by = W(factor);
  for (int64_t r = at.r0; r < at.r1; ++r) {
    const W* g = open<W>(gradient_of(x.row), (at.m * x.R + r) * x.C + at.c0, at.n, buffer);
#pragma omp simd
    for (int64_t c = 0; c < at.n; ++c) columns[c] += (g[c] * by) * (g[c] * by);
    x.row_sums[(at.c0 / A::kSide * x.M + at.m) * x.R + r] =
        sum<W>(at.n, [=](int64_t c) HFNN_FLAT { return (g[c] * by) * (g[c] * by); });
  }
  std::copy_n(columns, at.n, x.col_sums + (at.m * x.bands + at.band) * x.C + at.c0);
}

// state += b (sums / count - state) for n elements from `first` on. Returns the state as stored.
template <class W>
HFNN_INLINE const W* average(const int64_t* row, int64_t s, int64_t first, int64_t n, const double* sums, int64_t count,
                             double b, W* buffer) {
  const Kept kept = state_of(row, s);
  W* state = open<W>(kept, first, n, buffer);
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) state[i] = W(1 - b) * state[i] + W(b) * (W(sums[i]) / W(count));
  keep(state, first, n, kept);
  return state;
}

template <class W>
HFNN_INLINE double total(const W* x, int64_t n) {
  double sum = 0;
  for (int64_t i = 0; i < n; ++i) sum += x[i];
  return sum;
}

// A block: rows of one band, or, after all bands of all matrices, columns.
template <class W>
HFNN_INLINE void large_block(const Matrices& x, int64_t block, double b) {
  alignas(64) W buffer[A::kSide];
  double sums[A::kSide] = {};
  if (block < x.M * x.bands) {
    const int64_t m = block / x.bands, r0 = block % x.bands * A::kSide, n = std::min(A::kSide, x.R - r0);
    for (int64_t i = 0; i < x.across; ++i)
      for (int64_t r = 0; r < n; ++r) sums[r] += x.row_sums[(i * x.M + m) * x.R + r0 + r];
    x.means[block] = total(average(x.row, 0, m * x.R + r0, n, sums, x.C, b, buffer), n);
    return;
  }
  const int64_t first = (block - x.M * x.bands) * A::kSide, n = std::min(A::kSide, x.M * x.C - first);
  for (int64_t k = 0; k < n; ++k) {
    const int64_t m = (first + k) / x.C, c = (first + k) % x.C;
    for (int64_t i = 0; i < x.bands; ++i) sums[k] += x.col_sums[(m * x.bands + i) * x.C + c];
  }
  average(x.row, 1, first, n, sums, x.R, b, buffer);
}

template <class W>
HFNN_INLINE void small_block(const Matrices& x, int64_t block, double b, double factor) {
  alignas(64) W buffer[A::kSmall];
  const int64_t last = std::min((block + 1) * A::kSide, x.M);
  for (int64_t m = block * A::kSide; m < last; ++m) {
    double rows[A::kSmall] = {}, cols[A::kSmall] = {};
    const W* g = open<W>(gradient_of(x.row), m * x.R * x.C, x.R * x.C, buffer);
    for (int64_t r = 0; r < x.R; ++r)
      for (int64_t c = 0; c < x.C; ++c) {
        const W scaled = g[r * x.C + c] * W(factor);
        rows[r] += scaled * scaled;
        cols[c] += scaled * scaled;
      }
    x.means[m] = total(average(x.row, 0, m * x.R, x.R, rows, x.C, b, buffer), x.R);
    average(x.row, 1, m * x.C, x.C, cols, x.R, b, buffer);
  }
}

// Replaces V by 1 / sqrt(max(V, eps1^2)).
template <class W>
HFNN_INLINE void invert(const Rule& rule, int64_t n, W* v) {
  const W least = W(rule.eps1 * rule.eps1);
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) v[i] = 1 / std::sqrt(v[i] < least ? least : v[i]);
}

template <class W>
HFNN_INLINE W mean(const Matrices& x, const Rule& rule, int64_t m) {
  const W mean = W(total(x.means + m * x.bands, x.bands) / x.R);
  return mean < W(rule.eps1) ? W(rule.eps1) : mean;
}

// body(first, n, v, k) for the runs of a tile: n elements from `first` on, their 1 / sqrt(V), and the place in the
// tile.
template <class W, class Body>
HFNN_INLINE void large_runs(const Matrices& x, const Rule& rule, const Square& at, Body body) {
  alignas(64) W row_buffer[A::kSide], col_buffer[A::kSide], v[A::kSide];
  const W* rows = open<W>(state_of(x.row, 0), at.m * x.R + at.r0, at.r1 - at.r0, row_buffer);
  const W* cols = open<W>(state_of(x.row, 1), at.m * x.C + at.c0, at.n, col_buffer);
  const W middle = mean<W>(x, rule, at.m);
  for (int64_t r = at.r0; r < at.r1; ++r) {
    const W part = rows[r - at.r0] / middle;
#pragma omp simd
    for (int64_t c = 0; c < at.n; ++c) v[c] = part * cols[c];
    invert(rule, at.n, v);
    body((at.m * x.R + r) * x.C + at.c0, at.n, v, (r - at.r0) * A::kSide);
  }
}

// V of n elements of small matrices.
template <class W>
HFNN_INLINE void look_up(const Matrices& x, const Rule& rule, int64_t first, int64_t n, W* v) {
  alignas(64) W row_buffer[kRun + A::kSmall], col_buffer[kRun + 2 * A::kSmall];
  const int64_t r0 = first / x.C, r1 = (first + n - 1) / x.C + 1, m0 = r0 / x.R, m1 = (r1 - 1) / x.R + 1;
  const W* rows = open<W>(state_of(x.row, 0), r0, r1 - r0, row_buffer);
  const W* cols = open<W>(state_of(x.row, 1), m0 * x.C, (m1 - m0) * x.C, col_buffer);
  for (int64_t r = r0; r < r1; ++r) {
    const int64_t m = r / x.R, end = std::min(first + n, (r + 1) * x.C);
    const W part = rows[r - r0] / mean<W>(x, rule, m);
    for (int64_t i = std::max(first, r * x.C); i < end; ++i) v[i - first] = part * cols[(m - m0) * x.C + i - r * x.C];
  }
}

template <class W, class Body>
HFNN_INLINE void for_tile(const Matrices& x, const Rule& rule, int64_t tile, Body body) {
  if (x.large) return large_runs<W>(x, rule, Square(x, tile), body);
  const int64_t begin = (tile - x.first_tile) * A::kTile, end = std::min(begin + A::kTile, x.numel);
  for (int64_t first = begin; first < end; first += kRun) {
    alignas(64) W v[kRun];
    const int64_t n = std::min(kRun, end - first);
    if (!x.vector) {
      look_up(x, rule, first, n, v);
    } else {
      const W* kept = open<W>(state_of(x.row, 0), first, n, v);
      if (kept != v) std::copy_n(kept, n, v);
    }
    invert(rule, n, v);
    body(first, n, v, first - begin);
  }
}

// Updates `variance` of a tile.
template <class W>
HFNN_INLINE void average_squares(const Matrices& x, const Rule& rule, int64_t tile) {
  const int64_t begin = (tile - x.first_tile) * A::kTile, end = std::min(begin + A::kTile, x.numel);
  const W by = W(rule.gradient), b = W(rule.decay), rest = W(1 - rule.decay);
  alignas(64) W buffer[2][kRun];
  for (int64_t first = begin; first < end; first += kRun) {
    const int64_t n = std::min(kRun, end - first);
    const W* g = open<W>(gradient_of(x.row), first, n, buffer[0]);
    W* v = open<W>(state_of(x.row, 0), first, n, buffer[1]);
#pragma omp simd
    for (int64_t i = 0; i < n; ++i) v[i] = rest * v[i] + b * ((g[i] * by) * (g[i] * by));
    close(v, first, n, state_of(x.row, 0));
  }
}

template <class W>
HFNN_INLINE void norms_tile(const Matrices& x, const Rule& rule, int64_t tile, double* partial) {
  const W by = W(rule.gradient);
  alignas(64) W buffer[2][kRun];
  double total_p = 0, total_u = 0;
  if (x.vector) average_squares<W>(x, rule, tile);
  for_tile<W>(x, rule, tile, [&](int64_t first, int64_t n, const W* v, int64_t) HFNN_FLAT {
    const W *p = open_parameter(x.row, first, n, buffer[0]), *g = open<W>(gradient_of(x.row), first, n, buffer[1]);
    total_p += sum<W>(n, [=](int64_t i) HFNN_FLAT { return p[i] * p[i]; });
    total_u += sum<W>(n, [=](int64_t i) HFNN_FLAT { return (g[i] * by * v[i]) * (g[i] * by * v[i]); });
  });
  partial[0] = total_p;
  partial[1] = total_u;
}

template <class W>
HFNN_INLINE void update_tile(const Matrices& x, const Rule& rule, int64_t tile, double scale, const Keeping& keeping) {
  const W rate = W(scale), left = W(1 - rule.lr * rule.weight_decay);
  const uint64_t counter = uint64_t(tile) * (A::kTile / 8);
  alignas(64) W buffer[2][kRun];
  for_tile<W>(x, rule, tile, [&](int64_t first, int64_t n, const W* v, int64_t place) HFNN_FLAT {
    W* p = open_parameter(x.row, first, n, buffer[0]);
    const W* g = open<W>(gradient_of(x.row), first, n, buffer[1]);
#pragma omp simd
    for (int64_t i = 0; i < n; ++i) p[i] = p[i] * left - rate * g[i] * v[i];
    close_parameter(keeping, x.row, p, first, n, counter + uint64_t(place) / 8);
  });
}

HFNN_CLONES static void sums_tiles(const Call& call, int64_t begin, int64_t end) {
  for (int64_t tile = begin; tile < end; ++tile) {
    const Matrices x = call.matrices(tile);
    if (!x.large) continue;
    with_row(x.row, [&](auto wide) HFNN_FLAT { sums_tile<decltype(wide)>(x, Square(x, tile), call.factor); });
  }
}

HFNN_CLONES static void factors_blocks(const Call& call, int64_t begin, int64_t end) {
  for (int64_t block = begin; block < end; ++block) {
    const Matrices x = call.matrices(block);
    const Rule rule = call.rule(x);
    with_row(x.row, [&](auto wide) HFNN_FLAT {
      using W = decltype(wide);
      x.large ? large_block<W>(x, block - x.first_block, rule.decay)
              : small_block<W>(x, block - x.first_block, rule.decay, rule.gradient);
    });
  }
}

HFNN_CLONES static void norms_tiles(const Call& call, double* partials, int64_t begin, int64_t end) {
  for (int64_t tile = begin; tile < end; ++tile) {
    const Matrices x = call.matrices(tile);
    const Rule rule = call.rule(x);
    with_row(x.row, [&](auto wide) HFNN_FLAT { norms_tile<decltype(wide)>(x, rule, tile, partials + 2 * tile); });
  }
}

HFNN_CLONES static void update_tiles(const Call& call, const double* scales, const Keeping& keeping, int64_t begin,
                                     int64_t end) {
  for (int64_t tile = begin; tile < end; ++tile) {
    const Matrices x = call.matrices(tile);
    const Rule rule = call.rule(x);
    const double scale = scales[call.owner.as<int32_t>()[tile]];
    with_row(x.row, [&](auto wide) HFNN_FLAT { update_tile<decltype(wide)>(x, rule, tile, scale, keeping); });
  }
}

static void expect_all(const Tensor& rows, const Tensor& shapes, const Tensor& owner, const Tensor& hyper,
                       const Tensor& control, const Tensor& squares, const Tensor& work) {
  expect_call(rows, hyper, control, squares);
  expect("shapes", shapes, {rows.shape[0], A::kShape}, Dtype::int64);
  expect("tile_row and block_row", owner, {owner.shape[0]}, Dtype::int32);
  expect("work", work, {work.shape[0]}, Dtype::float64);
}

// sums of tiles, or factors of blocks. owner: the row of each.
template <auto pass>
static void statistics(const Tensor& rows, const Tensor& shapes, const Tensor& owner, const Tensor& hyper,
                       const Tensor& control, const Tensor& squares, const Tensor& work, int64_t threads) {
  expect_all(rows, shapes, owner, hyper, control, squares, work);
  if (found_inf(control)) return;
  float norm;
  const Call call{rows, shapes, owner, hyper, work, gradient_factor(control, squares, &norm)};
  split(owner.shape[0], work_of(rows), threads, [&](int64_t begin, int64_t end) { pass(call, begin, end); });
}

static void norms(const Tensor& rows, const Tensor& shapes, const Tensor& tile_row, const Tensor& hyper,
                  const Tensor& control, const Tensor& squares, const Tensor& work, const Tensor& partials,
                  int64_t threads) {
  expect_all(rows, shapes, tile_row, hyper, control, squares, work);
  expect("partials", partials, {tile_row.shape[0], 2}, Dtype::float64);
  if (found_inf(control)) return;
  float norm;
  const Call call{rows, shapes, tile_row, hyper, work, gradient_factor(control, squares, &norm)};
  split(tile_row.shape[0], work_of(rows), threads,
        [&](int64_t begin, int64_t end) { norms_tiles(call, partials.as<double>(), begin, end); });
}

static void scale(const Tensor& rows, const Tensor& shapes, const Tensor& hyper, const Tensor& control,
                  const Tensor& squares, const Tensor& partials, const Tensor& scales, int64_t) {
  expect_call(rows, hyper, control, squares);
  expect("shapes", shapes, {rows.shape[0], A::kShape}, Dtype::int64);
  expect("partials", partials, {partials.shape[0], 2}, Dtype::float64);
  expect("scales", scales, {rows.shape[0]}, Dtype::float64);
  if (found_inf(control)) return;
  const double factor = gradient_factor(control, squares, control.as<float>() + O::kNorm);
  const Tensor none;
  for (int64_t n = 0; n < rows.shape[0]; ++n) {
    const Matrices x(rows, shapes, none, n);
    if (x.numel == 0) continue;
    const Rule rule(group_of(hyper, x.row), x.row, factor);
    const int64_t tiles = x.large ? x.M * x.bands * x.across : (x.numel + A::kTile - 1) / A::kTile;
    double total_p = 0, total_u = 0;
    for (int64_t tile = x.first_tile; tile < x.first_tile + tiles; ++tile) {
      total_p += partials.as<double>()[2 * tile];
      total_u += partials.as<double>()[2 * tile + 1];
    }
    const double rho = std::min(rule.lr, 1 / std::sqrt(rule.step));
    const double alpha = std::max(rule.eps2, std::sqrt(total_p / double(x.numel))) * rho;
    const double clip = std::max(1.0, std::sqrt(total_u / double(x.numel)) / rule.threshold);
    scales.as<double>()[n] = alpha / clip * rule.gradient;
  }
}

static void update(const Tensor& rows, const Tensor& shapes, const Tensor& tile_row, const Tensor& hyper,
                   const Tensor& control, const Tensor& work, const Tensor& scales, double ema_decay, int64_t seed,
                   int64_t offset, int64_t threads) {
  expect_all(rows, shapes, tile_row, hyper, control, {}, work);
  expect("scales", scales, {rows.shape[0]}, Dtype::float64);
  if (found_inf(control)) return;
  const Call call{rows, shapes, tile_row, hyper, work, 1};
  const Keeping keeping{ema_decay, seed, offset};
  split(tile_row.shape[0], work_of(rows), threads,
        [&](int64_t begin, int64_t end) { update_tiles(call, scales.as<double>(), keeping, begin, end); });
}

const Adafactor adafactor_cpu = {statistics<sums_tiles>, statistics<factors_blocks>, norms, scale, update};

}  // namespace hfnn
