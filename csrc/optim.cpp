// Optimizer steps on the CPU. A tile is processed in runs that stay in the L1 cache. Arrays stored as W, the dtype of
// the arithmetic, or (mostly) as bfloat16 are used in place. Others pass through buffers of W.
#include "optim.h"

#include "optim_row.h"

namespace hfnn {

using O = Optim;
constexpr int64_t kStates = O::kScale - O::kState;

namespace {
// The coefficients of a group at one step.
struct Coefficients {
  int64_t group = -1, options = 0, states = 0;
  double step = 0, gradient = 1, rate = 0, decay = 0, coupled = 0, beta1 = 0, beta2 = 0, eps = 0, root = 0;
};

struct Call {
  const int64_t* rows;
  const int32_t* owner;
  const double* hyper;
  int64_t rule;
  double factor;  // for the gradients
  Keeping keeping;
};

// A run of n elements of a row: parameters and gradients as T, states as S.
template <class T, class S>
struct Run {
  T* p;
  const T* g;
  S* state[kStates];
  int64_t n;
};
}  // namespace

static int64_t states_of(int64_t rule, const double* hyper) {
  if (rule == O::kAdam) return int64_t(hyper[O::kOptions]) & O::kAmsgrad ? 3 : 2;
  return rule == O::kLion || hyper[O::kMomentum] != 0;
}

// Consecutive rows of one group at one step share the powers.
static void look_up(const Call& call, const int64_t* row, Coefficients& k) {
  const double step = row[O::kStep] ? *pointer<float>(row[O::kStep]) : 0;
  if (k.group == row[O::kGroup] && k.step == step) return;
  const double* hyper = call.hyper + row[O::kGroup] * O::kHyper;
  k.group = row[O::kGroup];
  k.step = step;
  k.options = int64_t(hyper[O::kOptions]);
  k.states = states_of(call.rule, hyper);
  const bool decoupled = k.options & O::kDecoupled || call.rule == O::kLion;
  k.gradient = k.options & O::kMaximize ? -call.factor : call.factor;
  k.rate = hyper[O::kLr];
  k.decay = decoupled ? k.rate * hyper[O::kWeightDecay] : 0;
  k.coupled = decoupled ? 0 : hyper[O::kWeightDecay];
  k.beta1 = hyper[O::kBeta1];
  k.beta2 = hyper[O::kBeta2];
  k.eps = hyper[O::kEps];
  if (call.rule != O::kAdam) return;
  k.rate /= 1 - std::pow(k.beta1, step);
  k.root = 1 / std::sqrt(1 - std::pow(k.beta2, step));
}

// m + share (g - m) as torch's lerp computes it: from the end that has the larger share. Otherwise a large m that
// should nearly vanish would cancel the bits of g.
template <class W>
struct Lerp {
  bool from_m;
  W share;
  explicit Lerp(double share) : from_m(share < 0.5), share(W(from_m ? share : share - 1)) {}
  HFNN_INLINE W operator()(W m, W g) const { return (from_m ? m : g) + share * (g - m); }
};

// g with coupled weight decay. Without decay, an infinite p must not make g NaN.
template <class W>
HFNN_INLINE W decayed(W g, W coupled, W p) {
  return coupled != 0 ? g + coupled * p : g;
}

// The rules for one element: from its parameter, gradient and up to three states to the new ones. keep: what weight
// decay leaves of p; p - decay * p would be NaN for an infinite p.
template <bool kAmsgrad, class W>
struct Adam {
  static constexpr int kStates = kAmsgrad ? 3 : 2;
  W gradient, coupled, keep, rate, eps, beta2, rest2, root;
  Lerp<W> lerp;
  explicit Adam(const Coefficients& k)
      : gradient(k.gradient),
        coupled(k.coupled),
        keep(1 - k.decay),
        rate(k.rate),
        eps(k.eps),
        beta2(k.beta2),
        rest2(1 - k.beta2),
        root(k.root),
        lerp(1 - k.beta1) {}
  HFNN_INLINE void operator()(W& p, W g, W& m, W& v, W& w) const {
    g = decayed(g * gradient, coupled, p);
    m = lerp(m, g);
    v = beta2 * v + rest2 * g * g;
    if constexpr (kAmsgrad) w = w >= v ? w : v;
    p = keep * p - rate * m / (std::sqrt(kAmsgrad ? w : v) * root + eps);
  }
};

// kFirst: the state is not initialised yet.
template <bool kMomentum, bool kFirst, bool kNesterov, class W>
struct Sgd {
  static constexpr int kStates = kMomentum;
  W gradient, coupled, keep, rate, momentum, rest;
  explicit Sgd(const Coefficients& k)
      : gradient(k.gradient),
        coupled(k.coupled),
        keep(1 - k.decay),
        rate(k.rate),
        momentum(k.beta1),
        rest(1 - k.beta2) {}
  HFNN_INLINE void operator()(W& p, W g, W& b, W&, W&) const {
    g = decayed(g * gradient, coupled, p);
    b = kMomentum && !kFirst ? momentum * b + rest * g : g;
    p = keep * p - rate * (kNesterov ? g + momentum * b : b);
  }
};

template <class W>
struct Lion {
  static constexpr int kStates = 1;
  W gradient, keep, rate, beta1, rest1;
  Lerp<W> lerp;
  explicit Lion(const Coefficients& k)
      : gradient(k.gradient), keep(1 - k.decay), rate(k.rate), beta1(k.beta1), rest1(1 - k.beta1), lerp(1 - k.beta2) {}
  HFNN_INLINE void operator()(W& p, W g, W& m, W&, W&) const {
    g = g * gradient;
    const W u = beta1 * m + rest1 * g;
    m = lerp(m, g);
    p = keep * p - (u > 0 ? rate : u < 0 ? -rate : 0);
  }
};

// Two bfloat16 as one word, so that even and odd elements are separated without shuffling vectors.
HFNN_INLINE uint32_t load_pair(const bfloat16* x) {
  uint32_t pair;
  std::memcpy(&pair, x, 4);
  return pair;
}
// The result of store(), in the upper half.
HFNN_INLINE uint32_t rounded(float x) {
  const uint32_t bits = bits_of(x);
  return x != x ? 0x7fc00000 : bits + 0x7fff + (bits >> 16 & 1);
}
HFNN_INLINE void store_pair(bfloat16* x, float low, float high) {
  const uint32_t pair = rounded(low) >> 16 | (rounded(high) & 0xffff0000);
  std::memcpy(x, &pair, 4);
}
HFNN_INLINE float low(uint32_t pair) { return float_of(pair << 16); }
HFNN_INLINE float high(uint32_t pair) { return float_of(pair & 0xffff0000); }

// The elements of a run from `begin` on.
template <class T, class S, class Rule>
HFNN_INLINE void each(const Run<T, S>& run, int64_t begin, const Rule& rule) {
  using W = Wide<T>;
  constexpr int kUsed = Rule::kStates;
  const T* gs = run.g;
  T* ps = run.p;
  S *as = run.state[0], *bs = run.state[1], *cs = run.state[2];
#pragma omp simd
  for (int64_t i = begin; i < run.n; ++i) {
    W p = load(ps[i]), a = 0, b = 0, c = 0;
    if constexpr (kUsed > 0) a = load(as[i]);
    if constexpr (kUsed > 1) b = load(bs[i]);
    if constexpr (kUsed > 2) c = load(cs[i]);
    rule(p, load(gs[i]), a, b, c);
    store(ps[i], p);
    if constexpr (kUsed > 0) store(as[i], a);
    if constexpr (kUsed > 1) store(bs[i], b);
    if constexpr (kUsed > 2) store(cs[i], c);
  }
}

template <class Rule>
HFNN_INLINE void each_pair(const Run<bfloat16, bfloat16>& run, const Rule& rule) {
  constexpr int kUsed = Rule::kStates;
  const bfloat16* gs = run.g;
  bfloat16 *ps = run.p, *as = run.state[0], *bs = run.state[1], *cs = run.state[2];
#pragma omp simd
  for (int64_t i = 0; i < run.n / 2; ++i) {
    const uint32_t g = load_pair(gs + 2 * i), p = load_pair(ps + 2 * i);
    uint32_t a = 0, b = 0, c = 0;
    if constexpr (kUsed > 0) a = load_pair(as + 2 * i);
    if constexpr (kUsed > 1) b = load_pair(bs + 2 * i);
    if constexpr (kUsed > 2) c = load_pair(cs + 2 * i);
    float p0 = low(p), a0 = low(a), b0 = low(b), c0 = low(c), p1 = high(p), a1 = high(a), b1 = high(b), c1 = high(c);
    rule(p0, low(g), a0, b0, c0);
    rule(p1, high(g), a1, b1, c1);
    store_pair(ps + 2 * i, p0, p1);
    if constexpr (kUsed > 0) store_pair(as + 2 * i, a0, a1);
    if constexpr (kUsed > 1) store_pair(bs + 2 * i, b0, b1);
    if constexpr (kUsed > 2) store_pair(cs + 2 * i, c0, c1);
  }
}

// Processes a run by the rule that the options select.
template <class T, class S>
HFNN_INLINE void apply(const Run<T, S>& run, const Coefficients& k, int64_t rule, bool first) {
  using W = Wide<T>;
  const auto go = [&](const auto& chosen) HFNN_FLAT {
    if constexpr (std::is_same_v<T, bfloat16> && std::is_same_v<S, bfloat16>) {
      each_pair(run, chosen);
      return each(run, run.n / 2 * 2, chosen);
    }
    each(run, 0, chosen);
  };
  if (rule == O::kLion) return go(Lion<W>(k));
  if (rule == O::kAdam) return k.states == 3 ? go(Adam<true, W>(k)) : go(Adam<false, W>(k));
  if (!k.states) return go(Sgd<false, false, false, W>(k));
  if (k.options & O::kNesterov) return first ? go(Sgd<true, true, true, W>(k)) : go(Sgd<true, false, true, W>(k));
  first ? go(Sgd<true, true, false, W>(k)) : go(Sgd<true, false, false, W>(k));
}

// Prefetches the run from element `first` on. Decoding takes so long that the hardware prefetcher does not reach far
// enough. Without codes, prefetching is slower.
HFNN_INLINE void fetch(const Kept& kept, int64_t first) {
  constexpr int64_t kBits[] = {32, 16, 16, 64, 8, 4};
  const int64_t bits = kBits[kept.format], begin = int64_t(uintptr_t(kept.data)) + first * bits / 8;
  for (int64_t line = 0; line < kRun * bits / 8; line += 64) __builtin_prefetch(pointer<char>(begin + line), 1, 2);
}

// Elements [first, last) of a row: its part of one tile.
template <class T, class S>
HFNN_INLINE void step_tile(const Call& call, const int64_t* row, const Coefficients& k, uint64_t counter, int64_t first,
                           int64_t last) {
  constexpr bool kHalf = std::is_same_v<T, bfloat16>;
  alignas(64) Wide<T> buffer[2 + kStates][kRun];
  for (int64_t i = first; i < last; i += kRun) {
    const int64_t n = std::min(kRun, last - i);
    if (state_of(row, 0).format >= O::kInt8) {
      fetch(parameter_of(row), i + kRun);
      fetch(gradient_of(row), i + kRun);
      for (int64_t s = 0; s < k.states; ++s) fetch(state_of(row, s), i + kRun);
    }
    Run<T, S> run{nullptr, open<T>(gradient_of(row), i, n, buffer[1]), {}, n};
    if constexpr (kHalf)
      run.p = open<T>(parameter_of(row), i, n, buffer[0]);
    else
      run.p = open_parameter(row, i, n, buffer[0]);
    for (int64_t s = 0; s < k.states; ++s) run.state[s] = open<S>(state_of(row, s), i, n, buffer[2 + s]);
    apply(run, k, call.rule, row[O::kFlags] & O::kFirst);
    for (int64_t s = 0; s < k.states; ++s) close(run.state[s], i, n, state_of(row, s));
    if constexpr (!kHalf) close_parameter(call.keeping, row, run.p, i, n, counter + uint64_t(i - first) / 8);
  }
}

// f(T{}, S{}) with the types in which the rules see a row's parameters and gradients, and its states.
template <class F>
HFNN_INLINE void with_types(const Call& call, const int64_t* row, F f) {
  const int64_t codes = row[O::kCodes];
  if ((codes & 15) == O::kFloat64) return f(double{}, double{});
  const bool half_states = codes >> 8 == O::kBfloat16;
  const bool plain = call.keeping.seed < 0 && !row[O::kRemainder] && !(call.keeping.ema_decay >= 0 && row[O::kEma]);
  if (plain && (codes & 255) == (O::kBfloat16 | O::kBfloat16 << 4))
    return half_states ? f(bfloat16{}, bfloat16{}) : f(bfloat16{}, float{});
  half_states ? f(float{}, bfloat16{}) : f(float{}, float{});
}

HFNN_CLONES static void update_tiles(const Call& call, int64_t begin, int64_t end) {
  Coefficients k;
  for (int64_t tile = begin; tile < end; ++tile) {
    const int64_t* row = call.rows + call.owner[tile] * O::kColumns;
    const int64_t first = (tile - row[O::kFirstTile]) * O::kTile, last = std::min(first + O::kTile, row[O::kNumel]);
    const uint64_t counter = uint64_t(tile) * (O::kTile / 8);  // eight elements each
    look_up(call, row, k);
    with_types(call, row, [&](auto t, auto s) HFNN_FLAT {
      step_tile<decltype(t), decltype(s)>(call, row, k, counter, first, last);
    });
  }
}

// The sum of (factor g)^2 over the tiles [begin, end).
HFNN_CLONES static double sum_squares(const Call& call, int64_t begin, int64_t end) {
  double total = 0;
  for (int64_t tile = begin; tile < end; ++tile) {
    const int64_t* row = call.rows + call.owner[tile] * O::kColumns;
    const int64_t first = (tile - row[O::kFirstTile]) * O::kTile, n = std::min(O::kTile, row[O::kNumel] - first);
    const auto add = [&](auto wide) HFNN_FLAT {
      using W = decltype(wide);
      alignas(64) W buffer[O::kTile];
      const W factor = W(call.factor);
      const W* g = open<W>(gradient_of(row), first, n, buffer);
      total += sum<W>(n, [=](int64_t i) HFNN_FLAT { return (factor * g[i]) * (factor * g[i]); });
    };
    (row[O::kCodes] >> 4 & 15) == O::kFloat64 ? add(double{}) : add(float{});
  }
  return total;
}

// At least one, even without tiles, because the norm is taken of them.
static int64_t partials(int64_t tiles) { return std::clamp<int64_t>(tiles, 1, 128); }

static void prepare(const Tensor& rows, const Tensor& owner, const Tensor& control, const Tensor& squares,
                    int64_t threads) {
  expect("rows", rows, {rows.shape[0], O::kColumns}, Dtype::int64);
  expect("owner", owner, {owner.shape[0]}, Dtype::int32);
  expect("control", control, {O::kControl}, Dtype::float32);
  const int64_t tiles = owner.shape[0], parts = partials(tiles);
  if (squares) expect("squares", squares, {parts}, Dtype::float64);
  const int64_t* row = rows.as<int64_t>();
  if (!found_inf(control))
    for (int64_t r = 0; r < rows.shape[0]; ++r, row += O::kColumns)
      if (row[O::kStep]) *pointer<float>(row[O::kStep]) += 1;
  if (!squares) return;
  const double factor = 1 / double(control.as<float>()[O::kGradScale]);
  const Call call{rows.as<int64_t>(), owner.as<int32_t>(), nullptr, 0, factor, {}};
  double* sums = squares.as<double>();
  split(parts, work_of(rows), threads, [&](int64_t begin, int64_t end) {
    for (int64_t p = begin; p < end; ++p) sums[p] = sum_squares(call, tiles * p / parts, tiles * (p + 1) / parts);
  });
}

static void update(const Tensor& rows, const Tensor& owner, const Tensor& hyper, const Tensor& control,
                   const Tensor& squares, int64_t rule, double ema_decay, int64_t seed, int64_t offset,
                   int64_t threads) {
  expect_call(rows, hyper, control, squares);
  expect("owner", owner, {owner.shape[0]}, Dtype::int32);
  HFNN_CHECK(rule >= O::kAdam && rule <= O::kLion);
  const double factor = gradient_factor(control, squares, control.as<float>() + O::kNorm);
  if (found_inf(control)) return;
  const Keeping keeping{ema_decay, seed, offset};
  const Call call{rows.as<int64_t>(), owner.as<int32_t>(), hyper.as<double>(), rule, factor, keeping};
  split(owner.shape[0], work_of(rows), threads, [&](int64_t begin, int64_t end) { update_tiles(call, begin, end); });
}

const Optim optim_cpu = {partials, prepare, update};

}  // namespace hfnn
