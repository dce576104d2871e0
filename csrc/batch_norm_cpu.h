// What batch_norm.cpp does to a run of elements, with per-channel numbers that are constant along the run or change
// with the element.
#pragma once
#include <vector>

#include "batch_norm.h"
#include "bits_cpu.h"
#include "exp_cpu.h"

namespace hfnn {

namespace {
// The activations. Sums support those up to kPiecewise.
enum Kind { kIdentity, kRelu, kLeakyRelu, kRelu6, kPiecewise = kRelu6, kSilu, kHardswish, kKinds };

// y is dy in backward. dx and dresidual are used in backward only.
struct BatchNormCall {
  Tensor x, weight, bias, residual, y, bits, mean, rstd, running_mean, running_var, partials, dx, dresidual, dweight,
      dbias;
  int64_t kind = 0;
  double slope = 0, momentum = 0, eps = 0;
  bool training = false, forward = false, sums = false;
  int64_t planes() const { return x.shape[0]; }
  int64_t channels() const { return x.shape[1]; }
  int64_t size() const { return x.shape[2]; }
  int64_t terms() const { return planes() * size(); }
};

// The mean of a growing number of terms and their squares around it (Chan, Golub and LeVeque, 1983).
struct Moments {
  double count = 0, mean = 0, squares = 0;

  HFNN_INLINE void add(double n, double m, double s) {
    const double all = count + n, delta = m - mean;
    mean += delta * (n / all);
    squares += s + delta * delta * (count * n / all);
    count = all;
  }
};

// z and dx for elements of one channel.
template <class W>
struct One {
  W mean, scale, bias, mean_g, mean_gx;
  HFNN_INLINE W z(W x, int64_t) const { return fused(x - mean, scale, bias); }
  HFNN_INLINE W dx(W g, W x, int64_t) const { return scale * (g - mean_g) - (x - mean) * mean_gx; }
};
// For elements of many channels. The first entry belongs to the run's first element.
template <class W>
struct Each {
  const W *mean, *scale, *bias, *mean_g, *mean_gx;
  HFNN_INLINE W z(W x, int64_t i) const { return fused(x - mean[i], scale[i], bias[i]); }
  HFNN_INLINE W centred(W x, int64_t i) const { return x - mean[i]; }
  HFNN_INLINE W dx(W g, W x, int64_t i) const { return scale[i] * (g - mean_g[i]) - (x - mean[i]) * mean_gx[i]; }
};

// `rows` rows of per-channel numbers, repeated so that those of a run starting at element `first` are contiguous at
// `first % C`. longest: the maximum length of a run.
template <class W>
class Laid {
 public:
  Laid(int64_t channels, int64_t rows, int64_t longest = kRun)
      : channels_(channels), longest_(longest), data_(size_t(rows * length())) {}
  template <class F>
  HFNN_INLINE void fill(int64_t row, F f) {
    W* out = row_of(row);
    for (int64_t c = 0; c < channels_; ++c) out[c] = f(c);
    for (int64_t i = channels_; i < length(); ++i) out[i] = out[i - channels_];
  }
  HFNN_INLINE W* at(int64_t row, int64_t first) { return row_of(row) + first % channels_; }
  // Adds the copies of each channel to its first copy.
  HFNN_INLINE const W* folded(int64_t row) {
    W* out = row_of(row);
    for (int64_t from = channels_; from < length(); from += channels_) {
      const int64_t n = std::min(channels_, length() - from);
#pragma omp simd
      for (int64_t c = 0; c < n; ++c) out[c] += out[from + c];
    }
    return out;
  }
  void clear() { std::fill(data_.begin(), data_.end(), W(0)); }

 private:
  int64_t length() const { return channels_ + longest_; }
  W* row_of(int64_t row) { return data_.data() + row * length(); }
  int64_t channels_, longest_;
  std::vector<W> data_;
};
}  // namespace

// f(z). The comparisons keep a NaN.
template <int kKind, class W>
HFNN_INLINE W activated(W z, W slope) {
  if constexpr (kKind == kRelu) return z < 0 ? W(0) : z;
  if constexpr (kKind == kLeakyRelu) return z > 0 ? z : z * slope;
  if constexpr (kKind == kRelu6) return z < 0 ? W(0) : z > 6 ? W(6) : z;
  if constexpr (kKind == kSilu) return z / (1 + exp_minus(z));
  if constexpr (kKind == kHardswish) {
    const W t = z + 3;
    return z * (t < 0 ? W(0) : t > 6 ? W(6) : t) / 6;
  }
  return z;
}

// Whether the slope of a piecewise linear f at z is 1.
template <int kKind, class W>
HFNN_INLINE bool flag_of(W z) {
  if constexpr (kKind == kRelu) return !(z <= 0);
  if constexpr (kKind == kRelu6) return !((z <= 0) | (z >= 6));
  return z > 0;
}

// g * f'(z).
template <int kKind, class W>
HFNN_INLINE W descended(W z, W g, W slope) {
  if constexpr (kKind == kRelu) return z <= 0 ? W(0) : g;
  if constexpr (kKind == kLeakyRelu) return z > 0 ? g : g * slope;
  if constexpr (kKind == kRelu6) return (z <= 0) | (z >= 6) ? W(0) : g;
  if constexpr (kKind == kHardswish) return z < -3 ? W(0) : z <= 3 ? g * (z / 3 + W(0.5)) : g;
  if constexpr (kKind == kSilu) {
    const W e = exp_minus(z), s = 1 / (1 + e);
    return g * (s + z * s * (z > 0 ? e * s : 1 - s));  // 1 - s without cancellation
  }
  return g;
}

// Calls f with the kind as a std::integral_constant.
template <class F>
HFNN_INLINE void with_piecewise(int64_t kind, F f) {
  if (kind == kIdentity) return f(std::integral_constant<int, kIdentity>{});
  if (kind == kRelu) return f(std::integral_constant<int, kRelu>{});
  if (kind == kLeakyRelu) return f(std::integral_constant<int, kLeakyRelu>{});
  return f(std::integral_constant<int, kRelu6>{});
}
template <class F>
HFNN_INLINE void with_dear(int64_t kind, F f) {
  if (kind == kSilu) return f(std::integral_constant<int, kSilu>{});
  return f(std::integral_constant<int, kHardswish>{});
}

// A run of a sum z: f(z), and its flags if wanted. Separate functions, compiled once for all layouts.
template <class T>
HFNN_INLINE void store_run(int64_t kind, const Wide<T>* z, Wide<T> slope, T* y, uint8_t* bits, int64_t n) {
  uint8_t flags[kRun + 8];
  with_piecewise(kind, [&](auto kind) HFNN_FLAT {
#pragma omp simd
    for (int64_t i = 0; i < n; ++i) store(y[i], activated<kind>(z[i], slope));
    if (!bits) return;
#pragma omp simd
    for (int64_t i = 0; i < n; ++i) flags[i] = flag_of<kind>(z[i]);
  });
  if (!bits) return;
  std::memset(flags + n, 0, 8);
  pack_run<1>(flags, bits, (n + 7) / 8 * 8);
}
#define HFNN_STORE_SUM(T)                                                                                            \
  HFNN_CLONES static void store_sum(int64_t kind, const Wide<T>* z, Wide<T> slope, T* y, uint8_t* bits, int64_t n) { \
    store_run(kind, z, slope, y, bits, n);                                                                           \
  }
HFNN_STORE_SUM(float)
HFNN_STORE_SUM(bfloat16)
HFNN_STORE_SUM(double)
#undef HFNN_STORE_SUM
HFNN_CLONES static void unpack_flags(const uint8_t* bits, uint8_t* flags, int64_t n) {
  unpack_run<1>(bits, flags, (n + 7) / 8 * 8);
}

// The tensors of a call, and buffers of a run. kSum: there may be a residual and flags. `bit`: the byte where the run's
// flags start; a run has whole bytes of them.
template <class T, bool kSum>
struct Lanes {
  using W = Wide<T>;
  Runs<T> x, y, residual, dx, dresidual;
  W z[kRun];
  uint8_t flags[kRun + 8];

  explicit Lanes(const BatchNormCall& c)
      : x(c.x, kRun), y(c.y, kRun), residual(c.residual, kRun), dx(c.dx, kRun), dresidual(c.dresidual, kRun) {}

  template <class Numbers>
  HFNN_INLINE void forward(const BatchNormCall& c, Numbers at, int64_t first, int64_t n, int64_t bit) {
    const W slope = W(c.slope);
    const T* xs = x.read(first, n);
    T* ys = y.open(first);
    const auto plain = [&](auto kind) HFNN_FLAT {
#pragma omp simd
      for (int64_t i = 0; i < n; ++i) store(ys[i], activated<kind>(at.z(load(xs[i]), i), slope));
    };
    if (kSum && c.residual) {
      const T* rs = residual.read(first, n);
#pragma omp simd
      for (int64_t i = 0; i < n; ++i) z[i] = at.z(load(xs[i]), i) + load(rs[i]);
      store_sum(c.kind, z, slope, ys, c.bits ? c.bits.as<uint8_t>() + bit : nullptr, n);
    } else if (c.kind <= kPiecewise) {
      with_piecewise(c.kind, plain);
    } else {
      with_dear(c.kind, plain);
    }
    y.close(first, n);
  }

  // Calls use(g), where g(i) is dy * f'(z) of element i of the run. Writes dresidual. kDear: kinds above kPiecewise may
  // occur.
  template <bool kDear, class Numbers, class Use>
  HFNN_INLINE void with_gradient(const BatchNormCall& c, Numbers at, const T* xs, int64_t first, int64_t n, int64_t bit,
                                 Use use) {
    const W slope = W(c.slope);
    const T* dys = y.read(first, n);
    const bool flagged = kSum && c.bits;
    if (!flagged && (!kDear || c.kind <= kPiecewise))
      return with_piecewise(c.kind, [&](auto kind) HFNN_FLAT {
        use([=](int64_t i) HFNN_FLAT { return descended<kind>(at.z(load(xs[i]), i), load(dys[i]), slope); });
      });
    if (flagged) {
      unpack_flags(c.bits.as<uint8_t>() + bit, flags, n);
      const W outside = c.kind == kLeakyRelu ? slope : W(0);
#pragma omp simd
      for (int64_t i = 0; i < n; ++i) {
        const W scaled = load(dys[i]) * outside;
        z[i] = flags[i] ? load(dys[i]) : outside == 0 ? W(0) : scaled;
      }
    } else {  // an exponential alone is vectorised, inside sums it is not
      with_dear(c.kind, [&](auto kind) HFNN_FLAT {
#pragma omp simd
        for (int64_t i = 0; i < n; ++i) z[i] = descended<kind>(at.z(load(xs[i]), i), load(dys[i]), slope);
      });
    }
    const W* g = z;
    if (c.dresidual) {
      T* out = dresidual.open(first);
#pragma omp simd
      for (int64_t i = 0; i < n; ++i) store(out[i], g[i]);
      dresidual.close(first, n);
    }
    use([=](int64_t i) HFNN_FLAT { return g[i]; });
  }

  // Calls loop(g, x), functions of element i of a run. Writes dresidual.
  template <class Numbers, class Loop>
  HFNN_INLINE void sums(const BatchNormCall& c, Numbers at, int64_t first, int64_t n, int64_t bit, Loop loop) {
    const T* xs = x.read(first, n);
    with_gradient<true>(c, at, xs, first, n, bit,
                        [&](auto g) HFNN_FLAT { loop(g, [=](int64_t i) HFNN_FLAT { return load(xs[i]); }); });
  }

  // dx of a run, and dresidual (= g) unless `sums` wrote it. Without kSum, expensive kinds require that `sums` did.
  template <class Numbers>
  HFNN_INLINE void backward(const BatchNormCall& c, Numbers at, int64_t first, int64_t n, int64_t bit) {
    const T* xs = x.read(first, n);
    const auto write = [&](auto g) HFNN_FLAT {
      if (!c.dx) return;
      T* out = dx.open(first);
#pragma omp simd
      for (int64_t i = 0; i < n; ++i) store(out[i], at.dx(g(i), load(xs[i]), i));
      dx.close(first, n);
    };
    if (c.dresidual && c.sums) {
      const T* g = dresidual.read(first, n);
      write([=](int64_t i) HFNN_FLAT { return load(g[i]); });
    } else {
      with_gradient<kSum>(c, at, xs, first, n, bit, write);
    }
  }
};

// A channel's mean and rstd from its moments, and the update of the running statistics.
template <class W>
HFNN_INLINE void settle(const BatchNormCall& c, int64_t channel, const Moments& m) {
  const double var = m.squares / m.count;
  c.mean.as<W>()[channel] = W(m.mean);
  c.rstd.as<W>()[channel] = var == 0 && c.eps == 0 ? W(0) : W(1 / std::sqrt(var + c.eps));
  const auto move = [&](const Tensor& running, double value) HFNN_FLAT {
    if (!running) return;
    with_dtype(running.dtype, [&](auto stored) HFNN_FLAT {
      using R = decltype(stored);
      R& r = running.as<R>()[channel];
      store(r, static_cast<Wide<R>>((1 - c.momentum) * double(load(r)) + c.momentum * value));
    });
  };
  move(c.running_mean, m.mean);
  move(c.running_var, m.squares / std::max(m.count - 1, 1.0));
}

}  // namespace hfnn
