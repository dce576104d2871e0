// Philox4x32-10, the counter-based random generator of Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC
// 2011): 128-bit counter in, 128 random bits out, integers only. Shared by host and device code.
#pragma once
#include <cstdint>

#ifdef __CUDACC__
#define HFNN_HOST_DEVICE __host__ __device__
#else
#define HFNN_HOST_DEVICE __attribute__((always_inline))
#endif

namespace hfnn {

// Words 0 to 3. Named members, because arrays would prevent vectorisation.
struct Words {
  uint32_t a, b, c, d;
};

// One instruction on the device. For the C++ expression, nvcc also adds a zero to the high half.
HFNN_HOST_DEVICE inline uint64_t wide_product(uint32_t a, uint32_t b) {
#ifdef __CUDA_ARCH__
  uint64_t product;
  asm("mul.wide.u32 %0, %1, %2;" : "=l"(product) : "r"(a), "r"(b));
  return product;
#else
  return uint64_t(a) * b;
#endif
}

HFNN_HOST_DEVICE inline Words philox_round(Words x, uint32_t key_low, uint32_t key_high) {
  const uint64_t p = wide_product(x.a, 0xD2511F53u), q = wide_product(x.c, 0xCD9E8D57u);
  return {uint32_t(q >> 32) ^ x.b ^ key_low, uint32_t(q), uint32_t(p >> 32) ^ x.d ^ key_high, uint32_t(p)};
}

// Key increments per round: the golden ratio and sqrt(3) - 1.
constexpr uint32_t kPhiloxLow = 0x9E3779B9u, kPhiloxHigh = 0xBB67AE85u;

HFNN_HOST_DEVICE inline Words philox(Words x, uint32_t key_low, uint32_t key_high) {
#ifdef __CUDA_ARCH__
#pragma unroll
#endif
  for (int round = 0; round < 10; ++round) {
    x = philox_round(x, key_low, key_high);
    key_low += kPhiloxLow;
    key_high += kPhiloxHigh;
  }
  return x;
}

// The words of four consecutive elements. dropout.h explains the counter, and why its last word is not 0.
HFNN_HOST_DEVICE inline Words dropout_counter(uint64_t counter) {
  return {uint32_t(counter), uint32_t(counter >> 32), 0u, 0x68666e6eu};
}
HFNN_HOST_DEVICE inline Words dropout_words(uint64_t seed, uint64_t counter) {
  return philox(dropout_counter(counter), uint32_t(seed), uint32_t(seed >> 32));
}

}  // namespace hfnn
