// Cross-entropy against classes on CUDA. cross_entropy.h has the definition.
//
// forward: one block per row, one read. backward: elementwise, many short blocks. fused: the row stays in the shared
// memory of a block, or of a cluster of up to eight, between totals and gradient: one read, one write. Rows that do not
// fit there or do not consist of whole vectors are read twice by one block.
//
// Units: a vector is N elements of a row, 16 bytes if rows allow it, else one element.
#include "cross_entropy.h"
#include "cross_entropy_row.cuh"

namespace hfnn {
namespace {

using Args = CrossEntropyArgs;

// Vectors that a thread loads at a time; maximum threads per block of a row.
template <int N, bool kOptions>
constexpr int kRowUnits = N == 1 && !kOptions ? 8 : 4;
constexpr int kRowThreads = 256, kBackThreads = 256;

template <class T>
constexpr bool kFast = sizeof(T) == 2;

// Zeros for an ignored row of a gradient, or a slice of it.
template <class T, int N>
__device__ void fill_zeros(T* dx, int first, int step, int end) {
  const float zeros[N] = {};
  for (int unit = first; unit < end; unit += step) store<N>(dx + int64_t(unit) * N, zeros);
}

// The origin for smoothing. Must be finite: a masked target would make every distance infinite.
template <bool kCap>
__device__ float origin_of(const Logit<kCap>& logit, float x_target) {
  const float z = logit.minus(x_target, 0);
  return isfinite(z) ? z : 0;
}

// Forward; with kGradient, fused in two reads. Then x is not loaded as constant memory, because dx may be x.
template <class T, int N, bool kSmooth, bool kCap, bool kGradient>
__global__ void __launch_bounds__(kRowThreads, kSmooth || kCap || kGradient || N == 1 ? 4 : 6)
    cross_entropy_row_kernel(const __grid_constant__ Args args) {
  constexpr int kHeld = kRowUnits < N, kSmooth || kCap > ;
  const int64_t row = int64_t(blockIdx.x) * blockDim.y + threadIdx.y;
  if (row >= args.rows) return;
  const int team = blockDim.x, thread = threadIdx.x, vectors = args.cols / N;
  const T* x = static_cast<const T*>(args.x) + row * args.cols;
  T* dx = static_cast<T*>(args.dx) + row * args.cols;
  const int64_t target = args.target[row];
  if (!row_counts(args, row, target)) {
    if (thread == 0) RowResult().write(args, row);
    if constexpr (kGradient) fill_zeros<T, N>(dx, thread, team, vectors);
    return;
  }

  const Logit<kCap> logit(args);
  const float x_target = to_float(x[target]), weight = args.weight[target];
  const float origin = kSmooth ? origin_of(logit, x_target) : 0;
  RowTotals<kFast<T>, kSmooth> totals;
  for (int first = thread; first < vectors; first += kHeld * team) {
    Vec<T, N> held[kHeld];
#pragma unroll
    for (int u = 0; u < kHeld; ++u) {
      const int unit = first + u * team;
      if (unit >= vectors) continue;
      if constexpr (kGradient)
        held[u] = *reinterpret_cast<const Vec<T, N>*>(x + int64_t(unit) * N);
      else
        held[u] = load_constant<N>(x + int64_t(unit) * N);
    }
    totals.add(args, logit, held, first, team, vectors, origin);
  }
  __shared__ float2 scratch[kMaxWarps * sizeof(totals) / sizeof(float2)];
  totals = over_row<false>(totals, scratch);
  const RowResult result(args, logit, totals, x_target, weight);
  if (thread == 0) result.write(args, row);

  if constexpr (kGradient) {
    const RowGradient<kFast<T>, kSmooth, kCap> gradient(args, row, target, weight, result.slope, result.lse,
                                                        totals.peak.max, totals.peak.sum);
#pragma unroll 2
    for (int unit = thread; unit < vectors; unit += team) {
      float at[N];
      load<N>(x + int64_t(unit) * N, at);
      gradient.apply(args, logit, int64_t(unit) * N, at);
      store<N>(dx + int64_t(unit) * N, at);
    }
  }
}

// A block has a piece of one row, or of blockDim.y short rows with a warp each.
template <class T, int N, bool kSmooth, bool kCap>
__global__ void __launch_bounds__(kBackThreads, kSmooth || kCap || N == 1 ? 4 : 5)
    cross_entropy_backward_kernel(const __grid_constant__ Args args) {
  constexpr int kHeld = kRowUnits < N, kSmooth || kCap > ;
  const unsigned group = blockIdx.x / unsigned(args.chunks), chunk = blockIdx.x % unsigned(args.chunks);
  const int64_t row = int64_t(group) * blockDim.y + threadIdx.y;
  if (row >= args.rows) return;
  const int team = blockDim.x, vectors = args.cols / N, first = chunk * (team * kHeld) + threadIdx.x;
  const T* x = static_cast<const T*>(args.x) + row * args.cols;
  T* dx = static_cast<T*>(args.dx) + row * args.cols;
  const int64_t target = args.target[row];
  if (!row_counts(args, row, target)) {
    fill_zeros<T, N>(dx, first, team, min(vectors, (int(chunk) + 1) * team * kHeld));
    return;
  }

  Vec<T, N> held[kHeld];
#pragma unroll
  for (int u = 0; u < kHeld; ++u)
    if (first + u * team < vectors) held[u] = *reinterpret_cast<const Vec<T, N>*>(x + int64_t(first + u * team) * N);
  const Logit<kCap> logit(args);
  const float weight = args.weight[target], slope = args.slope ? args.slope[row] : weight;
  const double exact = args.lse[row];
  const float lse = float(exact), rest = 1 + float(exact - double(lse));  // exp(z - exact) = exp(z - lse) / rest
  const RowGradient<kFast<T>, kSmooth, kCap> gradient(args, row, target, weight, slope, lse, lse, rest);
#pragma unroll
  for (int u = 0; u < kHeld; ++u) {
    const int unit = first + u * team;
    if (unit >= vectors) continue;
    float at[N];
    to_float(held[u], at);
    gradient.apply(args, logit, int64_t(unit) * N, at);
    store<N>(dx + int64_t(unit) * N, at);
  }
}

// The number of stages in which a row is loaded, and the vectors that a thread processes at a time.
constexpr int kStages = 4, kHeldUnits = 2;

__device__ inline void wait_for_stage(int stage) {
  if (stage == 0)
    asm volatile("cp.async.wait_group 3;" ::: "memory");
  else if (stage == 1)
    asm volatile("cp.async.wait_group 2;" ::: "memory");
  else if (stage == 2)
    asm volatile("cp.async.wait_group 1;" ::: "memory");
  else
    asm volatile("cp.async.wait_group 0;" ::: "memory");
}

// Bytes for the totals of all warps of a cluster.
constexpr int kHeldScratch = kMaxCluster * (kRowThreads / 32) * sizeof(RowTotals<true, true>);

// Fused in one read. A cluster of blocks holds a row in shared memory, one slice per block. Each thread copies its own
// vectors, and no other thread reads them, so they need no barrier.
template <class T, bool kSmooth, bool kCap>
__global__ void __launch_bounds__(kRowThreads, kSmooth || kCap ? 2 : 3)
    cross_entropy_held_kernel(const __grid_constant__ Args args) {
  constexpr int N = kWidth<T>;
  extern __shared__ uint4 held_row[];
  float2* const scratch = reinterpret_cast<float2*>(held_row);
  Vec<T, N>* const slots = reinterpret_cast<Vec<T, N>*>(held_row + kHeldScratch / sizeof(uint4));
  using Blocks = Team<32, true>;
  const int ranks = Blocks::ranks(), rank = Blocks::rank(), threads = blockDim.x, thread = threadIdx.x;
  const int64_t row = blockIdx.x / unsigned(ranks);
  const int vectors = args.cols / N, slice = (vectors + ranks - 1) / ranks;
  const int begin = slice * rank, end = min(begin + slice, vectors);
  const T* x = static_cast<const T*>(args.x) + row * args.cols;
  T* dx = static_cast<T*>(args.dx) + row * args.cols;
  const bool leads = rank == 0 && thread == 0;
  const int64_t target = args.target[row];
  // All blocks of the cluster take this branch together.
  if (!row_counts(args, row, target)) {
    if (leads) RowResult().write(args, row);
    fill_zeros<T, N>(dx, begin + thread, threads, end);
    return;
  }

  // The vectors of a stage, in steps of kHeldUnits of every thread.
  const int step = kHeldUnits * threads, stage = (slice + kStages * step - 1) / (kStages * step) * step;
#pragma unroll 1
  for (int s = 0; s < kStages; ++s) {
    const int stop = min(begin + (s + 1) * stage, end);
#pragma unroll 4
    for (int unit = begin + s * stage + thread; unit < stop; unit += threads)
      asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(
                       static_cast<unsigned>(__cvta_generic_to_shared(slots + (unit - begin)))),
                   "l"(x + int64_t(unit) * N)
                   : "memory");
    asm volatile("cp.async.commit_group;" ::: "memory");
  }
  const Logit<kCap> logit(args);
  const float x_target = to_float(x[target]), weight = args.weight[target];
  const float origin = kSmooth ? origin_of(logit, x_target) : 0;
  // Shared memory of a block must not be written to before the block has started.
  __syncwarp();
  if (ranks > 1) cluster_sync();

  RowTotals<kFast<T>, kSmooth> totals;
#pragma unroll 1
  for (int s = 0; s < kStages; ++s) {
    wait_for_stage(s);
    const int stop = min(begin + (s + 1) * stage, end);
#pragma unroll 1
    for (int first = begin + s * stage + thread; first < stop; first += step) {
      Vec<T, N> held[kHeldUnits];
#pragma unroll
      for (int u = 0; u < kHeldUnits; ++u)
        if (first + u * threads < stop) held[u] = slots[first + u * threads - begin];
      totals.add(args, logit, held, first, threads, stop, origin);
    }
  }
  totals = over_row<true>(totals, scratch);
  const RowResult result(args, logit, totals, x_target, weight);
  if (leads) result.write(args, row);
  const RowGradient<kFast<T>, kSmooth, kCap> gradient(args, row, target, weight, result.slope, result.lse,
                                                      totals.peak.max, totals.peak.sum);
#pragma unroll 2
  for (int unit = begin + thread; unit < end; unit += threads) {
    float at[N];
    to_float(slots[unit - begin], at);
    gradient.apply(args, logit, int64_t(unit) * N, at);
    store<N>(dx + int64_t(unit) * N, at);
  }
}

// The blocks of a cluster, the threads of each, and bytes of shared memory for a row of `vectors`; 0 blocks if it does
// not fit. Three blocks per multiprocessor, so that some load while others compute, unless the row needs more memory.
struct HeldPlan {
  unsigned cluster = 0, threads = 0;
  size_t shared = 0;

  HeldPlan(const Device& device, int64_t vectors) {
    const auto bytes = [&](unsigned blocks) { return kHeldScratch + 16 * size_t(ceil_div(vectors, blocks)); };
    const unsigned most = device.major >= 9 ? kMaxCluster : 1;
    unsigned blocks = 1;
    // The device reserves 1 KiB per block.
    while (blocks < most && bytes(blocks) > size_t(device.shared_per_multiprocessor / 3 - 1024)) blocks *= 2;
    if (bytes(blocks) > size_t(device.shared_per_block)) return;
    cluster = blocks;
    shared = bytes(blocks);
    threads = std::clamp<int64_t>(32 * ceil_div(ceil_div(vectors, blocks), 32 * 8), 128, kRowThreads);
  }
};

// f(kSmooth, kCap) for the options of the call. Kernels for single elements have both or neither.
template <int N, class F>
void with_options(const Args& args, F&& f) {
  constexpr std::true_type yes;
  constexpr std::false_type no;
  if constexpr (N == 1)
    args.smooth != 0 || args.cap != 0 ? f(yes, yes) : f(no, no);
  else if (args.smooth != 0)
    args.cap != 0 ? f(yes, yes) : f(yes, no);
  else
    args.cap != 0 ? f(no, yes) : f(no, no);
}

template <class T, int N, bool kGradient>
void launch_rows(const Args& args, int device, int64_t queue) {
  with_options<N>(args, [&](auto smooth, auto cap) {
    const dim3 block = softmax_block(args.cols / N, kRowUnits < N, smooth || cap >, kRowThreads);
    launch<cross_entropy_row_kernel<T, N, smooth, cap, kGradient>>(
        {device, queue, dim3(ceil_div(args.rows, block.y)), block}, args);
  });
}

template <class T, int N>
void launch_backward(Args args, int device, int64_t queue) {
  with_options<N>(args, [&](auto smooth, auto cap) {
    constexpr int units = kRowUnits < N, smooth || cap > ;
    const dim3 block = softmax_block(args.cols / N, units, kBackThreads);
    args.chunks = ceil_div(args.cols / N, int64_t(block.x) * units);
    launch<cross_entropy_backward_kernel<T, N, smooth, cap>>(
        {device, queue, dim3(ceil_div(args.rows, block.y) * args.chunks), block}, args);
  });
}

template <class T, int N>
void launch_fused(const Args& args, int device, int64_t queue) {
  if constexpr (N > 1) {
    // Rows of one warp are still in the cache when they are read again.
    const HeldPlan plan(device_of(device), args.cols / N);
    if (plan.cluster > 0 && args.cols / N > 32 * kRowUnits<N, false>)
      return with_options<N>(args, [&](auto smooth, auto cap) {
        launch<cross_entropy_held_kernel<T, smooth, cap>>(
            {device, queue, dim3(args.rows * plan.cluster), dim3(plan.threads), plan.shared, plan.cluster}, args);
      });
  }
  launch_rows<T, N, true>(args, device, queue);
}

// f(T{}, N) with the dtype of x and the number of elements per load.
template <class F>
void with_width(const Args& args, const Tensor& x, F&& f) {
  with_floating("x", x.dtype, [&](auto type) {
    constexpr int N = kWidth<decltype(type)>;
    if (args.cols % N == 0 && aligned({args.x, args.dx, args.weight.data}))
      f(type, std::integral_constant<int, N>{});
    else
      f(type, std::integral_constant<int, 1>{});
  });
}

void expect_statistic(const char* what, const Tensor& t, const Tensor& x) {
  if (!t) return;
  expect_shape(what, t, {x.shape[0]}, x);
  expect_dtype(what, t, Dtype::float32);
}

// Common to all three calls.
Args make_args(const Tensor& x, const Tensor& target, const Tensor& weight, int64_t ignore_index, double smoothing,
               double z_loss, double logit_scale, double softcap) {
  expect_rows("x", x);
  if (target.dtype != Dtype::int64 || target.dims != 1)
    throw std::invalid_argument(
        "the CUDA kernels take a target of classes, int64 of one dimension, and not one of probabilities: use another "
        "kernel, such as Triton's");
  expect_shape("target", target, {x.shape[0]}, x);
  if (weight) {
    expect_shape("weight", weight, {x.shape[1]}, x);
    with_floating("weight", weight.dtype, [](auto) {});
  }
  Args args = {};
  args.x = x.data;
  args.target = target.as<const int64_t>();
  args.weight = {weight.data, weight.dtype, -0.0f, 1};
  args.rows = x.shape[0];
  args.cols = x.shape[1];
  args.ignore = ignore_index;
  args.keep = float(1 - smoothing);
  args.smooth = float(smoothing / double(std::max<int64_t>(args.cols, 1)));
  args.z_loss = float(z_loss);
  args.scale = float(logit_scale);
  args.cap = float(std::abs(softcap));  // tanh is odd: the sign cancels
  args.inner = softcap == 0 ? 0 : float(logit_scale / std::abs(softcap));
  return args;
}

void add_statistics(Args& args, const Tensor& x, const Tensor& loss, const Tensor& share, const Tensor& lse,
                    const Tensor& slope) {
  expect_statistic("loss", loss, x);
  expect_statistic("share", share, x);
  if (lse) expect_shape("lse", lse, {x.shape[0]}, x), expect_dtype("lse", lse, Dtype::float64);
  expect_statistic("slope", slope, x);
  args.loss = loss.as<float>();
  args.share = share.as<float>();
  args.lse = lse.as<double>();
  args.slope = slope.as<float>();
}

void add_gradient(Args& args, const Tensor& x, const Tensor& factor, const Tensor& dx) {
  expect_shape("dx", dx, {x.shape[0], x.shape[1]}, x);
  expect_dtype("dx", dx, x.dtype);
  if (!factor || factor.device != x.device || !factor.contiguous() ||
      (factor.numel() != 1 && factor.numel() != x.shape[0]))
    throw std::invalid_argument("factor must be contiguous, on x's device, of one element or one for each row of x");
  expect_dtype("factor", factor, Dtype::float32);
  args.dx = dx.data;
  args.factor = factor.as<float>();
  args.factor_step = factor.numel() == 1 ? 0 : 1;
}

void forward(const Tensor& x, const Tensor& target, const Tensor& weight, const Tensor& loss, const Tensor& share,
             const Tensor& lse, const Tensor& slope, int64_t ignore_index, double smoothing, double z_loss,
             double logit_scale, double softcap, int64_t queue) {
  Args args = make_args(x, target, weight, ignore_index, smoothing, z_loss, logit_scale, softcap);
  HFNN_CHECK(loss);
  add_statistics(args, x, loss, share, lse, slope);
  if (x.numel() == 0) return;
  DeviceGuard guard(x.device);
  with_width(args, x, [&](auto type, auto width) { launch_rows<decltype(type), width, false>(args, x.device, queue); });
}

void backward(const Tensor& x, const Tensor& target, const Tensor& weight, const Tensor& lse, const Tensor& slope,
              const Tensor& factor, const Tensor& dx, int64_t ignore_index, double smoothing, double z_loss,
              double logit_scale, double softcap, int64_t queue) {
  Args args = make_args(x, target, weight, ignore_index, smoothing, z_loss, logit_scale, softcap);
  HFNN_CHECK(lse);
  HFNN_CHECK(slope || !weight || smoothing == 0);
  add_statistics(args, x, Tensor{}, Tensor{}, lse, slope);
  add_gradient(args, x, factor, dx);
  if (x.numel() == 0) return;
  DeviceGuard guard(x.device);
  with_width(args, x, [&](auto type, auto width) { launch_backward<decltype(type), width>(args, x.device, queue); });
}

void fused(const Tensor& x, const Tensor& target, const Tensor& weight, const Tensor& loss, const Tensor& share,
           const Tensor& lse, const Tensor& slope, const Tensor& factor, const Tensor& dx, int64_t ignore_index,
           double smoothing, double z_loss, double logit_scale, double softcap, int64_t queue) {
  Args args = make_args(x, target, weight, ignore_index, smoothing, z_loss, logit_scale, softcap);
  HFNN_CHECK(loss);
  add_statistics(args, x, loss, share, lse, slope);
  add_gradient(args, x, factor, dx);
  if (x.numel() == 0) return;
  DeviceGuard guard(x.device);
  with_width(args, x, [&](auto type, auto width) { launch_fused<decltype(type), width>(args, x.device, queue); });
}

}  // namespace

const CrossEntropy cross_entropy_cuda = {forward, backward, fused};

}  // namespace hfnn
