// The kernels' access to the hardware: memory accesses that other GPUs see, the clock, conversions, and arithmetic
// without contraction. tests/hfreduce/emulated defines the same names for CPU threads, so that tests run the kernels
// unchanged.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <stdexcept>
#include <string>

namespace hfreduce::gpu {

// Enqueues a kernel. Throws if CUDA rejects it. Not by <<<>>>, whose errors cannot be told from earlier ones.
template <class Launch, class... Parameters, class... Arguments>
void launch_kernel(const Launch& launch, void (*kernel)(Parameters...), const Arguments&... arguments) {
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(launch.blocks), config.blockDim = dim3(launch.threads);
  config.stream = static_cast<cudaStream_t>(launch.stream);
  const cudaError_t error = cudaLaunchKernelEx(&config, kernel, Parameters(arguments)...);
  if (error != cudaSuccess)
    throw std::runtime_error(std::string("a kernel was not launched: ") + cudaGetErrorString(error));
}

// 16 bytes: the widest access of a thread.
struct alignas(16) Quad {
  uint32_t words[4];
};

// Loads bypass the L1 cache, which is not coherent with peers' writes.
__device__ __forceinline__ Quad load_quad(const void* from) {
  const uint4 x = __ldcg(static_cast<const uint4*>(from));
  return {{x.x, x.y, x.z, x.w}};
}
__device__ __forceinline__ void store_quad(void* to, const Quad& x) {
  __stwb(static_cast<uint4*>(to), make_uint4(x.words[0], x.words[1], x.words[2], x.words[3]));
}

template <int kWords>
struct Words {
  uint32_t words[kWords];
};
__device__ __forceinline__ Words<2> load_pair(const void* from) {
  const uint2 x = __ldcg(static_cast<const uint2*>(from));
  return {{x.x, x.y}};
}
__device__ __forceinline__ void store_pair(void* to, const Words<2>& x) {
  __stwb(static_cast<uint2*>(to), make_uint2(x.words[0], x.words[1]));
}

// Flags. What a thread has done, or has seen others do, before it raises a flag happens before what another thread does
// after seeing the flag.
__device__ __forceinline__ void raise_flag(uint64_t* flag, uint64_t value) {
  asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(flag), "l"(value) : "memory");
}
__device__ __forceinline__ uint64_t see_flag(const uint64_t* flag) {
  uint64_t value;
  asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(flag) : "memory");
  return value;
}

// Two packets. Each is stored and seen as a whole, with no ordering relative to other accesses.
struct Packets {
  uint64_t first, second;
};
__device__ __forceinline__ void send_packets(void* to, Packets x) {
  asm volatile("st.relaxed.sys.global.v2.u64 [%0], {%1, %2};" ::"l"(to), "l"(x.first), "l"(x.second) : "memory");
}
__device__ __forceinline__ Packets see_packets(const void* from) {
  Packets x;
  asm volatile("ld.relaxed.sys.global.v2.u64 {%0, %1}, [%2];" : "=l"(x.first), "=l"(x.second) : "l"(from) : "memory");
  return x;
}

// Words of the board, in host memory.
__device__ __forceinline__ uint32_t read_board(const uint32_t* word) {
  uint32_t value;
  asm volatile("ld.relaxed.sys.u32 %0, [%1];" : "=r"(value) : "l"(word) : "memory");
  return value;
}
__device__ __forceinline__ void write_board(uint32_t* word, uint32_t value) {
  asm volatile("st.release.sys.u32 [%0], %1;" ::"l"(word), "r"(value) : "memory");
}

__device__ __forceinline__ int64_t nanoseconds() {
  int64_t now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  return now;
}
__device__ __forceinline__ void relax() {}  // between two polls: memory latency is enough
constexpr uint32_t kLooks = 1 << 14;        // polls before a waiting thread checks other things: about 10 ms

// Each rounded, never contracted to a fused multiply-add.
__device__ __forceinline__ float add(float a, float b) { return __fadd_rn(a, b); }
__device__ __forceinline__ double add(double a, double b) { return __dadd_rn(a, b); }
__device__ __forceinline__ float multiply(float a, float b) { return __fmul_rn(a, b); }
__device__ __forceinline__ double multiply(double a, double b) { return __dmul_rn(a, b); }
__device__ __forceinline__ float divide(float a, float b) { return __fdiv_rn(a, b); }
__device__ __forceinline__ double divide(double a, double b) { return __ddiv_rn(a, b); }

// Two 16-bit floats in a word, the first in the lower half.
__device__ __forceinline__ void widen_f16(uint32_t word, float& low, float& high) {
  asm("{ .reg .b16 a, b; mov.b32 {a, b}, %2; cvt.f32.f16 %0, a; cvt.f32.f16 %1, b; }"
      : "=f"(low), "=f"(high)
      : "r"(word));
}
__device__ __forceinline__ uint32_t narrow_f16(float low, float high) {
  uint32_t word;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
  return word;
}
__device__ __forceinline__ uint32_t narrow_bf16(float low, float high) {
  uint32_t word;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
  return word;
}

}  // namespace hfreduce::gpu
