// Packs and unpacks eight codes of W bits at a time: between a 64-bit word with a code in the low bits of each byte,
// and W bytes with the eight codes side by side. The first code or byte is the lowest, as in memory. Only shifts and
// masks are used, so the vectoriser works on several words at once.
#pragma once
#include "cpu.h"

namespace hfnn {

// A mask of the low `bits` of every field of `field` bits.
constexpr uint64_t every(int field, int bits) {
  uint64_t mask = 0;
  for (int i = 0; i < 64; i += field) mask |= (~uint64_t(0) >> (64 - bits)) << i;
  return mask;
}

// In every field of 2 F bits: moves the low `bits` of the upper half next to those of the lower half, or back.
template <int F, int bits>
HFNN_INLINE uint64_t join_halves(uint64_t x) {
  constexpr uint64_t low = every(2 * F, bits);
  return (x & low) | (x >> (F - bits) & low << bits);
}
template <int F, int bits>
HFNN_INLINE uint64_t part_halves(uint64_t x) {
  constexpr uint64_t low = every(2 * F, bits);
  return (x & low) | (x & low << bits) << (F - bits);
}

// Bits of a code above the lowest W are dropped.
template <int W>
HFNN_INLINE uint64_t squeeze(uint64_t x) {
  return join_halves<32, 4 * W>(join_halves<16, 2 * W>(join_halves<8, W>(x)));
}
template <int W>
HFNN_INLINE uint64_t spread(uint64_t x) {
  return part_halves<8, W>(part_halves<16, 2 * W>(part_halves<32, 4 * W>(x)));
}

// W bytes of memory as a number. Typed loads, because the vectoriser does not handle memcpy of 1, 2 or 4 bytes.
template <class T>
struct Unaligned {
  using type __attribute__((may_alias, aligned(1))) = T;
};
template <int W>
HFNN_INLINE uint64_t load_word(const uint8_t* p) {
  if constexpr (W == 1) return *p;
  if constexpr (W == 2) return *reinterpret_cast<const Unaligned<uint16_t>::type*>(p);
  if constexpr (W == 4) return *reinterpret_cast<const Unaligned<uint32_t>::type*>(p);
  if constexpr (W == 5) return load_word<4>(p) | uint64_t(p[4]) << 32;
  uint64_t word = 0;
  std::memcpy(&word, p, W);
  return word;
}
template <int W>
HFNN_INLINE void store_word(uint8_t* p, uint64_t word) {
  if constexpr (W == 1)
    *p = uint8_t(word);
  else if constexpr (W == 2)
    *reinterpret_cast<Unaligned<uint16_t>::type*>(p) = uint16_t(word);
  else if constexpr (W == 4)
    *reinterpret_cast<Unaligned<uint32_t>::type*>(p) = uint32_t(word);
  else if constexpr (W == 5) {
    store_word<4>(p, word);
    p[4] = uint8_t(word >> 32);
  } else
    std::memcpy(p, &word, W);
}

// Packs n codes, one byte each, into ceil(n W / 8) bytes. The bits after the last code become 0.
template <int W>
HFNN_INLINE void pack_run(const uint8_t* codes, uint8_t* packed, int64_t n) {
#pragma omp simd
  for (int64_t g = 0; g < n / 8; ++g) {
    store_word<W>(packed + W * g, squeeze<W>(load_word<8>(codes + 8 * g)));
  }
  if (const int64_t rest = n % 8) {
    uint64_t word = 0;
    std::memcpy(&word, codes + n - rest, size_t(rest));
    word = squeeze<W>(word);
    std::memcpy(packed + W * (n / 8), &word, size_t(rest * W + 7) / 8);
  }
}

template <int W>
HFNN_INLINE void unpack_run(const uint8_t* packed, uint8_t* codes, int64_t n) {
#pragma omp simd
  for (int64_t g = 0; g < n / 8; ++g) {
    store_word<8>(codes + 8 * g, spread<W>(load_word<W>(packed + W * g)));
  }
  if (const int64_t rest = n % 8) {
    uint64_t word = 0;
    std::memcpy(&word, packed + W * (n / 8), size_t(rest * W + 7) / 8);
    word = spread<W>(word);
    std::memcpy(codes + n - rest, &word, size_t(rest));
  }
}

inline int64_t packed_bytes(int64_t codes, int64_t width) { return (codes * width + 7) / 8; }

}  // namespace hfnn
