// The calls of layer_norm.cu (kCentred) and rms_norm.cu (not kCentred) on CUDA: checks, launch plans, launches. RMSNorm
// is LayerNorm with mean 0 and no bias.
//
// x and y have one dtype (rebuild also accepts pairs with a float32); weight and bias may have another. The fast
// kernels need rows of whole, aligned 16-byte vectors. Otherwise forward and rebuild work element by element, and
// backward uses the plain kernels, which are slow. Backward also uses them above 65536 columns of 16 bits or 32768 of
// 32 bits, and, on devices without clusters, for rows wider than a block.
#pragma once
#include "norm_backward.cuh"
#include "norm_forward.cuh"

namespace hfnn {

// Blocks of forward and rebuild: threads per row, rows.
struct RowBlock {
  unsigned team, rows;
  Launch launch(const NormArgs& args, int device, int64_t queue) const {
    return {device, queue, dim3(ceil_div(args.rows, rows)), dim3(team, rows)};
  }
};

constexpr int kLoopUnits = 2;

inline RowBlock row_block(int64_t vectors, int units, int threads) {
  const unsigned warps = std::min<int64_t>(ceil_div(vectors, units * 32), threads / 32);
  return {32 * warps, warps == 1 ? 8u : 1u};
}

// How the rows of a backward call are distributed.
struct NormPlan {
  int team = 0;  // threads per row; 0: the plain kernels
  int cluster = 1, stages = 0;
  int64_t groups = 0;  // blocks, or clusters of blocks
  size_t shared = 0;
};

// The number of blocks of a cluster with enough threads for a row; above kMaxCluster if no cluster has.
inline int norm_cluster(int64_t vectors) {
  int cluster = 1;
  while (vectors > int64_t(cluster) * kThreads * kVectors && cluster <= kMaxCluster) cluster *= 2;
  return cluster;
}

// Resident blocks per multiprocessor and stages of the ring, as measured on an H200. Both settings keep the memory busy
// with incoming rows. One block is better if the kernel has instruction slots to spare.
inline NormPlan norm_plan(const Device& device, bool centred, int64_t rows, int64_t cols, int width) {
  NormPlan plan;
  const int64_t vectors = cols / width;
  plan.cluster = norm_cluster(vectors);
  if (rows >= 1 << 30) return NormPlan{};  // the kernels count rows in 32 bits, a few steps ahead
  if (plan.cluster > (device.major < 9 ? 1 : kMaxCluster)) return NormPlan{};
  plan.team = vectors <= 32 * kVectors ? 32 : vectors <= 128 * kVectors ? 128 : 256;

  const bool one = plan.cluster == 1 && (!centred || plan.team == 32);
  const int resident = one ? 1 : 2, stages = one ? 3 : 2;
  const int stage = 2 * kThreads * kVectors * 16;
  const int scratch = plan.cluster > 1 ? kScratchBytes<true> : kScratchBytes<false>;
  const int fixed = scratch + plan.team * kVectors * width * 4;
  // The device reserves 1 KiB per block.
  const int share = std::min(device.shared_per_multiprocessor / resident - 1024, device.shared_per_block);
  plan.stages = std::clamp((share - fixed) / stage, Ring<1>::kMinStages, std::min(stages, Ring<1>::kMaxStages));
  plan.shared = fixed + plan.stages * stage;
  if (plan.shared > size_t(device.shared_per_block)) return NormPlan{};
  const int64_t at_once = int64_t(device.multiprocessors) * resident / plan.cluster;
  plan.groups = std::min(ceil_div(rows, kThreads / plan.team), at_once);
  return plan;
}

inline Launch norm_launch(const NormPlan& plan, int device, int64_t queue) {
  return {device, queue, dim3(plan.groups * plan.cluster), kThreads, plan.shared, unsigned(plan.cluster)};
}

// Rows of a plane of partials: one for each block or cluster with rows of its own, at most kResident per
// multiprocessor. Sized for 16-bit rows, whose clusters are smallest.
inline int64_t norm_partials(int64_t rows, int64_t cols) {
  int device = 0;
  HFNN_CUDA_CHECK(cudaGetDevice(&device));
  const int64_t at_once = int64_t(device_of(device).multiprocessors) * kResident;
  return std::clamp<int64_t>(at_once / std::min(norm_cluster(cols / 8), kMaxCluster), 1, std::max<int64_t>(rows, 1));
}

inline void norm_expect(const char* what, const Tensor& t, std::initializer_list<int64_t> shape, const Tensor& x) {
  bool same = t && t.device == x.device && t.dims == int(shape.size()) && t.contiguous();
  for (int i = 0; same && i < t.dims; ++i) same = t.shape[i] == shape.begin()[i];
  if (!same) throw std::invalid_argument(std::string(what) + " does not have the shape, layout or device x asks for");
}

inline void norm_expect_dtype(const char* what, const Tensor& t, Dtype dtype) {
  if (t.dtype == dtype) return;
  throw std::invalid_argument(std::string(what) + " is " + name(t.dtype) + ", the CUDA kernels need " + name(dtype));
}

inline void norm_expect_floating(const char* what, const Tensor& t) {
  with_floating(what, t.dtype, [](auto) {});
}

// Checks common to all three calls. `y` is dy in backward.
inline void norm_check(const Tensor& x, const Tensor& y, const Tensor& weight, const Tensor& bias) {
  HFNN_CHECK(x.device >= 0 && x.dims == 2 && x.shape[1] > 0 && x.shape[1] < 1 << 30 && x.contiguous());
  norm_expect("y", y, {x.shape[0], x.shape[1]}, x);
  for (const Tensor* parameter : {&weight, &bias}) {
    if (!*parameter) continue;
    norm_expect("weight or bias", *parameter, {x.shape[1]}, x);
    norm_expect_floating("weight or bias", *parameter);
  }
}

inline void norm_check_statistic(const char* what, const Tensor& t, const Tensor& x) {
  norm_expect(what, t, {x.shape[0]}, x);
  norm_expect_dtype(what, t, Dtype::float32);
}

// RMSNorm's `offset` is part of its weight. -0 as bias or offset leaves every float unchanged.
inline NormArgs norm_args(const Tensor& x, const Tensor& y, const Tensor& weight, const Tensor& bias,
                          const Tensor& mean, const Tensor& rstd, double offset) {
  NormArgs args = {};
  args.x = x.data;
  args.y = y.data;
  args.mean = mean.as<float>();
  args.rstd = rstd.as<float>();
  args.weight = {weight.data, weight.dtype, weight && offset != 0 ? float(offset) : -0.0f, 1};
  args.bias = {bias.data, bias.dtype, -0.0f, -0.0f};
  args.rows = x.shape[0];
  args.cols = x.shape[1];
  args.inverse = float(1.0 / double(args.cols));
  return args;
}

// Whether rows of T can be processed in vectors. A null pointer counts as aligned.
template <class T>
bool whole_vectors(const NormArgs& args) {
  return args.cols % kWidth<T> == 0 &&
         aligned({args.x, args.y, args.dx, args.partials, args.weight.data, args.bias.data});
}

// Blocks of a plain backward kernel: teams of 32 threads for short rows, 256 for long ones.
constexpr int64_t kPlainShort = 2048;
inline Launch norm_launch_plain(const NormArgs& args, int device, int64_t queue) {
  const int64_t blocks = ceil_div(args.rows, args.cols <= kPlainShort ? kThreads / 32 : 1);
  return {device, queue, dim3(std::min<int64_t>(blocks, 8 * device_of(device).multiprocessors)), kThreads};
}

// Rows as vectors of T, parameters of dtype W.
template <class T, class W, bool kCentred>
void norm_launch_forward(const NormArgs& args, int device, int64_t queue) {
  constexpr int N = kWidth<T>;
  constexpr bool kWide = kWider<W, T>;
  constexpr int kUnits = kRowUnits<kCentred>;
  const int64_t vectors = args.cols / N;
  const auto start = [&](auto units, auto loop) {
    launch<norm_forward_kernel<T, W, N, units, loop, kCentred>>(
        row_block(vectors, units, row_threads(units, kWide)).launch(args, device, queue), args);
  };
  if (vectors <= kUnits * row_threads(kUnits, kWide))
    start(std::integral_constant<int, kUnits>{}, std::false_type{});
  else if (vectors <= kWideRowUnits * row_threads(kWideRowUnits, kWide))
    start(std::integral_constant<int, kWideRowUnits>{}, std::false_type{});
  else
    start(std::integral_constant<int, kLoopUnits>{}, std::true_type{});
}

template <class T, bool kCentred>
void norm_launch_forward(const NormArgs& args, int device, int64_t queue) {
  const Dtype weights = args.weight.data ? args.weight.dtype : args.bias.data ? args.bias.dtype : dtype_of<T>;
  const bool vectors = whole_vectors<T>(args) && (!args.bias.data || args.bias.dtype == weights);
  if (vectors && weights == dtype_of<T>)
    norm_launch_forward<T, T, kCentred>(args, device, queue);
  else if (vectors && weights == Dtype::float32)
    norm_launch_forward<T, float, kCentred>(args, device, queue);
  else
    launch<norm_forward_kernel<T, void, 1, kLoopUnits, true, kCentred>>(
        row_block(args.cols, kLoopUnits, row_threads(kLoopUnits, true)).launch(args, device, queue), args);
}

template <bool kCentred>
void norm_forward(const Tensor& x, const Tensor& weight, const Tensor& bias, const Tensor& y, const Tensor& mean,
                  const Tensor& rstd, double eps, double offset, int64_t queue) {
  norm_check(x, y, weight, bias);
  norm_expect_dtype("y", y, x.dtype);
  if (kCentred) norm_check_statistic("mean", mean, x);
  norm_check_statistic("rstd", rstd, x);
  if (x.shape[0] == 0) return;
  DeviceGuard guard(x.device);
  NormArgs args = norm_args(x, y, weight, bias, mean, rstd, offset);
  args.eps = float(eps);
  with_floating("x", x.dtype, [&](auto type) { norm_launch_forward<decltype(type), kCentred>(args, x.device, queue); });
}

// Only pairs of one dtype, or with at least one float32, are instantiated.
template <bool kCentred, class X, class Y>
void norm_launch_rebuild(const NormArgs& args, int device, int64_t queue) {
  const bool vectors = whole_vectors<X>(args);
  const Launch how =
      row_block(vectors ? args.cols / kWidth<X> : args.cols, 1, kRebuildThreads).launch(args, device, queue);
  if (vectors)
    launch<norm_rebuild_kernel<X, Y, kWidth<X>, kCentred>>(how, args);
  else
    launch<norm_rebuild_kernel<X, Y, 1, kCentred>>(how, args);
}

template <bool kCentred>
void norm_rebuild(const Tensor& x, const Tensor& weight, const Tensor& bias, const Tensor& mean, const Tensor& rstd,
                  const Tensor& y, double offset, int64_t queue) {
  norm_check(x, y, weight, bias);
  if (kCentred) norm_check_statistic("mean", mean, x);
  norm_check_statistic("rstd", rstd, x);
  if (x.shape[0] == 0) return;
  DeviceGuard guard(x.device);
  const NormArgs args = norm_args(x, y, weight, bias, mean, rstd, offset);
  with_floating("x", x.dtype, [&](auto in) {
    with_floating("y", y.dtype, [&](auto out) {
      using X = decltype(in);
      using Y = decltype(out);
      if constexpr (std::is_same_v<X, Y> || std::is_same_v<X, float> || std::is_same_v<Y, float>)
        norm_launch_rebuild<kCentred, X, Y>(args, x.device, queue);
      else
        throw std::invalid_argument("rebuild does not turn bfloat16 into float16, or the reverse");
    });
  });
}

// The first kernel. Returns how many rows of each plane of partials it writes.
template <class T, bool kCentred>
int64_t norm_launch_backward(NormArgs& args, int device, int64_t queue) {
  NormPlan plan;
  if (whole_vectors<T>(args)) plan = norm_plan(device_of(device), kCentred, args.rows, args.cols, kWidth<T>);
  if (plan.team == 0) {
    const Launch how = norm_launch_plain(args, device, queue);
    if (args.dx && args.cols <= kPlainShort) launch<norm_backward_plain_kernel<T, 32, kCentred>>(how, args);
    if (args.dx && args.cols > kPlainShort) launch<norm_backward_plain_kernel<T, 256, kCentred>>(how, args);
    const dim3 grid(ceil_div(args.cols, kThreads), std::min<int64_t>(args.planes, 65535));
    if (args.partials) launch<norm_partials_plain_kernel<T, kCentred>>({device, queue, grid, kThreads}, args);
    return grid.y;
  }
  args.stages = plan.stages;
  if (plan.cluster > 1) {
    constexpr auto kKernel = norm_backward_kernel<T, 256, true, kCentred>;
    const int64_t at_once = resident_clusters<kKernel>(norm_launch(plan, device, queue));
    plan.groups = std::min(plan.groups, at_once);
  }
  if (args.partials) plan.groups = std::min(plan.groups, args.planes);
  const Launch how = norm_launch(plan, device, queue);
  if (plan.cluster > 1)
    launch<norm_backward_kernel<T, 256, true, kCentred>>(how, args);
  else if (plan.team == 256)
    launch<norm_backward_kernel<T, 256, false, kCentred>>(how, args);
  else if (plan.team == 128)
    launch<norm_backward_kernel<T, 128, false, kCentred>>(how, args);
  else
    launch<norm_backward_kernel<T, 32, false, kCentred>>(how, args);
  return plan.groups;
}

template <bool kCentred>
void norm_check_backward(const Tensor& dy, const Tensor& x, const Tensor& mean, const Tensor& rstd, const Tensor& dx,
                         const Tensor& dweight, const Tensor& dbias, const Tensor& partials) {
  norm_expect_dtype("dy", dy, x.dtype);
  if (kCentred) norm_check_statistic("mean", mean, x);
  norm_check_statistic("rstd", rstd, x);
  if (dx) norm_expect("dx", dx, {x.shape[0], x.shape[1]}, x), norm_expect_dtype("dx", dx, x.dtype);
  if (dweight && dbias) norm_expect_dtype("dbias", dbias, dweight.dtype);
  for (const Tensor* gradient : {&dweight, &dbias}) {
    if (!*gradient) continue;
    norm_expect("dweight or dbias", *gradient, {x.shape[1]}, x);
    norm_expect_floating("dweight or dbias", *gradient);
    norm_expect("partials", partials, {kCentred ? 2 : 1, partials.shape[1], x.shape[1]}, x);
    norm_expect_dtype("partials", partials, Dtype::float32);
    HFNN_CHECK(partials.shape[1] > 0);
  }
}

template <bool kCentred>
void norm_backward(const Tensor& dy, const Tensor& x, const Tensor& weight, const Tensor& mean, const Tensor& rstd,
                   const Tensor& dx, const Tensor& dweight, const Tensor& dbias, const Tensor& partials, double offset,
                   int64_t queue) {
  norm_check(x, dy, weight, Tensor{});
  norm_check_backward<kCentred>(dy, x, mean, rstd, dx, dweight, dbias, partials);
  const bool gradients = dweight || dbias;
  DeviceGuard guard(x.device);
  NormArgs args = norm_args(x, dy, weight, Tensor{}, mean, rstd, offset);
  args.dx = dx.data;
  args.partials = gradients ? partials.as<float>() : nullptr;
  args.planes = gradients ? partials.shape[1] : 0;
  int64_t used = 0;  // a sum over no rows is 0
  if (args.rows > 0 && (dx || gradients))
    with_floating("x", x.dtype,
                  [&](auto type) { used = norm_launch_backward<decltype(type), kCentred>(args, x.device, queue); });
  if (!gradients) return;
  const PartialsArgs sums = {
      args.partials, {dweight.data, dbias.data}, dweight ? dweight.dtype : dbias.dtype, used, args.planes, args.cols};
  Launch how = {x.device, queue, dim3(ceil_div(args.cols, 32), kCentred ? 2 : 1), dim3(32, kSumRows)};
  how.early = true;
  launch<norm_sum_partials_kernel>(how, sums);
}

}  // namespace hfnn
