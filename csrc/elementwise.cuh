// y = f(x) or f(a, b) over contiguous tensors of one size, for gelu.cu and dropout.cu. The dtypes may differ.
//
// A thread takes kUnroll groups of 16 bytes of the narrowest dtype, and loads all of them before it uses the first.
// Many short blocks: the device schedules them in memory order and balances the tail.
#pragma once
#include "cuda.cuh"

namespace hfnn {

constexpr int kMapThreads = 128;

template <class F>
struct MapArgs {
  const void *a, *b;  // b is null for a function of one tensor
  void* y;
  int64_t numel;
  bool vectors;  // all pointers are aligned to 16 bytes
  F f;
};

// The dtypes of a, b and y. A group has as many elements as 16 bytes hold of the narrowest dtype.
template <class A_, class B_ = A_, class Y_ = A_>
struct Types {
  using A = A_;
  using B = B_;
  using Y = Y_;
  static constexpr int kGroup = std::max({kWidth<A>, kWidth<B>, kWidth<Y>});
};

// f(a, b, group) overwrites a. f.begin() runs first, once per thread.
template <class T, bool kTwo, int kUnroll, class F>
__global__ void __launch_bounds__(kMapThreads) map_kernel(const __grid_constant__ MapArgs<F> args) {
  using A = typename T::A;
  using B = typename T::B;
  using Y = typename T::Y;
  constexpr int N = T::kGroup;
  const A* from_a = static_cast<const A*>(args.a);
  const B* from_b = static_cast<const B*>(args.b);
  Y* to = static_cast<Y*>(args.y);
  F f = args.f;
  f.begin();
  const int64_t first = int64_t(blockIdx.x) * (kMapThreads * kUnroll) + threadIdx.x;
  const int64_t end = (int64_t(blockIdx.x) + 1) * (kMapThreads * kUnroll) * N;
  if (args.vectors && end <= args.numel) {
    Vec<A, N> a[kUnroll];
    Vec<B, N> b[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int64_t at = (first + u * kMapThreads) * N;
      a[u] = *reinterpret_cast<const Vec<A, N>*>(from_a + at);
      if constexpr (kTwo) b[u] = *reinterpret_cast<const Vec<B, N>*>(from_b + at);
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      float x[N], z[N] = {};
      load<N>(a[u].at, x);
      if constexpr (kTwo) load<N>(b[u].at, z);
      f(x, z, first + u * kMapThreads);
      store<N>(to + (first + u * kMapThreads) * N, x);
    }
    return;
  }
  for (int u = 0; u < kUnroll; ++u) {
    const int64_t group = first + u * kMapThreads;
    float x[N] = {}, z[N] = {};
#pragma unroll
    for (int i = 0; i < N; ++i)
      if (group * N + i < args.numel) {
        x[i] = to_float(from_a[group * N + i]);
        if constexpr (kTwo) z[i] = to_float(from_b[group * N + i]);
      }
    f(x, z, group);
#pragma unroll
    for (int i = 0; i < N; ++i)
      if (group * N + i < args.numel) store1(to + group * N + i, x[i]);
  }
}

template <class T, bool kTwo, int kUnroll, class F>
void map(const Tensor& a, const Tensor& b, const Tensor& y, int64_t queue, const F& f) {
  const MapArgs<F> args = {a.data, b.data, y.data, y.numel(), aligned({a.data, b.data, y.data}), f};
  const int64_t blocks = ceil_div(args.numel, int64_t(kMapThreads) * kUnroll * T::kGroup);
  launch<map_kernel<T, kTwo, kUnroll, F>>({y.device, queue, dim3(blocks), dim3(kMapThreads)}, args);
}

// Checks: contiguous, x's device and size, any dtype.
inline void expect_beside(const char* what, const Tensor& t, const Tensor& x) {
  if (t.numel() != x.numel() || t.device != x.device || !t.contiguous())
    throw std::invalid_argument(std::string(what) + " must be contiguous, and on x's device with its size");
}

inline void expect_like(const char* what, const Tensor& t, const Tensor& x) {
  if (t.numel() != x.numel() || t.dtype != x.dtype || t.device != x.device || !t.contiguous())
    throw std::invalid_argument(std::string(what) + " must be contiguous, and on x's device with its size and dtype");
}

inline void expect_cuda(const char* what, const Tensor& t) {
  if (t.device < 0 || !t.contiguous())
    throw std::invalid_argument(std::string(what) + " must be a contiguous tensor on a CUDA device");
}

}  // namespace hfnn
