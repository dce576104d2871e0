// Batch normalisation on the CPU with separate planes for each channel. A run of elements belongs to one plane, and
// uses the numbers of its channel.
#pragma once
#include "batch_norm_cpu.h"

namespace hfnn {

namespace {
// Elements that are read for the mean and again for the squares. Their terms are added in lanes.
constexpr int64_t kPiece = 4096;

// The accumulator type for sums that may cancel, as in torch's kernels for planes: float for bfloat16, double
// otherwise. float16 is read as float, and so also uses double.
template <class T>
using Sum = std::conditional_t<std::is_same_v<T, bfloat16>, float, double>;
}  // namespace

// body(first element, elements, byte of bits) for the runs in elements [from, from + n) of a plane.
template <class Body>
HFNN_INLINE void plane_runs(const BatchNormCall& c, int64_t plane, int64_t from, int64_t n, Body body) {
  const int64_t size = c.size();
  for_runs(n, 0, count_runs(n), [&](int64_t begin, int64_t count) HFNN_FLAT {
    body(plane * size + from + begin, count, plane * ((size + 7) / 8) + (from + begin) / 8);
  });
}

// block(first plane, planes, from, elements of each) for pieces of a channel.
template <class Block>
HFNN_INLINE void plane_pieces(const BatchNormCall& c, Block block) {
  const int64_t size = c.size(), several = std::max<int64_t>(1, kPiece / size);
  for (int64_t p = 0; p < c.planes(); p += several)
    for (int64_t from = 0; from < size; from += kPiece)
      block(p, std::min(several, c.planes() - p), from, std::min(kPiece, size - from));
}

template <class T>
HFNN_INLINE Moments plane_moments(const BatchNormCall& c, Runs<T>& x, int64_t channel) {
  using W = Wide<T>;
  Moments moments;
  plane_pieces(c, [&](int64_t first, int64_t planes, int64_t from, int64_t n) HFNN_FLAT {
    const auto total = [&](auto zero, auto term) HFNN_FLAT {
      using S = decltype(zero);
      Sums<S, 1> sums;
      for (int64_t p = first; p < first + planes; ++p) {
        plane_runs(c, p * c.channels() + channel, from, n, [&](int64_t at, int64_t count, int64_t) HFNN_FLAT {
          const T* xs = x.read(at, count);
          sums.run(count, [=](int64_t i, S& lane) HFNN_FLAT { lane += S(term(load(xs[i]))); });
        });
      }
      return double(sums.total(0));
    };
    const double count = double(planes * n), mean = total(Sum<T>(0), [](W v) HFNN_FLAT { return v; }) / count;
    const W near = W(mean);
    moments.add(count, mean, total(W(0), [=](W v) HFNN_FLAT { return (v - near) * (v - near); }));
  });
  return moments;
}

HFNN_CLONES static void planes_moments(const BatchNormCall& c, int64_t begin, int64_t end) {
  with_runs(c.x.dtype, [&](auto t) HFNN_FLAT {
    Runs<decltype(t)> x(c.x, kRun);
    for (int64_t channel = begin; channel < end; ++channel)
      settle<Wide<decltype(t)>>(c, channel, plane_moments<decltype(t)>(c, x, channel));
  });
}

// The numbers of a channel. Those for dx are 0 except in training, after the sums.
template <class W>
HFNN_INLINE One<W> numbers(const BatchNormCall& c, int64_t channel, bool training) {
  const W rstd = c.rstd.as<W>()[channel];
  One<W> at{c.mean.as<W>()[channel], rstd * c.weight.as<W>()[channel], c.bias.as<W>()[channel], 0, 0};
  if (training) {
    const W *sums = c.partials.as<W>() + channel, n = W(c.terms());
    at.mean_gx = sums[0] / n * at.scale * rstd;
    at.mean_g = sums[c.channels()] / n;
  }
  return at;
}

// The sums of g * xhat and of g, in one chunk.
HFNN_CLONES static void planes_sums(const BatchNormCall& c, int64_t begin, int64_t end) {
  with_runs(c.x.dtype, [&](auto t) HFNN_FLAT {
    using W = Wide<decltype(t)>;
    Lanes<decltype(t), true> lanes(c);
    for (int64_t channel = begin; channel < end; ++channel) {
      const One<W> at = numbers<W>(c, channel, false);
      double sum_gx = 0, sum_g = 0;
      plane_pieces(c, [&](int64_t p0, int64_t planes, int64_t from, int64_t size) HFNN_FLAT {
        using S = Sum<decltype(t)>;
        Sums<S, 2> sums;
        for (int64_t p = p0; p < p0 + planes; ++p) {
          plane_runs(c, p * c.channels() + channel, from, size, [&](int64_t first, int64_t n, int64_t bit) HFNN_FLAT {
            lanes.sums(c, at, first, n, bit, [&](auto g, auto x) HFNN_FLAT {
              sums.run(n, [=](int64_t i, S& gx, S& alone) HFNN_FLAT {
                const S d = S(g(i));
                gx += d * (S(x(i)) - S(at.mean));
                alone += d;
              });
            });
          });
        }
        sum_gx += double(sums.total(0));
        sum_g += double(sums.total(1));
      });
      c.partials.as<W>()[channel] = W(sum_gx * double(c.rstd.as<W>()[channel]));
      c.partials.as<W>()[c.channels() + channel] = W(sum_g);
    }
  });
}

// Whether planes are large enough to work by channel, whose planes are reread from the cache, instead of in memory
// order.
static bool by_channel(const BatchNormCall& c) { return c.size() >= 512; }

// plane(index, channel) for [begin, end), which counts planes, or channels with all their planes. For channels,
// statistics(c, channel, channel + 1) runs first.
template <class Plane>
HFNN_INLINE void for_planes(const BatchNormCall& c, int64_t begin, int64_t end,
                            void (*statistics)(const BatchNormCall&, int64_t, int64_t), Plane plane) {
  const bool channels = by_channel(c);
  for (int64_t i = begin; i < end; ++i) {
    if (channels && statistics) statistics(c, i, i + 1);
    for (int64_t p = 0; p < (channels ? c.planes() : 1); ++p)
      plane(channels ? p * c.channels() + i : i, channels ? i : i % c.channels());
  }
}

HFNN_CLONES static void planes_forward(const BatchNormCall& c, int64_t begin, int64_t end) {
  with_runs(c.x.dtype, [&](auto t) HFNN_FLAT {
    using W = Wide<decltype(t)>;
    Lanes<decltype(t), true> lanes(c);
    for_planes(c, begin, end, c.training ? planes_moments : nullptr, [&](int64_t plane, int64_t channel) HFNN_FLAT {
      const One<W> at = numbers<W>(c, channel, false);
      plane_runs(c, plane, 0, c.size(),
                 [&](int64_t first, int64_t n, int64_t bit) HFNN_FLAT { lanes.forward(c, at, first, n, bit); });
    });
  });
}

HFNN_CLONES static void planes_backward(const BatchNormCall& c, int64_t begin, int64_t end) {
  with_runs(c.x.dtype, [&](auto t) HFNN_FLAT {
    using W = Wide<decltype(t)>;
    Lanes<decltype(t), true> lanes(c);
    for_planes(c, begin, end, c.sums ? planes_sums : nullptr, [&](int64_t plane, int64_t channel) HFNN_FLAT {
      if (!c.dx && !(c.dresidual && !c.sums)) return;
      const One<W> at = numbers<W>(c, channel, c.training && c.dx);
      plane_runs(c, plane, 0, c.size(),
                 [&](int64_t first, int64_t n, int64_t bit) HFNN_FLAT { lanes.backward(c, at, first, n, bit); });
    });
  });
}

}  // namespace hfnn
