// Backward of the norms. norm_team.cuh describes how rows are distributed.
//
//   xhat = (x - mean) * rstd,  g = dy * weight,  dx = rstd * (g - mean_C(g) - xhat * mean_C(g * xhat))
//   dweight = sum_R(dy * xhat),  dbias = sum_R(dy)
//
// RMSNorm has no mean: xhat = x * rstd, and no mean_C(g). Every block accumulates the parameter gradients of its rows
// in registers and writes one row of partials. A second kernel sums the partials.
#pragma once
#include "norm_team.cuh"

namespace hfnn {

__device__ inline void start_dependent_kernel() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

__device__ inline void wait_for_kernel_in_front() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Adds the teams' sums for the block's slice, in the order of the teams, and writes them to a row of partials.
template <int kTeam, int N>
__device__ void norm_write_partials(const float (&sums)[kVectors][N], float4* shared, int thread, int team, int count,
                                    float* to) {
  using Params = Slice<kTeam, N>;
  constexpr int kTeams = kThreads / kTeam, kCells = Params::kUnits * Params::kPlanes;
  __syncthreads();
#pragma unroll
  for (int v = 0; v < kVectors; ++v)
#pragma unroll
    for (int p = 0; p < Params::kPlanes; ++p)
      shared[team * kCells + p * Params::kUnits + v * kTeam + thread] = {sums[v][4 * p], sums[v][4 * p + 1],
                                                                         sums[v][4 * p + 2], sums[v][4 * p + 3]};
  __syncthreads();
  for (int cell = threadIdx.x; cell < kCells; cell += kThreads) {
    const int unit = cell / Params::kPlanes, plane = cell % Params::kPlanes;
    if (unit >= count) break;
    float4 total = {};
#pragma unroll
    for (int t = 0; t < kTeams; ++t) {
      const float4 part = shared[t * kCells + plane * Params::kUnits + unit];
      total = {total.x + part.x, total.y + part.y, total.z + part.z, total.w + part.w};
    }
    reinterpret_cast<float4*>(to)[cell] = total;
  }
}

// One reduction per row, for both sums. x and dy are read twice from the ring, for the sums and for dx: keeping them in
// registers would halve the number of threads.
template <class T, int kTeam, bool kCluster, bool kCentred>
__global__ void __launch_bounds__(kThreads, kResident) norm_backward_kernel(const __grid_constant__ NormArgs args) {
  constexpr int N = kWidth<T>, kTeams = kThreads / kTeam;
  using Params = Slice<kTeam, N>;
  extern __shared__ __align__(1024) char shared[];
  char* free = shared + kScratchBytes<kCluster>;
  Team<kTeam, kCluster> team(args.cols / N, shared);
  const int rows = args.rows, step = gridDim.x / team.ranks() * kTeams, block = blockIdx.x / team.ranks();
  int row = block * kTeams + team.index();

  Ring<2> ring(free + Params::kBytes, args.stages);
  const int slice = team.first * N;
  const auto fetch = [&](int from_row) {
    const int64_t at = from_row * args.cols + slice;
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      const int unit = team.unit(v);
      if (from_row >= rows || unit >= team.count) continue;
      ring.fetch(0, v, static_cast<const T*>(args.x) + at + unit * N);
      ring.fetch(1, v, static_cast<const T*>(args.y) + at + unit * N);
    }
    ring.commit();
  };
  for (int s = 0; s < args.stages; ++s) fetch(row + s * step);
  const Params scales(free, args.weight, team.first, team.count);
  if constexpr (kCluster)
    cluster_sync();  // also ensures that no block writes to one that has not started
  else
    __syncthreads();

  // Statistics are loaded one row ahead, to hide their latency.
  const auto statistics = [&](int of_row) {
    if (of_row >= rows) return float2{0, 0};
    return float2{kCentred ? args.mean[of_row] : 0, args.rstd[of_row]};
  };
  float2 next = statistics(row);
  float dweight[kVectors][N] = {}, dbias[kVectors][N] = {};

  for (; row < rows; row += step) {
    const auto [mean, rstd] = next;
    next = statistics(row + step);
    ring.wait();
    float2 sums = {0, 0};  // of g and of g * xhat
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      const int unit = team.unit(v);
      if (unit >= team.count) continue;
      float x[N], dy[N], scale[N];
      ring.template read<N, T>(0, v, x);
      ring.template read<N, T>(1, v, dy);
      scales.read(unit, scale);
#pragma unroll
      for (int i = 0; i < N; ++i) {
        const float xhat = (kCentred ? x[i] - mean : x[i]) * rstd, g = dy[i] * scale[i];
        if constexpr (kCentred) sums.x += g;
        sums.y = fmaf(g, xhat, sums.y);
        dweight[v][i] = fmaf(dy[i], xhat, dweight[v][i]);
        if constexpr (kCentred) dbias[v][i] += dy[i];
      }
    }
    if (args.dx) {
      if constexpr (kCentred)
        sums = team.sum(sums);
      else
        sums.y = team.sum(sums.y);
      const float from_x = rstd * (sums.y * args.inverse) * rstd, from_all = rstd * (sums.x * args.inverse);
      T* dx = static_cast<T*>(args.dx) + row * args.cols + slice;
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
        const int unit = team.unit(v);
        if (unit >= team.count) continue;
        float x[N], dy[N], scale[N];
        ring.template read<N, T>(0, v, x);
        ring.template read<N, T>(1, v, dy);
        scales.read(unit, scale);
#pragma unroll
        for (int i = 0; i < N; ++i) {
          const float g = dy[i] * scale[i];
          if constexpr (kCentred)
            x[i] = fmaf(mean - x[i], from_x, fmaf(g, rstd, -from_all));
          else
            x[i] = fmaf(-x[i], from_x, g * rstd);
        }
        store<N>(dx + unit * N, x);
      }
    }
    fetch(row + args.stages * step);
  }

  start_dependent_kernel();
  if (!args.partials) return;
  // Every fetched row has been used, so the ring's memory is free.
  float4* ring_as_floats = reinterpret_cast<float4*>(free + Params::kBytes);
  float* partial = args.partials + block * args.cols + slice;
  norm_write_partials<kTeam, N>(dweight, ring_as_floats, team.thread(), team.index(), team.count, partial);
  if constexpr (kCentred)
    norm_write_partials<kTeam, N>(dbias, ring_as_floats, team.thread(), team.index(), team.count,
                                  partial + args.planes * args.cols);
}

// dx for any number of columns, alignment and device.
template <class T, int kTeam, bool kCentred>
__global__ void __launch_bounds__(kThreads) norm_backward_plain_kernel(const __grid_constant__ NormArgs args) {
  __shared__ __align__(128) char shared[kScratchBytes<false>];
  Team<kTeam, false> team(args.cols, shared);
  const int64_t step = int64_t(gridDim.x) * (kThreads / kTeam);
  for (int64_t row = int64_t(blockIdx.x) * (kThreads / kTeam) + team.index(); row < args.rows; row += step) {
    const T *x = static_cast<const T*>(args.x) + row * args.cols, *dy = static_cast<T*>(args.y) + row * args.cols;
    T* dx = static_cast<T*>(args.dx) + row * args.cols;
    const float mean = kCentred ? args.mean[row] : 0, rstd = args.rstd[row];
    float2 sums = {0, 0};
    for (int64_t c = team.thread(); c < args.cols; c += kTeam) {
      const float xhat = (to_float(x[c]) - mean) * rstd, g = to_float(dy[c]) * args.weight[c];
      sums = {sums.x + g, fmaf(g, xhat, sums.y)};
    }
    sums = team.sum(sums);
    const float mean_g = kCentred ? sums.x * args.inverse : 0, mean_gx = sums.y * args.inverse;
    for (int64_t c = team.thread(); c < args.cols; c += kTeam) {
      const float xhat = (to_float(x[c]) - mean) * rstd, g = to_float(dy[c]) * args.weight[c];
      store1(dx + c, rstd * (g - mean_g - xhat * mean_gx));
    }
  }
}

// The matching partials: a thread per column; blocks along y take interleaved rows.
template <class T, bool kCentred>
__global__ void __launch_bounds__(kThreads) norm_partials_plain_kernel(const __grid_constant__ NormArgs args) {
  const int64_t column = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  if (column >= args.cols) return;
  const T *x = static_cast<const T*>(args.x) + column, *dy = static_cast<const T*>(args.y) + column;
  float dweight = 0, dbias = 0;
#pragma unroll 4
  for (int64_t row = blockIdx.y; row < args.rows; row += gridDim.y) {
    const float at = to_float(x[row * args.cols]), d = to_float(dy[row * args.cols]);
    dweight = fmaf(d, (kCentred ? at - args.mean[row] : at) * args.rstd[row], dweight);
    dbias += d;
  }
  args.partials[blockIdx.y * args.cols + column] = dweight;
  if (kCentred) args.partials[(args.planes + blockIdx.y) * args.cols + column] = dbias;
}

struct PartialsArgs {
  const float* partials;
  void* to[2];  // dweight, dbias; null if absent
  Dtype dtype;
  int64_t used, planes, cols;  // rows written, rows of a plane, columns
};

// dweight and dbias in their dtype. 32 columns per block, 16 threads per column, fixed order.
constexpr int kSumRows = 16;
static __global__ void __launch_bounds__(32 * kSumRows)
    norm_sum_partials_kernel(const __grid_constant__ PartialsArgs args) {
  __shared__ float sums[kSumRows][32];
  wait_for_kernel_in_front();
  void* to = args.to[blockIdx.y];
  const int64_t column = int64_t(blockIdx.x) * 32 + threadIdx.x;
  const float* from = args.partials + blockIdx.y * args.planes * args.cols + column;
  float sum = 0;
  if (to && column < args.cols) {
#pragma unroll 4
    for (int64_t p = threadIdx.y; p < args.used; p += kSumRows) sum += from[p * args.cols];
  }
  sums[threadIdx.y][threadIdx.x] = sum;
  __syncthreads();
  if (!to || column >= args.cols || threadIdx.y > 0) return;
#pragma unroll
  for (int y = 1; y < kSumRows; ++y) sum += sums[y][threadIdx.x];
  if (args.dtype == Dtype::float32)
    store1(static_cast<float*>(to) + column, sum);
  else if (args.dtype == Dtype::bfloat16)
    store1(static_cast<__nv_bfloat16*>(to) + column, sum);
  else
    store1(static_cast<__half*>(to) + column, sum);
}

}  // namespace hfnn
