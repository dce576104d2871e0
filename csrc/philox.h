// Philox4x32-10, the counter-based random generator of Salmon et al., "Parallel random numbers: as easy as 1, 2, 3"
// (SC 2011): 128 bits of counter in, 128 random bits out, integers only. Host and device code share these lines.
#pragma once
#include <cstdint>

#ifdef __CUDACC__
#define HFNN_HOST_DEVICE __host__ __device__
#else
#define HFNN_HOST_DEVICE __attribute__((always_inline))
#endif

namespace hfnn {

// Words 0 to 3, under a name each: arrays would keep the vectoriser away.
struct Words {
  uint32_t a, b, c, d;
};

HFNN_HOST_DEVICE inline Words philox_round(Words x, uint32_t key_low, uint32_t key_high) {
  const uint64_t p = uint64_t(x.a) * 0xD2511F53u, q = uint64_t(x.c) * 0xCD9E8D57u;
  return {uint32_t(q >> 32) ^ x.b ^ key_low, uint32_t(q), uint32_t(p >> 32) ^ x.d ^ key_high, uint32_t(p)};
}

HFNN_HOST_DEVICE inline Words philox(Words x, uint32_t key_low, uint32_t key_high) {
#ifdef __CUDACC__
#pragma unroll
#endif
  for (int round = 0; round < 10; ++round) {
    x = philox_round(x, key_low, key_high);
    key_low += 0x9E3779B9u;  // Weyl steps: the golden ratio and sqrt(3) - 1
    key_high += 0xBB67AE85u;
  }
  return x;
}

// The words of four elements in a row; dropout.h says which, and why the last word of the counter is not 0.
HFNN_HOST_DEVICE inline Words dropout_words(uint64_t seed, uint64_t counter) {
  return philox({uint32_t(counter), uint32_t(counter >> 32), 0u, 0x68666e6eu}, uint32_t(seed), uint32_t(seed >> 32));
}

}  // namespace hfnn
