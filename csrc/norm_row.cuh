// Shared by all row kernels of layer_norm.cu and rms_norm.cu: a call, its parameters, the value of an output.
#pragma once
#include "cuda.cuh"

namespace hfnn {

template <int kLanes>
__device__ inline float lanes_sum(float v) {
#pragma unroll
  for (int step = kLanes / 2; step > 0; step /= 2) v += __shfl_xor_sync(~0u, v, step);
  return v;
}

// A weight or bias of any floating dtype, possibly absent.
struct Parameter {
  const void* data;
  Dtype dtype;
  float offset, absent;  // added to each element; stands for each element if there is no data

  // N elements of dtype W from a column on: whole vectors at aligned addresses. Without the offset.
  template <class W, int N>
  __device__ Vec<W, N> fetch(int64_t column) const {
    if (data) return load_constant<N>(static_cast<const W*>(data) + column);
    Vec<W, N> vec;
#pragma unroll
    for (int i = 0; i < N; ++i) store1(vec.at + i, absent);
    return vec;
  }
  // The same in float32, with the offset; the second version takes any dtype.
  template <class W, int N>
  __device__ void read(int64_t column, float (&to)[N]) const {
    const auto vec = fetch<W, N>(column);
#pragma unroll
    for (int i = 0; i < N; ++i) to[i] = to_float(vec.at[i]) + offset;
  }
  template <int N>
  __device__ void read(int64_t column, float (&to)[N]) const {
    if (dtype == Dtype::float32)
      read<float>(column, to);
    else if (dtype == Dtype::bfloat16)
      read<__nv_bfloat16>(column, to);
    else
      read<__half>(column, to);
  }
  __device__ float operator[](int64_t column) const {
    float value[1];
    read(column, value);
    return value[0];
  }
};

// Used by forward and rebuild. Intrinsics keep the bits equal, however the compiler contracts.
template <bool kCentred>
__device__ inline float norm_output(float x, float mean, float rstd, float scale, float shift) {
  if constexpr (!kCentred) return __fmul_rn(__fmul_rn(x, rstd), scale);
  return __fmaf_rn(__fmul_rn(__fsub_rn(x, mean), rstd), scale, shift);
}

__device__ inline float norm_rstd(float squares, float inverse, float eps) {
  return rsqrtf(fmaf(squares, inverse, eps));
}

// A call; each kernel uses part of it. y is dy in backward.
struct NormArgs {
  const void* x;
  void *y, *dx;
  float *mean, *rstd, *partials;
  Parameter weight, bias;
  int64_t rows, cols;
  int64_t planes;      // rows of a plane of partials
  float inverse, eps;  // 1 / cols
  int stages;          // of backward's ring
};

}  // namespace hfnn
