// Shared by softmax.cu and cross_entropy.cu: the largest element of a row, the sum of its exponentials, and how the
// threads of a row combine such totals.
//
// The totals of a row are merged from those of its parts, each relative to its own maximum: one pass, one barrier. The
// order of merges depends only on the shape.
#pragma once
#include "norm_team.cuh"

namespace hfnn {

// Threads per block of a row, by the number of 16-byte vectors that a thread holds at a time, and threads per
// multiprocessor for the register limit. Values as measured for the norms.
constexpr int softmax_residents(int held) { return held <= 2 ? 2048 : held <= 4 ? 1536 : 1024; }
constexpr int softmax_threads(int held) { return held <= 2 ? 1024 : 512; }

// exp(x) for x <= 0. The fast one has a relative error of |x| 6e-8, which no 16-bit result shows. The maximum must
// already be subtracted: otherwise the error grows with the logits.
template <bool kFast>
__device__ inline float softmax_exp(float x) {
  if constexpr (!kFast) return expf(x);
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x * 1.4426950408889634f));
  return y;
}

template <int kLanes>
__device__ inline float lanes_max(float v) {
#pragma unroll
  for (int step = kLanes / 2; step > 0; step /= 2) v = fmaxf(v, __shfl_xor_sync(~0u, v, step));
  return v;
}

__device__ inline __nv_bfloat162 pair_max(__nv_bfloat162 a, __nv_bfloat162 b) { return __hmax2(a, b); }
__device__ inline __half2 pair_max(__half2 a, __half2 b) { return __hmax2(a, b); }

// The largest of N elements, or of their negatives if `negate` is 0x80008000 instead of 0. NaNs are ignored: the sum of
// exponentials shows them.
template <int N>
__device__ inline float largest(const Vec<float, N>& vec, unsigned negate) {
  float top = -INFINITY;
#pragma unroll
  for (int i = 0; i < N; ++i) top = fmaxf(top, __uint_as_float(__float_as_uint(vec.at[i]) ^ (negate & 0x80000000u)));
  return top;
}
template <class T, int N>
__device__ inline float largest(const Vec<T, N>& vec, unsigned negate) {
  if constexpr (N == 1) {
    return __uint_as_float(__float_as_uint(to_float(vec.at[0])) ^ (negate & 0x80000000u));
  } else {
    using Pair = std::conditional_t<std::is_same_v<T, __half>, __half2, __nv_bfloat162>;
    Pair top;
#pragma unroll
    for (int i = 0; i < N; i += 2) {
      const unsigned bits = *reinterpret_cast<const unsigned*>(vec.at + i) ^ negate;
      const Pair pair = *reinterpret_cast<const Pair*>(&bits);
      top = i == 0 ? pair : pair_max(top, pair);
    }
    return fmaxf(to_float(top.x), to_float(top.y));
  }
}

// For some elements of a row: the largest, and the sum of exp(x - largest).
template <bool kFast>
struct Peak {
  float max = -INFINITY, sum = 0;

  // What to subtract: 0 while all elements are -inf, because -inf - -inf would be NaN.
  __device__ static float about(float max) { return max == -INFINITY ? 0 : max; }
  __device__ float about() const { return about(max); }
  __device__ float sum_about(float about) const { return sum * softmax_exp<kFast>(max - about); }

  // Raises the maximum to include `top`. The caller then adds exp(x - about()) for the new elements.
  __device__ void raise(float top) {
    top = fmaxf(max, top);
    sum = sum_about(about(top));
    max = top;
  }
  __device__ void unite(const Peak& other) {
    const float top = fmaxf(max, other.max);
    sum = sum_about(about(top)) + other.sum_about(about(top));
    max = top;
  }
  __device__ Peak over_lanes() const {
    const float top = lanes_max<32>(max);
    return {top, lanes_sum<32>(sum_about(about(top)))};
  }
};

// Two plain sums.
struct Sums {
  float first = 0, second = 0;
  __device__ void unite(const Sums& other) { first += other.first, second += other.second; }
  __device__ Sums over_lanes() const { return {lanes_sum<32>(first), lanes_sum<32>(second)}; }
};

// Writes to the same address in another block of the cluster.
__device__ inline void write_to_block(float2* at, unsigned rank, float2 v) {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "{\n.reg .b32 there;\nmapa.shared::cluster.u32 there, %0, %1;\n"
      "st.shared::cluster.v2.f32 [there], {%2, %3};\n}" ::"r"(static_cast<unsigned>(__cvta_generic_to_shared(at))),
      "r"(rank), "f"(v.x), "f"(v.y)
      : "memory");
#endif
}

constexpr int kMaxWarps = 32;

// Merges the totals V of all threads of a row. All get the same bits. Also a barrier for them. A row is processed by
// one warp, by the block, or with kCluster by the cluster, which may be one block; all its blocks must have started.
// `scratch` has room for one V per warp of the row, and is used once.
template <bool kCluster, class V>
__device__ V over_row(const V& mine, float2* scratch) {
  constexpr int kWords = sizeof(V) / sizeof(float2);
  using Blocks = Team<32, kCluster>;
  V own = mine.over_lanes();
  const int warps = blockDim.x / 32, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int ranks = Blocks::ranks(), all_warps = warps * ranks;
  if (all_warps == 1) {
    __syncwarp();
    return own;
  }

  float2 words[kWords];
  memcpy(words, &own, sizeof(V));
  float2* const slot = scratch + (Blocks::rank() * warps + warp) * kWords;
  if (kCluster && ranks > 1) {
#pragma unroll
    for (int w = 0; w < kWords; ++w)
      if (lane < ranks) write_to_block(slot + w, lane, words[w]);
    __syncwarp();
    cluster_sync();
  } else {
#pragma unroll
    for (int w = 0; w < kWords; ++w)
      if (lane == 0) slot[w] = words[w];
    __syncthreads();
  }
  V all;
  for (int at = lane; at < all_warps; at += 32) {
    V other;
#pragma unroll
    for (int w = 0; w < kWords; ++w) words[w] = scratch[at * kWords + w];
    memcpy(&other, words, sizeof(V));
    all.unite(other);
  }
  return all.over_lanes();
}

// Blocks of a kernel: threads per row, rows. Rows that fit in one warp share a block.
inline dim3 softmax_block(int64_t vectors, int units, int threads) {
  const unsigned warps = std::min<int64_t>(ceil_div(vectors, units * 32), threads / 32);
  return dim3(32 * warps, warps == 1 ? 8 : 1);
}

inline void expect_shape(const char* what, const Tensor& t, std::initializer_list<int64_t> shape, const Tensor& x) {
  bool same = t && t.device == x.device && t.dims == int(shape.size()) && t.contiguous();
  for (int i = 0; same && i < t.dims; ++i) same = t.shape[i] == shape.begin()[i];
  if (!same) throw std::invalid_argument(std::string(what) + " does not have the shape, layout or device x asks for");
}

inline void expect_dtype(const char* what, const Tensor& t, Dtype dtype) {
  if (t.dtype == dtype) return;
  throw std::invalid_argument(std::string(what) + " is " + name(t.dtype) + ", the CUDA kernels need " + name(dtype));
}

// Columns are counted in 32 bits, a few steps ahead.
inline void expect_rows(const char* what, const Tensor& x) {
  if (x.device >= 0 && x.dims == 2 && x.shape[1] < 1 << 30 && x.contiguous()) return;
  throw std::invalid_argument(std::string(what) +
                              " must be contiguous, on a CUDA device, of 2 dimensions and fewer than 2**30 columns");
}

}  // namespace hfnn
