// Forward and rebuild of the norms.
//
// Many short blocks: one row each, or one row per warp for short rows. The device schedules rows in memory order and
// balances the tail by itself. Enough blocks are resident that some load while others reduce and store. Persistent
// blocks with rings of rows were tried: they lost a tenth of the bandwidth.
//
// Units: a vector is N elements of a row, 16 bytes if rows allow it, else one element. A thread takes kUnits vectors at
// a time, blockDim.x apart, and loads all of them before it uses the first.
#pragma once
#include "norm_row.cuh"

namespace hfnn {

// Vectors per thread, as measured on an H200. LayerNorm's second pass prefers more per thread, RMSNorm more threads.
// The second constant is for the widest rows that fit in registers.
template <bool kCentred>
constexpr int kRowUnits = kCentred ? 4 : 2;
constexpr int kWideRowUnits = 8;

template <class W, class T>
constexpr bool kWider = std::is_void_v<W>;
template <>
constexpr bool kWider<float, __nv_bfloat16> = true;
template <>
constexpr bool kWider<float, __half> = true;

// Threads per multiprocessor, for the register limit, and the maximum number of threads per row. `wide`: weight and
// bias have a wider dtype than x.
constexpr int row_residents(int units, bool wide) {
  const int need = units * (wide ? 2 : 1);
  return need <= 2 ? 2048 : need <= 4 ? 1536 : 1024;
}
constexpr int row_threads(int units, bool wide) { return row_residents(units, wide) == 2048 ? 1024 : 512; }

// For some elements of a row: count, sum, and the sum of squared differences from their mean (from 0 for RMSNorm). Two
// passes over a few elements, then merging by the formula of Chan, Golub and LeVeque: as accurate as two passes over
// the row, with one barrier.
template <bool kCentred>
struct Moments {
  int count = 0;
  float sum = 0, squares = 0;

  __device__ float mean() const { return __fdividef(sum, fmaxf(float(count), 1)); }

  template <int N>
  __device__ void add(const float (&x)[N]) {
    count += N;
#pragma unroll
    for (int i = 0; i < N; ++i) kCentred ? sum += x[i] : squares = fmaf(x[i], x[i], squares);
  }
  // The second pass.
  template <int N>
  __device__ void add_squares(const float (&x)[N], float about) {
#pragma unroll
    for (int i = 0; i < N; ++i) squares = fmaf(x[i] - about, x[i] - about, squares);
  }

  __device__ void unite(const Moments& other) {
    const float apart = mean() - other.mean(), both = float(count) * float(other.count);
    squares += other.squares;
    if constexpr (!kCentred) return;
    squares = fmaf(apart * apart, __fdividef(both, fmaxf(float(count + other.count), 1)), squares);
    count += other.count;
    sum += other.sum;
  }
  __device__ Moments over_lanes() const {
    if constexpr (!kCentred) return {0, 0, lanes_sum<32>(squares)};
    Moments all = {__reduce_add_sync(~0u, count), lanes_sum<32>(sum), 0};
    const float apart = mean() - all.mean();
    all.squares = lanes_sum<32>(fmaf(float(count) * apart, apart, squares));
    return all;
  }
  // For the whole row, with the same bits in every thread. A block has several rows only if each has one warp.
  __device__ Moments over_team() const {
    const Moments own = over_lanes();
    const int warps = blockDim.x / 32, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (warps == 1) return own;
    __shared__ Moments all[1024 / 32];
    if (lane == 0) all[warp] = own;
    __syncthreads();
    return (lane < warps ? all[lane] : Moments{}).over_lanes();
  }
};

// kLoop: rows of any length, read once for the moments and again, from the L2 cache, for the output. Otherwise a row
// stays in registers and has at most blockDim.x * kUnits vectors. W: the dtype of weight and bias, or void for any.
template <class T, class W, int N, int kUnits, bool kLoop, bool kCentred>
__global__ void __launch_bounds__(row_threads(kUnits, kWider<W, T>),
                                  row_residents(kUnits, kWider<W, T>) / row_threads(kUnits, kWider<W, T>))
    norm_forward_kernel(const __grid_constant__ NormArgs args) {
  constexpr bool kTyped = !std::is_void_v<W>;
  const int64_t row = int64_t(blockIdx.x) * blockDim.y + threadIdx.y;
  if (row >= args.rows) return;
  const int team = blockDim.x, vectors = args.cols / N, thread = threadIdx.x;
  const T* x = static_cast<const T*>(args.x) + row * args.cols;
  T* y = static_cast<T*>(args.y) + row * args.cols;

  Vec<T, N> held[kUnits];
  const auto fetch = [&](int first) {
#pragma unroll
    for (int u = 0; u < kUnits; ++u) {
      const int unit = first + u * team;
      if (unit < vectors) held[u] = load_constant<N>(x + int64_t(unit) * N);
    }
  };
  // f(unit, elements) for each vector that the thread holds.
  const auto over_held = [&](int first, auto&& f) {
#pragma unroll
    for (int u = 0; u < kUnits; ++u) {
      const int unit = first + u * team;
      if (unit >= vectors) continue;
      float at[N];
      to_float(held[u], at);
      f(unit, at);
    }
  };
  const auto moments_of_held = [&](int first) {
    Moments<kCentred> some;
    over_held(first, [&](int, float (&at)[N]) { some.add(at); });
    if constexpr (kCentred) {
      const float about = some.mean();
      over_held(first, [&](int, float (&at)[N]) { some.add_squares(at, about); });
    }
    return some;
  };

  Moments<kCentred> moments;
  if constexpr (kLoop) {
    for (int first = thread; first < vectors; first += kUnits * team) {
      fetch(first);
      moments.unite(moments_of_held(first));
    }
  } else {
    fetch(thread);
    moments = moments_of_held(thread);
  }
  moments = moments.over_team();
  const float mean = kCentred ? moments.sum * args.inverse : 0;
  const float rstd = norm_rstd(moments.squares, args.inverse, args.eps);
  if (thread == 0) {
    if (kCentred && args.mean) args.mean[row] = mean;
    if (args.rstd) args.rstd[row] = rstd;
  }

  for (int first = thread; first < vectors; first += kUnits * team) {
    if constexpr (kLoop) fetch(first);
    over_held(first, [&](int unit, float (&at)[N]) {
      float scale[N], shift[N] = {};
      if constexpr (kTyped) {
        to_float(args.weight.fetch<W, N>(int64_t(unit) * N), scale);
        if constexpr (kCentred) to_float(args.bias.fetch<W, N>(int64_t(unit) * N), shift);
#pragma unroll
        for (int i = 0; i < N; ++i) scale[i] += kCentred ? -0.0f : args.weight.offset;
      } else {
        args.weight.read(int64_t(unit) * N, scale);
        if constexpr (kCentred) args.bias.read(int64_t(unit) * N, shift);
      }
#pragma unroll
      for (int i = 0; i < N; ++i) at[i] = norm_output<kCentred>(at[i], mean, rstd, scale[i], shift[i]);
      store<N>(y + int64_t(unit) * N, at);
    });
    if constexpr (!kLoop) break;
  }
}

// The blocks of forward without its reduction.
constexpr int kRebuildThreads = 256;
template <class X, class Y, int N, bool kCentred>
__global__ void __launch_bounds__(kRebuildThreads, 6) norm_rebuild_kernel(const __grid_constant__ NormArgs args) {
  const int64_t row = int64_t(blockIdx.x) * blockDim.y + threadIdx.y;
  if (row >= args.rows) return;
  const int team = blockDim.x, vectors = args.cols / N;
  const X* x = static_cast<const X*>(args.x) + row * args.cols;
  Y* y = static_cast<Y*>(args.y) + row * args.cols;
  const float mean = kCentred ? args.mean[row] : 0, rstd = args.rstd[row];
  for (int unit = threadIdx.x; unit < vectors; unit += team) {
    const int64_t column = int64_t(unit) * N;
    float at[N], scale[N], shift[N] = {};
    to_float(load_constant<N>(x + column), at);
    args.weight.read(column, scale);
    if constexpr (kCentred) args.bias.read(column, shift);
#pragma unroll
    for (int i = 0; i < N; ++i) at[i] = norm_output<kCentred>(at[i], mean, rstd, scale[i], shift[i]);
    store<N>(y + column, at);
  }
}

}  // namespace hfnn
