// Shared by the CUDA kernels: errors, the device of a call, dtypes, 16-byte vectors, launches.
//
// A launch allocates nothing and does not synchronise, so every kernel can be captured into a CUDA graph.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <atomic>
#include <map>
#include <mutex>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "check.h"
#include "tensor.h"

#define HFNN_CUDA_CHECK(call) ::hfnn::cuda_check((call), #call)

namespace hfnn {

inline void cuda_check(cudaError_t error, const char* call) {
  if (error == cudaSuccess) return;
  cudaGetLastError();  // else the next call, maybe torch's, would report it again
  throw std::runtime_error(std::string(call) + ": " + cudaGetErrorName(error) + ", " + cudaGetErrorString(error));
}

// Device properties that a launch needs, read once.
struct Device {
  int multiprocessors, major, shared_per_multiprocessor, shared_per_block;
};

inline const Device& device_of(int ordinal) {
  static const std::vector<Device> devices = [] {
    int count = 0;
    HFNN_CUDA_CHECK(cudaGetDeviceCount(&count));
    std::vector<Device> found(count);
    for (int i = 0; i < count; ++i) {
      const auto read = [i](int& field, cudaDeviceAttr attribute) {
        HFNN_CUDA_CHECK(cudaDeviceGetAttribute(&field, attribute, i));
      };
      read(found[i].multiprocessors, cudaDevAttrMultiProcessorCount);
      read(found[i].major, cudaDevAttrComputeCapabilityMajor);
      read(found[i].shared_per_multiprocessor, cudaDevAttrMaxSharedMemoryPerMultiprocessor);
      read(found[i].shared_per_block, cudaDevAttrMaxSharedMemoryPerBlockOptin);
    }
    return found;
  }();
  return devices.at(ordinal);
}

// Makes a device current, and restores the previous one at the end of the scope.
class DeviceGuard {
 public:
  explicit DeviceGuard(int ordinal) : ordinal_(ordinal) {
    HFNN_CUDA_CHECK(cudaGetDevice(&before_));
    if (before_ != ordinal_) HFNN_CUDA_CHECK(cudaSetDevice(ordinal_));
  }
  ~DeviceGuard() {
    if (before_ != ordinal_) cudaSetDevice(before_);
  }
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

 private:
  int ordinal_, before_ = 0;
};

struct Launch {
  int device;
  int64_t queue;  // the raw stream
  dim3 grid, block;
  size_t shared = 0;     // bytes of dynamic shared memory
  unsigned cluster = 1;  // blocks per cluster
  bool early = false;    // may start before the preceding kernel ends, and waits for it itself
};

// Enables more than 48 KiB of shared memory for a kernel, once per device.
template <auto kKernel>
void allow_shared(const Launch& how) {
  static std::atomic<uint64_t> allowed{0};
  const uint64_t bit = uint64_t(1) << how.device % 64;
  if (how.shared <= 48 << 10 || (allowed & bit)) return;
  HFNN_CUDA_CHECK(cudaFuncSetAttribute(kKernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                       device_of(how.device).shared_per_block));
  HFNN_CUDA_CHECK(
      cudaFuncSetAttribute(kKernel, cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxShared));
  allowed |= bit;
}

// `attributes` has room for two, and must outlive the result.
inline cudaLaunchConfig_t configure(const Launch& how, cudaLaunchAttribute* attributes) {
  cudaLaunchConfig_t config = {};
  config.gridDim = how.grid;
  config.blockDim = how.block;
  config.dynamicSmemBytes = how.shared;
  config.stream = reinterpret_cast<cudaStream_t>(how.queue);
  config.attrs = attributes;
  if (how.cluster > 1) {
    attributes[config.numAttrs].id = cudaLaunchAttributeClusterDimension;
    attributes[config.numAttrs++].val.clusterDim = {how.cluster, 1, 1};
  }
  if (how.early && device_of(how.device).major >= 9) {
    attributes[config.numAttrs].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[config.numAttrs++].val.programmaticStreamSerializationAllowed = 1;
  }
  return config;
}

// Launches a kernel that takes one struct.
template <auto kKernel, class Args>
void launch(const Launch& how, const Args& args) {
  allow_shared<kKernel>(how);
  cudaLaunchAttribute attributes[2];
  const cudaLaunchConfig_t config = configure(how, attributes);
  HFNN_CUDA_CHECK(cudaLaunchKernelEx(&config, kKernel, args));
}

// The maximum number of resident clusters. Fewer than the multiprocessors could hold: a cluster must lie within one
// GPC, and GPCs differ in size.
template <auto kKernel>
int resident_clusters(const Launch& how) {
  static std::mutex mutex;
  static std::map<std::tuple<int, unsigned, size_t>, int> known;
  const std::lock_guard<std::mutex> lock(mutex);
  const auto [at, missing] = known.try_emplace({how.device, how.cluster, how.shared}, 1);
  if (missing) {
    allow_shared<kKernel>(how);
    cudaLaunchAttribute attributes[2];
    const cudaLaunchConfig_t config = configure(how, attributes);
    HFNN_CUDA_CHECK(cudaOccupancyMaxActiveClusters(&at->second, kKernel, &config));
    at->second = std::max(at->second, 1);
  }
  return at->second;
}

// f(T{}) with the C++ type of a dtype. `what` names the tensor in the error.
template <class F>
void with_floating(const char* what, Dtype dtype, F&& f) {
  switch (dtype) {
    case Dtype::float32:
      return f(float{});
    case Dtype::bfloat16:
      return f(__nv_bfloat16{});
    case Dtype::float16:
      return f(__half{});
    default:
      break;
  }
  throw std::invalid_argument(std::string(what) + " is " + name(dtype) +
                              "; the CUDA kernels take float32, bfloat16 and float16");
}

template <class T>
constexpr Dtype dtype_of = std::is_same_v<T, float>           ? Dtype::float32
                           : std::is_same_v<T, __nv_bfloat16> ? Dtype::bfloat16
                                                              : Dtype::float16;

inline bool aligned(std::initializer_list<const void*> pointers) {
  uintptr_t bits = 0;
  for (const void* p : pointers) bits |= reinterpret_cast<uintptr_t>(p);
  return bits % 16 == 0;
}

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Elements of T in the 16 bytes of one load or store.
template <class T>
constexpr int kWidth = 16 / sizeof(T);

template <class T, int N>
struct alignas(N * sizeof(T) < 16 ? N * sizeof(T) : 16) Vec {
  T at[N];
};

__device__ inline float to_float(float x) { return x; }
__device__ inline float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ inline float to_float(__half x) { return __half2float(x); }

__device__ inline void store2(float* to, float a, float b) { to[0] = a, to[1] = b; }
__device__ inline void store2(__nv_bfloat16* to, float a, float b) {
  *reinterpret_cast<__nv_bfloat162*>(to) = __floats2bfloat162_rn(a, b);
}
__device__ inline void store2(__half* to, float a, float b) {
  *reinterpret_cast<__half2*>(to) = __floats2half2_rn(a, b);
}
__device__ inline void store1(float* to, float a) { *to = a; }
__device__ inline void store1(__nv_bfloat16* to, float a) { *to = __float2bfloat16_rn(a); }
__device__ inline void store1(__half* to, float a) { *to = __float2half_rn(a); }

template <class T, int N>
__device__ inline void to_float(const Vec<T, N>& vec, float (&x)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) x[i] = to_float(vec.at[i]);
}
// A bfloat16 is the upper half of a float32: one instruction each. The compiler would need three for two.
template <int N>
__device__ inline void to_float(const Vec<__nv_bfloat16, N>& vec, float (&x)[N]) {
  if constexpr (N == 1) {
    x[0] = to_float(vec.at[0]);
  } else {
    const unsigned* pairs = reinterpret_cast<const unsigned*>(vec.at);
#pragma unroll
    for (int i = 0; i < N; i += 2) {
      x[i] = __uint_as_float(pairs[i / 2] << 16);
      x[i + 1] = __uint_as_float(pairs[i / 2] & 0xffff0000u);
    }
  }
}

template <int N, class T>
__device__ inline void load(const T* from, float (&x)[N]) {
  to_float(*reinterpret_cast<const Vec<T, N>*>(from), x);
}

// N elements that no kernel writes during this one. Not __ldg: the compiler assumes that such loads are always safe,
// and hoists them out of the branch that checks for a null pointer.
template <int N, class T>
__device__ inline Vec<T, N> load_constant(const T* from) {
  if constexpr (N == 1) {
    return {*from};
  } else if constexpr (sizeof(T) * N < 16) {
    return *reinterpret_cast<const Vec<T, N>*>(from);
  } else {
    union {
      uint4 quads[sizeof(T) * N / 16];
      Vec<T, N> vec;
    } raw;
#pragma unroll
    for (int q = 0; q < int(sizeof(T) * N / 16); ++q)
      asm("ld.global.nc.v4.u32 {%0, %1, %2, %3}, [%4];"
          : "=r"(raw.quads[q].x), "=r"(raw.quads[q].y), "=r"(raw.quads[q].z), "=r"(raw.quads[q].w)
          : "l"(reinterpret_cast<const uint4*>(from) + q));
    return raw.vec;
  }
}

template <int N, class T>
__device__ inline void store(T* to, const float (&x)[N]) {
  Vec<T, N> vec;
#pragma unroll
  for (int i = 0; i + 1 < N; i += 2) store2(vec.at + i, x[i], x[i + 1]);
  if constexpr (N % 2) store1(vec.at + N - 1, x[N - 1]);
  *reinterpret_cast<Vec<T, N>*>(to) = vec;
}

}  // namespace hfnn
