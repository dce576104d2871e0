// Shared by the kernels of cross_entropy.cu: a call, the logit of an element, the totals of a row and what follows from
// them, the gradient of an element.
//
// kSmooth and kCap remove the code for label smoothing and the soft cap if a call has none. Kernels with that code
// still check the call: those for single elements are compiled with both or neither.
#pragma once
#include <cstdio>

#include "softmax_row.cuh"

namespace hfnn {

struct CrossEntropyArgs {
  const void* x;
  void* dx;
  const int64_t* target;
  Parameter weight;  // per class; all 1 if absent
  float *loss, *share, *slope;
  double* lse;
  const float* factor;
  int64_t rows, cols, ignore, factor_step;  // factor_step: 1, or 0 for one factor for all rows
  float keep, smooth, z_loss;               // 1 - smoothing, smoothing / cols
  float scale, cap, inner;                  // cap: 0 for none; inner = scale / cap
  int chunks;                               // per row, in backward
};

static __device__ __noinline__ void refuse_class(int64_t row, int64_t target, int64_t classes) {
  printf("cross_entropy: target %lld of row %lld is out of bounds: there are %lld classes\n",
         static_cast<long long>(target), static_cast<long long>(row), static_cast<long long>(classes));
  __trap();
}

// Whether a row counts. A class out of bounds stops the kernel before it is used as an index.
__device__ inline bool row_counts(const CrossEntropyArgs& args, int64_t row, int64_t target) {
  if (target == args.ignore) return false;
  if (target >= 0 && target < args.cols) return true;
  if (threadIdx.x == 0) refuse_class(row, target, args.cols);
  return false;
}

// z = s x, or cap tanh(s x / cap).
template <bool kCap>
struct Logit {
  float scale, cap, inner;
  unsigned negate;  // for largest(): with a negative scale, the smallest x gives the largest z

  __device__ explicit Logit(const CrossEntropyArgs& args)
      : scale(args.scale), cap(args.cap), inner(args.inner), negate(args.scale < 0 ? 0x80008000u : 0) {}
  __device__ bool capped() const { return kCap && cap != 0; }
  // z - about, rounded once.
  __device__ float minus(float x, float about) const {
    return capped() ? fmaf(cap, tanhf(x * inner), -about) : fmaf(x, scale, -about);
  }
  // The same. Also returns dz/dx divided by s.
  __device__ float minus(float x, float about, float& slope) const {
    if (!capped()) return slope = 1, fmaf(x, scale, -about);
    const float t = tanhf(x * inner);
    slope = fmaf(-t, t, 1.0f);
    return fmaf(cap, t, -about);
  }
  // The largest z, from the result of largest().
  __device__ float of_largest(float top) const {
    return capped() ? cap * tanhf(top * fabsf(inner)) : top * fabsf(scale);
  }
};

// N class weights from a column on.
template <int N>
__device__ inline void class_weights(const Parameter& weight, int64_t column, float (&w)[N]) {
  if (!weight.data) {
#pragma unroll
    for (int i = 0; i < N; ++i) w[i] = 1;
  } else if (N > 1 && weight.dtype == Dtype::float32) {
    to_float(load_constant<N>(static_cast<const float*>(weight.data) + column), w);
  } else {
#pragma unroll
    for (int i = 0; i < N; ++i) w[i] = weight[column + i];
  }
}

// For some elements of a row: the peak of z and, with smoothing, sum(w (z - origin)) and sum(w). The origin is the
// target's logit, so the sum and lse do not cancel.
template <bool kFast, bool kSmooth>
struct RowTotals {
  Peak<kFast> peak;
  Sums smooth;

  __device__ void unite(const RowTotals& other) {
    peak.unite(other.peak);
    if constexpr (kSmooth) smooth.unite(other.smooth);
  }
  __device__ RowTotals over_lanes() const {
    if constexpr (kSmooth) return {peak.over_lanes(), smooth.over_lanes()};
    return {peak.over_lanes(), {}};
  }

  // Vectors `first`, `first` + step, .. of the row below `end`.
  template <class T, int N, int kUnits, bool kCap>
  __device__ void add(const CrossEntropyArgs& args, const Logit<kCap>& logit, const Vec<T, N> (&held)[kUnits],
                      int first, int step, int end, float origin) {
    float top = -INFINITY;
#pragma unroll
    for (int u = 0; u < kUnits; ++u)
      if (first + u * step < end) top = fmaxf(top, largest(held[u], logit.negate));
    peak.raise(logit.of_largest(top));
    const float about = peak.about();
#pragma unroll
    for (int u = 0; u < kUnits; ++u) {
      const int unit = first + u * step;
      if (unit >= end) continue;
      float at[N], sum = 0;
      to_float(held[u], at);
      if constexpr (kSmooth) {
        float w[N];
        Sums some;
        class_weights(args.weight, int64_t(unit) * N, w);
#pragma unroll
        for (int i = 0; i < N; ++i) {
          some.first = fmaf(w[i], logit.minus(at[i], origin), some.first);
          some.second += w[i];
        }
        smooth.unite(some);
      }
#pragma unroll
      for (int i = 0; i < N; ++i) sum += softmax_exp<kFast>(logit.minus(at[i], about));
      peak.sum += sum;
    }
  }
};

// Forward's results for a row. loss = slope * nll - smooth * sum(w (z - z_t)) + z_loss * lse^2, where nll = lse - z_t.
struct RowResult {
  float loss, share, lse, slope, max, sum;

  template <bool kFast, bool kSmooth, bool kCap>
  __device__ RowResult(const CrossEntropyArgs& args, const Logit<kCap>& logit, const RowTotals<kFast, kSmooth>& totals,
                       float x_target, float weight)
      : share(weight), slope(weight), max(totals.peak.max), sum(totals.peak.sum) {
    const float log_sum = logf(totals.peak.sum);
    lse = totals.peak.max + log_sum;
    const float nll = log_sum - logit.minus(x_target, totals.peak.max);
    if (kSmooth && args.smooth != 0) {
      if (args.weight.data) slope = fmaf(args.smooth, totals.smooth.second, args.keep * weight);
      loss = fmaf(-args.smooth, totals.smooth.first, slope * nll);
    } else {
      loss = weight * nll;
    }
    if (args.z_loss != 0) loss = fmaf(args.z_loss * lse, lse, loss);
  }
  __device__ RowResult() : loss(0), share(0), lse(0), slope(0), max(0), sum(1) {}

  __device__ void write(const CrossEntropyArgs& args, int64_t row) const {
    args.loss[row] = loss;
    if (args.share) args.share[row] = share;
    if (args.lse) args.lse[row] = double(max) + log(double(sum));
    if (args.slope) args.slope[row] = slope;
  }
};

// The gradient of a row: (peak exp(z - about) - smooth w_c - hit [c = target]) dz/dx, without the factor s of dz/dx.
template <bool kFast, bool kSmooth, bool kCap>
struct RowGradient {
  float about, peak, hit, smooth;
  int target;

  // `sum`: that of exp(z - about) over the row.
  __device__ RowGradient(const CrossEntropyArgs& args, int64_t row, int64_t target, float weight, float slope,
                         float lse, float about, float sum)
      : about(about), target(target) {
    const float factor = args.factor[row * args.factor_step] * args.scale;
    peak = factor * fmaf(2 * args.z_loss, lse, slope) / sum;
    hit = factor * args.keep * weight;
    smooth = factor * args.smooth;
  }

  template <int N>
  __device__ void apply(const CrossEntropyArgs& args, const Logit<kCap>& logit, int64_t column, float (&at)[N]) const {
    float w[N];
    if constexpr (kSmooth)
      if (smooth != 0) class_weights(args.weight, column, w);
    const int here = target - int(column);
#pragma unroll
    for (int i = 0; i < N; ++i) {
      float slope;
      const float z = logit.minus(at[i], about, slope);
      at[i] = peak * softmax_exp<kFast>(z);
      if (kSmooth && smooth != 0) at[i] = fmaf(-smooth, w[i], at[i]);
      if constexpr (kCap) at[i] = (here == i ? at[i] - hit : at[i]) * slope;
    }
    // Only one vector of the row contains the target. The others cost one comparison.
    if constexpr (!kCap)
      if (unsigned(here) < unsigned(N))
#pragma unroll
        for (int i = 0; i < N; ++i)
          if (here == i) at[i] -= hit;
  }
};

}  // namespace hfnn
