// What the CUDA kernels share: errors, the device of a call, dtypes, 16-byte vectors, launching.
//
// A launch allocates nothing and waits for nothing, so that every kernel can be captured into a CUDA graph.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "check.h"
#include "tensor.h"

#define HFNN_CUDA_CHECK(call) ::hfnn::cuda_check((call), #call)

namespace hfnn {

inline void cuda_check(cudaError_t error, const char* call) {
  if (error == cudaSuccess) return;
  cudaGetLastError();  // or the next call, which may be torch's, would report it once more
  throw std::runtime_error(std::string(call) + ": " + cudaGetErrorName(error) + ", " + cudaGetErrorString(error));
}

// What a launch has to know of a device, read once.
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

// Makes a device current, and the one before current again at the end of the scope.
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

// A constant of the launch. A build with -DHFNN_TUNE reads it from the environment: HFNN_TUNE="bs=3,br=2".
#ifdef HFNN_TUNE
inline int tuned(const char* key, int value) {
  const char* text = std::getenv("HFNN_TUNE");
  const char* found = text ? std::strstr(text, key) : nullptr;
  return found ? std::atoi(found + std::strlen(key) + 1) : value;
}
#else
constexpr int tuned(const char*, int value) { return value; }
#endif

struct Launch {
  int device;
  int64_t queue;  // the raw stream
  dim3 grid, block;
  size_t shared = 0;     // bytes of dynamic shared memory
  unsigned cluster = 1;  // blocks per cluster
  bool early = false;    // may start before the kernel in front of it has ended, and waits for it by itself
};

// One kernel that takes one struct. More than 48 KiB of shared memory are allowed to a kernel once per device.
template <auto kKernel, class Args>
void launch(const Launch& how, const Args& args) {
  if (how.shared > 48 << 10) {
    static std::atomic<uint64_t> allowed{0};
    const uint64_t bit = uint64_t(1) << how.device % 64;
    if (!(allowed & bit)) {
      HFNN_CUDA_CHECK(cudaFuncSetAttribute(kKernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                           device_of(how.device).shared_per_block));
      HFNN_CUDA_CHECK(cudaFuncSetAttribute(kKernel, cudaFuncAttributePreferredSharedMemoryCarveout,
                                           cudaSharedmemCarveoutMaxShared));
      allowed |= bit;
    }
  }
  cudaLaunchAttribute attributes[2];
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
  HFNN_CUDA_CHECK(cudaLaunchKernelEx(&config, kKernel, args));
}

// f(T{}) with the C++ type of a dtype; `what` names the tensor in the error.
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

inline bool aligned(std::initializer_list<const void*> pointers) {
  uintptr_t bits = 0;
  for (const void* p : pointers) bits |= reinterpret_cast<uintptr_t>(p);
  return bits % 16 == 0;
}

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Elements of T in the 16 bytes that a thread loads or stores at once.
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

template <int N, class T>
__device__ inline void load(const T* from, float (&x)[N]) {
  const auto vec = *reinterpret_cast<const Vec<T, N>*>(from);
#pragma unroll
  for (int i = 0; i < N; ++i) x[i] = to_float(vec.at[i]);
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
