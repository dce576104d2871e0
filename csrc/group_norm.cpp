// Group normalisation on the CPU. If a channel's elements are contiguous, so are a group's, which stay in the cache
// from the statistics to the results. If the channels are last, parts of a sample's rows give sums per channel.
#include "group_norm.h"

#include "batch_norm_cpu.h"

namespace hfnn {

namespace {
// Elements that are read for the mean and again for the squares.
constexpr int64_t kPiece = 4096;
// Approximate elements of a part of a sample, with the channels last.
constexpr int64_t kPart = 65536;

// y is dy in backward.
struct Call : BatchNormCall {
  int64_t groups = 0;
  bool last = false;
  int64_t samples() const { return x.shape[0]; }
  int64_t channels() const { return x.shape[last ? 2 : 1]; }
  int64_t size() const { return x.shape[last ? 1 : 2]; }
  int64_t width() const { return channels() / groups; }
  int64_t terms() const { return width() * size(); }
};

// z and dx for elements of one channel.
template <class W>
struct OfChannel {
  W mean, scale, bias, shift, slope;
  HFNN_INLINE W z(W x, int64_t) const { return fused(x - mean, scale, bias); }
  HFNN_INLINE W dx(W g, W x, int64_t) const { return scale * g - fused(x - mean, slope, shift); }
};
// For elements of many channels. The first entry belongs to the run's first element.
template <class W>
struct OfRow {
  const W *mean, *scale, *bias, *shift, *slope;
  HFNN_INLINE W z(W x, int64_t i) const { return fused(x - mean[i], scale[i], bias[i]); }
  HFNN_INLINE W dx(W g, W x, int64_t i) const { return scale[i] * g - fused(x - mean[i], slope[i], shift[i]); }
};

// What a group's dx subtracts from scale * g: shift + (x - mean) * slope, from the sums of weight * g and of weight * g
// * xhat.
template <class W>
struct Centre {
  W shift, slope;
  Centre(double sum_g, double sum_gx, double terms, double rstd)
      : shift(W(rstd * sum_g / terms)), slope(W(rstd * rstd * sum_gx / terms)) {}
};
}  // namespace

static int64_t count_parts(int64_t size, int64_t channels) {
  return std::clamp<int64_t>(std::min(size / 8, size * channels / kPart), 1, 64);
}
static int64_t parts(const Call& c) { return c.last ? count_parts(c.size(), c.channels()) : 1; }
static int64_t partials(int64_t samples, int64_t channels, int64_t size, int64_t, bool last) {
  return 2 * samples * channels * (last ? count_parts(size, channels) : 1);
}

template <class W>
HFNN_INLINE void settle(const Call& c, int64_t group, const Moments& m) {
  const double var = m.squares / m.count;
  c.mean.as<W>()[group] = W(m.mean);
  c.rstd.as<W>()[group] = W(1 / std::sqrt((var < 0 ? 0 : var) + c.eps));
}

// Layout with a channel's elements contiguous.

template <class T>
HFNN_INLINE Moments group_moments(Runs<T>& x, int64_t first, int64_t n) {
  using W = Wide<T>;
  Moments moments;
  // Squares are taken around the mean of the preceding elements; the first elements are read twice. If a piece's mean
  // is far from it, the squares cancel in part, but this distance is part of the total's squares, so the error stays
  // small.
  for (int64_t from = 0, size; from < n; from += size) {
    size = std::min(from ? kPiece : kRun, n - from);
    const auto run = [&](auto& sums, auto add) HFNN_FLAT {
      for_runs(size, 0, count_runs(size), [&](int64_t begin, int64_t count) HFNN_FLAT {
        const T* xs = x.read(first + from + begin, count);
        sums.run(count, [=](int64_t i, auto&... lanes) HFNN_FLAT { add(load(xs[i]), lanes...); });
      });
    };
    W near = W(moments.mean);
    if (from == 0) {
      Sums<W, 1> sum;
      run(sum, [](W v, W& lane) HFNN_FLAT { lane += v; });
      near = sum.total(0) / W(size);
    }
    Sums<W, 2> around;
    run(around, [=](W v, W& off, W& squares) HFNN_FLAT {
      off += v - near;
      squares += (v - near) * (v - near);
    });
    const double off = double(around.total(0)), count = double(size);
    moments.add(count, double(near) + off / count, double(around.total(1)) - off * off / count);
  }
  return moments;
}

template <class W>
HFNN_INLINE OfChannel<W> numbers(const Call& c, int64_t group, int64_t channel) {
  const W mean = c.mean.as<W>()[group], rstd = c.rstd.as<W>()[group];
  return {mean, rstd * c.weight.as<W>()[channel], c.bias.as<W>()[channel], 0, 0};
}

HFNN_CLONES static void groups_forward(const Call& c, int64_t begin, int64_t end) {
  with_runs(c.x.dtype, [&](auto t) HFNN_FLAT {
    using T = decltype(t);
    using W = Wide<T>;
    Lanes<T, false> lanes(c);
    for (int64_t group = begin; group < end; ++group) {
      if (c.forward) settle<W>(c, group, group_moments<T>(lanes.x, group * c.terms(), c.terms()));
      for (int64_t k = 0; k < c.width(); ++k) {
        const OfChannel<W> at = numbers<W>(c, group, group % c.groups * c.width() + k);
        const int64_t plane = (group * c.width() + k) * c.size();
        for_runs(c.size(), 0, count_runs(c.size()),
                 [&](int64_t first, int64_t n) HFNN_FLAT { lanes.forward(c, at, plane + first, n, 0); });
      }
    }
  });
}

HFNN_CLONES static void groups_backward(const Call& c, int64_t begin, int64_t end) {
  with_runs(c.x.dtype, [&](auto t) HFNN_FLAT {
    using T = decltype(t);
    using W = Wide<T>;
    Lanes<T, false> lanes(c);
    W* sums_gx = c.partials.as<W>();
    W* sums_g = sums_gx + c.samples() * c.channels();
    for (int64_t group = begin; group < end; ++group) {
      const double rstd = double(c.rstd.as<W>()[group]);
      double of_g = 0, of_gx = 0;
      for (int64_t k = 0; k < c.width(); ++k) {
        const int64_t channel = group % c.groups * c.width() + k, plane = group * c.width() + k;
        const OfChannel<W> at = numbers<W>(c, group, channel);
        double sum_gx = 0, sum_g = 0;
        for (int64_t from = 0; from < c.size(); from += kPiece) {
          const int64_t size = std::min(kPiece, c.size() - from);
          Sums<W, 2> sums;
          for_runs(size, 0, count_runs(size), [&](int64_t first, int64_t n) HFNN_FLAT {
            lanes.sums(c, at, plane * c.size() + from + first, n, 0, [&](auto g, auto x) HFNN_FLAT {
              sums.run(n, [=](int64_t i, W& gx, W& alone) HFNN_FLAT {
                const W d = g(i);
                gx += d * (x(i) - at.mean);
                alone += d;
              });
            });
          });
          sum_gx += double(sums.total(0));
          sum_g += double(sums.total(1));
        }
        sums_gx[plane] = W(sum_gx * rstd);
        sums_g[plane] = W(sum_g);
        of_gx += sum_gx * rstd * double(c.weight.as<W>()[channel]);
        of_g += sum_g * double(c.weight.as<W>()[channel]);
      }
      if (!c.dx) continue;
      const Centre<W> centre(of_g, of_gx, double(c.terms()), rstd);
      for (int64_t k = 0; k < c.width(); ++k) {
        OfChannel<W> at = numbers<W>(c, group, group % c.groups * c.width() + k);
        at.shift = centre.shift, at.slope = centre.slope;
        const int64_t plane = (group * c.width() + k) * c.size();
        for_runs(c.size(), 0, count_runs(c.size()),
                 [&](int64_t first, int64_t n) HFNN_FLAT { lanes.backward(c, at, plane + first, n, 0); });
      }
    }
  });
}

// Layout with the channels last. A part lies in one sample: its first element, and how many.

template <class Part>
HFNN_INLINE void for_parts(const Call& c, int64_t begin, int64_t end, Part part) {
  const int64_t each = parts(c);
  for (int64_t k = begin; k < end; ++k) {
    const int64_t sample = k / each, first = c.size() * (k % each) / each, last = c.size() * (k % each + 1) / each;
    part(k, sample, (sample * c.size() + first) * c.channels(), (last - first) * c.channels());
  }
}

static int64_t longest_run(const Call& c) { return std::min(kRun, c.size() * c.channels()); }

// Sums a row of per-channel numbers over each group's channels.
template <class W>
HFNN_INLINE void add_channels(const Call& c, const W* of_channel, double* of_group) {
  for (int64_t group = 0; group < c.groups; ++group) {
    double total = 0;
    for (int64_t k = 0; k < c.width(); ++k) total += double(of_channel[group * c.width() + k]);
    of_group[group] = total;
  }
}

// Writes mean and squares of each group over a part to the part's row of partials.
HFNN_CLONES static void rows_moments(const Call& c, int64_t begin, int64_t end) {
  const int64_t C = c.channels(), D = c.width(), G = c.groups;
  const int64_t block = std::max<int64_t>(1, 4 * kPiece / C) * C, few = std::max<int64_t>(1, kPiece / C) * C;
  with_runs(c.x.dtype, [&](auto t) HFNN_FLAT {
    using T = decltype(t);
    using W = Wide<T>;
    Runs<T> x(c.x, kRun);
    Laid<W> sums(C, 2, longest_run(c)), near(C, 1, longest_run(c));
    std::vector<Moments> moments(G);
    std::vector<double> first_of(G), second_of(G);
    std::vector<W> mean(G);
    for_parts(c, begin, end, [&](int64_t part, int64_t, int64_t start, int64_t all) HFNN_FLAT {
      std::fill(moments.begin(), moments.end(), Moments());
      for (int64_t from = 0, size; from < all; from += size) {
        size = std::min(from ? block : few, all - from);
        const auto run = [&](auto add) HFNN_FLAT {
          sums.clear();
          for_runs(size, 0, count_runs(size), [&](int64_t i, int64_t n) HFNN_FLAT {
            const T* xs = x.read(start + from + i, n);
            W *first = sums.at(0, i), *second = sums.at(1, i);
            const W* m = near.at(0, i);
#pragma omp simd
            for (int64_t k = 0; k < n; ++k) add(load(xs[k]), m[k], first[k], second[k]);
          });
          add_channels(c, sums.folded(0), first_of.data());
        };
        const double count = double(size / C * D);
        if (from == 0) run([](W v, W, W& sum, W&) HFNN_FLAT { sum += v; });
        for (int64_t group = 0; group < G; ++group)
          mean[group] = W(from ? moments[group].mean : first_of[group] / count);
        near.fill(0, [&](int64_t k) HFNN_FLAT { return mean[k / D]; });
        run([](W v, W m, W& off, W& squares) HFNN_FLAT {
          off += v - m;
          squares += (v - m) * (v - m);
        });
        add_channels(c, sums.folded(1), second_of.data());
        for (int64_t group = 0; group < G; ++group) {
          const double off = first_of[group], square = second_of[group] - off * off / count;
          moments[group].add(count, double(mean[group]) + off / count, square);
        }
      }
      W *means = c.partials.as<W>() + part * G, *squares = means + c.samples() * parts(c) * G;
      for (int64_t group = 0; group < G; ++group) {
        means[group] = W(moments[group].mean);
        squares[group] = W(moments[group].squares);
      }
    });
  });
}

static void rows_settle(const Call& c) {
  with_wide(c.x.dtype, [&](auto wide) {
    using W = decltype(wide);
    const int64_t G = c.groups, each = parts(c);
    const W *means = c.partials.as<W>(), *squares = means + c.samples() * each * G;
    for (int64_t group = 0; group < c.samples() * G; ++group) {
      Moments m;
      for_parts(c, group / G * each, (group / G + 1) * each, [&](int64_t part, int64_t, int64_t, int64_t all) {
        const int64_t at = part * G + group % G;
        m.add(double(all / c.channels() * c.width()), double(means[at]), double(squares[at]));
      });
      settle<W>(c, group, m);
    }
  });
}

// The numbers of all channels of a sample as runs need them; with `dx`, after the sums, also those for dx.
template <class W>
class OfSample {
 public:
  OfSample(const Call& c, bool dx) : c_(c), laid_(c.channels(), dx ? 5 : 3, longest_run(c)), dx_(dx) {}
  HFNN_INLINE void take(int64_t sample) {
    if (sample == sample_) return;
    sample_ = sample;
    const int64_t D = c_.width();
    const W *mean = c_.mean.as<W>() + sample * c_.groups, *rstd = c_.rstd.as<W>() + sample * c_.groups;
    const W *weight = c_.weight.as<W>(), *bias = c_.bias.as<W>();
    laid_.fill(0, [=](int64_t k) HFNN_FLAT { return mean[k / D]; });
    laid_.fill(1, [=](int64_t k) HFNN_FLAT { return rstd[k / D] * weight[k]; });
    laid_.fill(2, [=](int64_t k) HFNN_FLAT { return bias[k]; });
    if (!dx_) return;
    const int64_t each = parts(c_), C = c_.channels();
    const W *sums_gx = c_.partials.as<W>() + sample * each * C, *sums_g = sums_gx + c_.samples() * each * C;
    std::vector<Centre<W>> centres;
    for (int64_t group = 0; group < c_.groups; ++group) {
      double of_g = 0, of_gx = 0;
      for (int64_t part = 0; part < each; ++part)
        for (int64_t k = group * D; k < (group + 1) * D; ++k) {
          of_g += double(sums_g[part * C + k]) * double(weight[k]);
          of_gx += double(sums_gx[part * C + k]) * double(weight[k]);
        }
      centres.emplace_back(of_g, of_gx, double(c_.terms()), double(rstd[group]));
    }
    laid_.fill(3, [&](int64_t k) HFNN_FLAT { return centres[k / D].shift; });
    laid_.fill(4, [&](int64_t k) HFNN_FLAT { return centres[k / D].slope; });
  }
  HFNN_INLINE OfRow<W> of_run(int64_t i) {
    return {laid_.at(0, i), laid_.at(1, i), laid_.at(2, i), laid_.at(dx_ ? 3 : 0, i), laid_.at(dx_ ? 4 : 0, i)};
  }

 private:
  const Call& c_;
  Laid<W> laid_;
  bool dx_;
  int64_t sample_ = -1;
};

HFNN_CLONES static void rows_forward(const Call& c, int64_t begin, int64_t end) {
  with_runs(c.x.dtype, [&](auto t) HFNN_FLAT {
    Lanes<decltype(t), false> lanes(c);
    OfSample<Wide<decltype(t)>> numbers(c, false);
    for_parts(c, begin, end, [&](int64_t, int64_t sample, int64_t start, int64_t all) HFNN_FLAT {
      numbers.take(sample);
      for_runs(all, 0, count_runs(all),
               [&](int64_t i, int64_t n) HFNN_FLAT { lanes.forward(c, numbers.of_run(i), start + i, n, 0); });
    });
  });
}

// Writes the sums of g * xhat and of g of each channel over a part to the part's rows of partials.
HFNN_CLONES static void rows_sums(const Call& c, int64_t begin, int64_t end) {
  const int64_t C = c.channels(), D = c.width(), block = std::max<int64_t>(1, 4 * kPiece / C) * C;
  with_runs(c.x.dtype, [&](auto t) HFNN_FLAT {
    using W = Wide<decltype(t)>;
    Lanes<decltype(t), false> lanes(c);
    OfSample<W> numbers(c, false);
    Laid<W> sums(C, 2, longest_run(c));
    std::vector<double> total(2 * C);
    for_parts(c, begin, end, [&](int64_t part, int64_t sample, int64_t start, int64_t all) HFNN_FLAT {
      numbers.take(sample);
      std::fill(total.begin(), total.end(), 0.0);
      for (int64_t from = 0; from < all; from += block) {
        const int64_t size = std::min(block, all - from);
        sums.clear();
        for_runs(size, 0, count_runs(size), [&](int64_t i, int64_t n) HFNN_FLAT {
          W *gx = sums.at(0, i), *alone = sums.at(1, i);
          const OfRow<W> at = numbers.of_run(i);
          lanes.sums(c, at, start + from + i, n, 0, [=](auto g, auto x) HFNN_FLAT {
#pragma omp simd
            for (int64_t k = 0; k < n; ++k) {
              const W d = g(k);
              gx[k] += d * (x(k) - at.mean[k]);
              alone[k] += d;
            }
          });
        });
        for (int64_t which = 0; which < 2; ++which) {
          const W* of_block = sums.folded(which);
          for (int64_t k = 0; k < C; ++k) total[which * C + k] += double(of_block[k]);
        }
      }
      const W* rstd = c.rstd.as<W>() + sample * c.groups;
      W *sums_gx = c.partials.as<W>() + part * C, *sums_g = sums_gx + c.samples() * parts(c) * C;
      for (int64_t k = 0; k < C; ++k) {
        sums_gx[k] = W(total[k] * double(rstd[k / D]));
        sums_g[k] = W(total[C + k]);
      }
    });
  });
}

HFNN_CLONES static void rows_backward(const Call& c, int64_t begin, int64_t end) {
  with_runs(c.x.dtype, [&](auto t) HFNN_FLAT {
    Lanes<decltype(t), false> lanes(c);
    OfSample<Wide<decltype(t)>> numbers(c, true);
    for_parts(c, begin, end, [&](int64_t, int64_t sample, int64_t start, int64_t all) HFNN_FLAT {
      numbers.take(sample);
      for_runs(all, 0, count_runs(all),
               [&](int64_t i, int64_t n) HFNN_FLAT { lanes.backward(c, numbers.of_run(i), start + i, n, 0); });
    });
  });
}

// The gradients of the parameters, from the sums of all parts.
static void finish_sums(const Call& c) {
  const int64_t C = c.channels(), rows = c.samples() * parts(c);
  with_wide(c.x.dtype, [&](auto wide) {
    for (int64_t which = 0; which < 2; ++which) {
      const Tensor& out = which ? c.dbias : c.dweight;
      if (!out) continue;
      const auto* sums = c.partials.as<decltype(wide)>() + which * rows * C;
      std::vector<double> total(C);
      for (int64_t row = 0; row < rows; ++row)
        for (int64_t k = 0; k < C; ++k) total[k] += double(sums[row * C + k]);
      with_dtype(out.dtype, [&](auto stored) {
        using R = decltype(stored);
        for (int64_t k = 0; k < C; ++k) store(out.as<R>()[k], static_cast<Wide<R>>(total[k]));
      });
    }
  });
}

static void check(Call& c, const Tensor& weight, const Tensor& bias) {
  expect_floating("x", c.x.dtype);
  HFNN_CHECK_EQ(c.x.dims, 3);
  expect_alike("x", c.x, c.x);
  HFNN_CHECK(c.x.numel() > 0);
  HFNN_CHECK(c.kind >= 0 && c.kind < kKinds);
  expect_alike("y", c.y, c.x);
  if (c.dx) expect_alike("dx", c.dx, c.x);
  HFNN_CHECK_EQ(c.mean.dims, 2);
  c.groups = c.mean.shape[1];
  HFNN_CHECK(c.groups > 0 && c.channels() % c.groups == 0);
  const std::pair<const char*, const Tensor&> statistics[] = {{"mean", c.mean}, {"rstd", c.rstd}};
  for (const auto& [name, t] : statistics) {
    expect_shape(name, t, {c.samples(), c.groups});
    expect_dtype(name, t, wide(c.x.dtype));
  }
  const std::pair<const char*, const Tensor&> by_channel[] = {
      {"weight", weight}, {"bias", bias}, {"dweight", c.dweight}, {"dbias", c.dbias}};
  for (const auto& [name, t] : by_channel) {
    if (!t) continue;
    expect_shape(name, t, {c.channels()});
    expect_floating(name, t.dtype);
  }
  if (!c.partials) return;
  expect_shape("partials", c.partials, {partials(c.samples(), c.channels(), c.size(), c.groups, c.last)});
  expect_dtype("partials", c.partials, wide(c.x.dtype));
}

using Work = void (*)(const Call&, int64_t, int64_t);

static void split_up(const Call& c, Work work, int64_t threads) {
  const int64_t count = c.samples() * (c.last ? parts(c) : c.groups);
  split(count, c.x.numel(), threads, [&](int64_t begin, int64_t end) { work(c, begin, end); });
}

static void run_forward(Call& c, const Tensor& weight, const Tensor& bias, int64_t threads) {
  check(c, weight, bias);
  const Vector w(weight, wide(c.x.dtype), c.channels(), 1), b(bias, wide(c.x.dtype), c.channels(), -0.0);
  c.weight.data = const_cast<void*>(w.as<void>());
  c.bias.data = const_cast<void*>(b.as<void>());
  if (c.last && c.forward) {
    split_up(c, rows_moments, threads);
    rows_settle(c);
  }
  split_up(c, c.last ? rows_forward : groups_forward, threads);
}

static void forward(const Tensor& x, const Tensor& weight, const Tensor& bias, const Tensor& y, const Tensor& mean,
                    const Tensor& rstd, const Tensor& partials, double eps, int64_t kind, double slope, bool last,
                    int64_t threads) {
  Call c;
  c.x = x, c.y = y, c.mean = mean, c.rstd = rstd, c.partials = partials, c.eps = eps, c.kind = kind, c.slope = slope;
  c.last = last, c.forward = true;
  HFNN_CHECK(bool(partials));
  run_forward(c, weight, bias, threads);
}

static void rebuild(const Tensor& x, const Tensor& weight, const Tensor& bias, const Tensor& y, const Tensor& mean,
                    const Tensor& rstd, int64_t kind, double slope, bool last, int64_t threads) {
  Call c;
  c.x = x, c.y = y, c.mean = mean, c.rstd = rstd, c.kind = kind, c.slope = slope, c.last = last;
  run_forward(c, weight, bias, threads);
}

static void backward(const Tensor& dy, const Tensor& x, const Tensor& weight, const Tensor& bias, const Tensor& mean,
                     const Tensor& rstd, const Tensor& dx, const Tensor& dweight, const Tensor& dbias,
                     const Tensor& partials, int64_t kind, double slope, bool last, int64_t threads) {
  Call c;
  c.x = x, c.y = dy, c.mean = mean, c.rstd = rstd, c.partials = partials, c.dx = dx, c.dweight = dweight;
  c.dbias = dbias, c.kind = kind, c.slope = slope, c.last = last;
  // If f' is expensive, g is stored in dx, and rounded as torch's own is.
  if (c.kind > kPiecewise) c.dresidual = dx;
  c.sums = true;
  HFNN_CHECK(bool(partials));
  check(c, weight, bias);
  const Vector w(weight, wide(x.dtype), c.channels(), 1), b(bias, wide(x.dtype), c.channels(), -0.0);
  c.weight.data = const_cast<void*>(w.as<void>());
  c.bias.data = const_cast<void*>(b.as<void>());
  split_up(c, last ? rows_sums : groups_backward, threads);
  if (last && dx) split_up(c, rows_backward, threads);
  finish_sums(c);
}

const GroupNorm group_norm_cpu = {partials, forward, rebuild, backward};

}  // namespace hfnn
