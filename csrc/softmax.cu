// Softmax and its logarithm on CUDA. softmax.h has the definition.
//
// Many short blocks: one row each, or one row per warp for short rows. Elements stay in registers between the passes if
// they fit. Otherwise they are read twice, the second time mostly from the L2 cache.
//
// Units: a vector is N elements of a row, 16 bytes if rows allow it, else one element. A thread takes kUnits vectors at
// a time, blockDim.x apart, and loads all of them before it uses the first.
#include "softmax.h"
#include "softmax_row.cuh"

namespace hfnn {
namespace {

constexpr int kUnits = 2, kMoreUnits = 4, kWideUnits = 8, kLoopUnits = 4;  // forward
constexpr int kBackUnits = 2, kWideBackUnits = 4, kLoopBackUnits = 2;      // backward, per tensor
constexpr int kScalarUnits = 8, kScalarBackUnits = 4;                      // single elements

struct Args {
  const void *dy, *y, *x;
  void* out;
  int64_t rows, cols;
  bool log;
};

// a / b from 1 / b; in float32, rounded once: a second rounding would be an error of the whole row.
template <bool kFast>
__device__ inline float divide(float a, float b, float inverse) {
  const float quotient = a * inverse;
  return kFast ? quotient : fmaf(fmaf(-quotient, b, a), inverse, quotient);
}

template <class X, class Y, int N, int kUnits, bool kLoop>
__global__ void __launch_bounds__(softmax_threads(kUnits), softmax_residents(kUnits) / softmax_threads(kUnits))
    softmax_forward_kernel(const __grid_constant__ Args args) {
  // A 16-bit y hides the error of the fast exponential. float32 has more time per element.
  constexpr bool kFast = sizeof(Y) == 2;
  const int64_t row = int64_t(blockIdx.x) * blockDim.y + threadIdx.y;
  if (row >= args.rows) return;
  const int team = blockDim.x, thread = threadIdx.x, vectors = args.cols / N;
  const X* x = static_cast<const X*>(args.x) + row * args.cols;
  Y* y = static_cast<Y*>(args.out) + row * args.cols;

  Vec<X, N> held[kUnits];
  const auto fetch = [&](int first) {
#pragma unroll
    for (int u = 0; u < kUnits; ++u) {
      const int unit = first + u * team;
      if (unit < vectors) held[u] = load_constant<N>(x + int64_t(unit) * N);
    }
  };

  Peak<kFast> peak;
  for (int first = thread; first < vectors; first += kUnits * team) {
    fetch(first);
    float top = -INFINITY;
#pragma unroll
    for (int u = 0; u < kUnits; ++u)
      if (first + u * team < vectors) top = fmaxf(top, largest(held[u], 0));
    peak.raise(top);
    const float about = peak.about();
#pragma unroll
    for (int u = 0; u < kUnits; ++u) {
      if (first + u * team >= vectors) continue;
      float at[N], sum = 0;
      to_float(held[u], at);
#pragma unroll
      for (int i = 0; i < N; ++i) sum += softmax_exp<kFast>(at[i] - about);
      peak.sum += sum;
    }
    if constexpr (!kLoop) break;
  }
  __shared__ float2 scratch[kMaxWarps];
  peak = over_row<false>(peak, scratch);
  const float second = args.log ? logf(peak.sum) : __frcp_rn(peak.sum);

  for (int first = thread; first < vectors; first += kUnits * team) {
    if constexpr (kLoop) fetch(first);
#pragma unroll
    for (int u = 0; u < kUnits; ++u) {
      const int unit = first + u * team;
      if (unit >= vectors) continue;
      float at[N];
      to_float(held[u], at);
      // The maximum itself, not about(), so that a row of -inf gives NaN.
      if (args.log) {
#pragma unroll
        for (int i = 0; i < N; ++i) at[i] = at[i] - peak.max - second;
      } else {
#pragma unroll
        for (int i = 0; i < N; ++i) at[i] = divide<kFast>(softmax_exp<kFast>(at[i] - peak.max), peak.sum, second);
      }
      store<N>(y + int64_t(unit) * N, at);
    }
    if constexpr (!kLoop) break;
  }
}

// Vectors that a backward thread holds, plus one for what a loop needs besides.
constexpr int back_held(int units, bool loop) { return 2 * units + loop; }

// A vector is 16 bytes of y, even if it is fewer of x.
template <class X, class Y, int N, int kUnits, bool kLoop>
__global__ void __launch_bounds__(softmax_threads(back_held(kUnits, kLoop)),
                                  softmax_residents(back_held(kUnits, kLoop)) /
                                      softmax_threads(back_held(kUnits, kLoop)))
    softmax_backward_kernel(const __grid_constant__ Args args) {
  constexpr bool kFast = sizeof(X) == 2 && sizeof(Y) == 2;
  const int64_t row = int64_t(blockIdx.x) * blockDim.y + threadIdx.y;
  if (row >= args.rows) return;
  const int team = blockDim.x, thread = threadIdx.x, vectors = args.cols / N;
  const Y* dy = static_cast<const Y*>(args.dy) + row * args.cols;
  const Y* y = static_cast<const Y*>(args.y) + row * args.cols;
  X* dx = static_cast<X*>(args.out) + row * args.cols;

  Vec<Y, N> held_dy[kUnits], held_y[kUnits];
  const auto fetch = [&](int first) {
#pragma unroll
    for (int u = 0; u < kUnits; ++u) {
      const int unit = first + u * team;
      if (unit >= vectors) continue;
      held_dy[u] = load_constant<N>(dy + int64_t(unit) * N);
      held_y[u] = load_constant<N>(y + int64_t(unit) * N);
    }
  };

  Sums sums;
  for (int first = thread; first < vectors; first += kUnits * team) {
    fetch(first);
#pragma unroll
    for (int u = 0; u < kUnits; ++u) {
      if (first + u * team >= vectors) continue;
      float at_dy[N], at_y[N], sum = 0;
      to_float(held_dy[u], at_dy);
      to_float(held_y[u], at_y);
#pragma unroll
      for (int i = 0; i < N; ++i) sum = args.log ? sum + at_dy[i] : fmaf(at_dy[i], at_y[i], sum);
      sums.first += sum;
    }
    if constexpr (!kLoop) break;
  }
  __shared__ float2 scratch[kMaxWarps];
  const float sum = over_row<false>(sums, scratch).first;

  for (int first = thread; first < vectors; first += kUnits * team) {
    if constexpr (kLoop) fetch(first);
#pragma unroll
    for (int u = 0; u < kUnits; ++u) {
      const int unit = first + u * team;
      if (unit >= vectors) continue;
      float at_dy[N], at_y[N];
      to_float(held_dy[u], at_dy);
      to_float(held_y[u], at_y);
      if (args.log) {
#pragma unroll
        for (int i = 0; i < N; ++i) at_dy[i] = fmaf(-softmax_exp<kFast>(at_y[i]), sum, at_dy[i]);
      } else {
#pragma unroll
        for (int i = 0; i < N; ++i) at_dy[i] = at_y[i] * (at_dy[i] - sum);
      }
      store<N>(dx + int64_t(unit) * N, at_dy);
    }
    if constexpr (!kLoop) break;
  }
}

template <auto kKernel>
void start(const Args& args, int64_t vectors, int units, int threads, int device, int64_t queue) {
  const dim3 block = softmax_block(vectors, units, threads);
  launch<kKernel>({device, queue, dim3(ceil_div(args.rows, block.y)), block}, args);
}

template <class X, class Y>
void launch_forward(const Args& args, int device, int64_t queue) {
  constexpr int N = kWidth<X>;
  const auto run = [&](auto width, auto units, auto loop) {
    start<softmax_forward_kernel<X, Y, width, units, loop>>(args, args.cols / width, units, softmax_threads(units),
                                                            device, queue);
  };
  using std::integral_constant;
  const integral_constant<int, N> vector;
  const int64_t vectors = args.cols / N;
  if (args.cols % N || !aligned({args.x, args.out}))
    run(integral_constant<int, 1>{}, integral_constant<int, kScalarUnits>{}, std::true_type{});
  else if (vectors <= 512)
    run(vector, integral_constant<int, kUnits>{}, std::false_type{});
  else if (vectors <= kMoreUnits * softmax_threads(kMoreUnits))
    run(vector, integral_constant<int, kMoreUnits>{}, std::false_type{});
  else if (vectors <= kWideUnits * softmax_threads(kWideUnits))
    run(vector, integral_constant<int, kWideUnits>{}, std::false_type{});
  else
    run(vector, integral_constant<int, kLoopUnits>{}, std::true_type{});
}

template <class X, class Y>
void launch_backward(const Args& args, int device, int64_t queue) {
  constexpr int N = kWidth<Y>;
  const auto run = [&](auto width, auto units, auto loop) {
    start<softmax_backward_kernel<X, Y, width, units, loop>>(args, args.cols / width, units,
                                                             softmax_threads(back_held(units, loop)), device, queue);
  };
  using std::integral_constant;
  const integral_constant<int, N> vector;
  const int64_t vectors = args.cols / N;
  if (args.cols % N || !aligned({args.dy, args.y, args.out}))
    run(integral_constant<int, 1>{}, integral_constant<int, kScalarBackUnits>{}, std::true_type{});
  else if (vectors <= kBackUnits * softmax_threads(back_held(kBackUnits, false)))
    run(vector, integral_constant<int, kBackUnits>{}, std::false_type{});
  else if (vectors <= kWideBackUnits * softmax_threads(back_held(kWideBackUnits, false)))
    run(vector, integral_constant<int, kWideBackUnits>{}, std::false_type{});
  else
    run(vector, integral_constant<int, kLoopBackUnits>{}, std::true_type{});
}

// f(X{}, Y{}) with the dtype of x and dx, and that of y and dy.
template <class F>
void with_pair(const Tensor& x, const Tensor& y, F&& f) {
  with_floating("x", x.dtype, [&](auto in) {
    if (y.dtype == x.dtype) return f(in, in);
    expect_dtype("y", y, Dtype::float32);
    f(in, float{});
  });
}

void forward(const Tensor& x, const Tensor& y, bool log, int64_t queue) {
  expect_rows("x", x);
  expect_shape("y", y, {x.shape[0], x.shape[1]}, x);
  const Args args = {nullptr, nullptr, x.data, y.data, x.shape[0], x.shape[1], log};
  if (x.numel() == 0) return;
  DeviceGuard guard(x.device);
  with_pair(x, y, [&](auto in, auto out) { launch_forward<decltype(in), decltype(out)>(args, x.device, queue); });
}

void backward(const Tensor& dy, const Tensor& y, const Tensor& dx, bool log, int64_t queue) {
  expect_rows("dx", dx);
  expect_shape("y", y, {dx.shape[0], dx.shape[1]}, dx);
  expect_shape("dy", dy, {dx.shape[0], dx.shape[1]}, dx);
  expect_dtype("dy", dy, y.dtype);
  const Args args = {dy.data, y.data, nullptr, dx.data, dx.shape[0], dx.shape[1], log};
  if (dx.numel() == 0) return;
  DeviceGuard guard(dx.device);
  with_pair(dx, y, [&](auto in, auto out) { launch_backward<decltype(in), decltype(out)>(args, dx.device, queue); });
}

}  // namespace

const Softmax softmax_cuda = {forward, backward};

}  // namespace hfnn
