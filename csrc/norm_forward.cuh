// Forward and rebuild of the norms; norm_team.cuh says how rows are shared out.
#pragma once
#include "norm_team.cuh"

namespace hfnn {

// A row stays in the registers from its mean to its output.
template <class T, int kTeam, bool kCluster, bool kCentred>
__global__ void __launch_bounds__(kThreads, kResident) norm_forward_kernel(const __grid_constant__ NormArgs args) {
  constexpr int N = kWidth<T>, kTeams = kThreads / kTeam;
  using Params = Slice<kTeam, N>;
  extern __shared__ __align__(1024) char shared[];
  char* free = shared + kScratchBytes<kCluster>;
  Team<kTeam, kCluster> team(args.cols / N, N, shared);
  const int rows = args.rows, step = gridDim.x / team.ranks() * kTeams;
  int row = blockIdx.x / team.ranks() * kTeams + team.index();

  Ring<1> ring(free + (kCentred ? 2 : 1) * Params::kBytes, args.stages);
  const auto fetch = [&](int from_row) {
    const T* x = static_cast<const T*>(args.x) + from_row * args.cols + team.first * N;
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      const int unit = team.unit(v);
      if (from_row < rows && unit < team.count) ring.fetch(0, v, x + unit * N);
    }
    ring.commit();
  };
  for (int s = 0; s < args.stages; ++s) fetch(row + s * step);
  const Params scales(free, args.weight, team.first, team.count);
  const Params shifts = kCentred ? Params(free + Params::kBytes, args.bias, team.first, team.count) : scales;
  if constexpr (kCluster)
    cluster_sync();  // also: nobody writes into a block that has not started
  else
    __syncthreads();

  for (; row < rows; row += step) {
    ring.wait();
    float x[kVectors][N] = {}, sum = 0;
#pragma unroll
    for (int v = 0; v < kVectors; ++v)
      if (team.unit(v) < team.count) ring.template read<N, T>(0, v, x[v]);
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
#pragma unroll
      for (int i = 0; i < N; ++i) sum += kCentred ? x[v][i] : x[v][i] * x[v][i];
    }
    fetch(row + args.stages * step);

    float mean = 0, squares;
    if constexpr (kCentred) {
      const float2 moments = team.moments(sum, args.inverse, [&](float m) {
        float about = 0;
#pragma unroll
        for (int v = 0; v < kVectors; ++v) {
          float vector = 0;
#pragma unroll
          for (int i = 0; i < N; ++i) vector = fmaf(x[v][i] - m, x[v][i] - m, vector);
          about += team.unit(v) < team.count ? vector : 0;
        }
        return about;
      });
      mean = moments.x;
      squares = moments.y;
    } else {
      squares = team.sum(sum);
    }
    const float rstd = norm_rstd(squares, args.inverse, args.eps);
    if (team.leads()) {
      if (kCentred && args.mean) args.mean[row] = mean;
      if (args.rstd) args.rstd[row] = rstd;
    }

    T* y = static_cast<T*>(args.y) + row * args.cols + team.first * N;
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      const int unit = team.unit(v);
      if (unit >= team.count) continue;
      float scale[N], shift[N] = {};
      scales.read(unit, scale);
      if constexpr (kCentred) shifts.read(unit, shift);
#pragma unroll
      for (int i = 0; i < N; ++i) x[v][i] = norm_output<kCentred>(x[v][i], mean, rstd, scale[i], shift[i]);
      store<N>(y + unit * N, x[v]);
    }
  }
}

// Any number of columns, any alignment, any device; the row is read from memory or the L2 cache in every pass.
template <class T, int kTeam, bool kCentred>
__global__ void __launch_bounds__(kThreads) norm_forward_plain_kernel(const __grid_constant__ NormArgs args) {
  __shared__ __align__(128) char shared[kScratchBytes<false>];
  Team<kTeam, false> team(args.cols, 1, shared);
  const int64_t step = int64_t(gridDim.x) * (kThreads / kTeam);
  for (int64_t row = int64_t(blockIdx.x) * (kThreads / kTeam) + team.index(); row < args.rows; row += step) {
    const T* x = static_cast<const T*>(args.x) + row * args.cols;
    T* y = static_cast<T*>(args.y) + row * args.cols;
    const auto over_row = [&](auto&& f) {
      for (int64_t c = team.thread(); c < args.cols; c += kTeam) f(c, to_float(x[c]));
    };
    float mean = 0, squares = 0;
    if constexpr (kCentred) {
      float sum = 0;
      over_row([&](int64_t, float at) { sum += at; });
      const float2 moments = team.moments(sum, args.inverse, [&](float m) {
        float about = 0;
        over_row([&](int64_t, float at) { about = fmaf(at - m, at - m, about); });
        return about;
      });
      mean = moments.x;
      squares = moments.y;
    } else {
      over_row([&](int64_t, float at) { squares = fmaf(at, at, squares); });
      squares = team.sum(squares);
    }
    const float rstd = norm_rstd(squares, args.inverse, args.eps);
    if (team.leads()) {
      if (kCentred && args.mean) args.mean[row] = mean;
      if (args.rstd) args.rstd[row] = rstd;
    }
    over_row([&](int64_t c, float at) {
      store1(y + c, norm_output<kCentred>(at, mean, rstd, args.weight[c], args.bias[c]));
    });
  }
}

// A thread keeps the parameters of N columns and goes down the rows, kRows of them in flight.
template <class X, class Y, int N, bool kCentred>
__global__ void __launch_bounds__(kThreads) norm_rebuild_kernel(const __grid_constant__ NormArgs args) {
  constexpr int kRows = 4;
  const int64_t column = (int64_t(blockIdx.x) * blockDim.x + threadIdx.x) * N;
  if (column >= args.cols) return;
  float scale[N], shift[N];
#pragma unroll
  for (int i = 0; i < N; ++i) {
    scale[i] = args.weight[column + i];
    shift[i] = kCentred ? args.bias[column + i] : 0;
  }
  const int64_t step = int64_t(gridDim.y) * blockDim.y;
  for (int64_t row = int64_t(blockIdx.y) * blockDim.y + threadIdx.y; row < args.rows; row += kRows * step) {
    Vec<X, N> x[kRows];
    float mean[kRows], rstd[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const int64_t at = row + r * step < args.rows ? row + r * step : row;
      x[r] = *reinterpret_cast<const Vec<X, N>*>(static_cast<const X*>(args.x) + at * args.cols + column);
      mean[r] = kCentred ? args.mean[at] : 0;
      rstd[r] = args.rstd[at];
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      if (row + r * step >= args.rows) break;
      float y[N];
      load<N>(x[r].at, y);
#pragma unroll
      for (int i = 0; i < N; ++i) y[i] = norm_output<kCentred>(y[i], mean[r], rstd[r], scale[i], shift[i]);
      store<N>(static_cast<Y*>(args.y) + (row + r * step) * args.cols + column, y);
    }
  }
}

}  // namespace hfnn
