// CRC-32 by folding with carry-less products: Gopal, Ozturk, Guilford, Wolrich, Feghali, Dixon, Karakoyunlu, "Fast CRC
// Computation for Generic Polynomials Using PCLMULQDQ Instruction", Intel white paper 323102, 2009. On other
// processors, and for the last bytes, by tables of eight bytes at once: Kounavis and Berry, "A systematic approach to
// building high performance software-based CRC generators", ISCC 2005.
#include "crc32.h"

#include <array>
#include <cstring>
#include <vector>

#if defined(__x86_64__) && defined(__GNUC__)
#define HFRECORD_FOLDS
#include <immintrin.h>
#endif

namespace hfrecord {
namespace {

constexpr uint32_t POLYNOMIAL = 0xEDB88320;  // reflected: bit 31 is the coefficient of x^0

// state * x^bits mod P, reflected.
constexpr uint32_t times_x(uint32_t state, int bits) {
  for (; bits > 0; --bits) state = (state >> 1) ^ ((state & 1) ? POLYNOMIAL : 0);
  return state;
}

using Tables = std::array<std::array<uint32_t, 256>, 8>;

constexpr Tables make_tables() {
  Tables tables{};
  for (uint32_t byte = 0; byte < 256; ++byte) tables[0][byte] = times_x(byte, 8);
  for (size_t k = 1; k < 8; ++k) {
    for (size_t byte = 0; byte < 256; ++byte) {
      const uint32_t before = tables[k - 1][byte];
      tables[k][byte] = (before >> 8) ^ tables[0][before & 255];
    }
  }
  return tables;
}

constexpr Tables TABLES = make_tables();

template <bool COPIES>
uint32_t by_table(uint32_t state, const unsigned char* data, size_t size, unsigned char* to) {
  if (COPIES && size > 0) std::memcpy(to, data, size);
  for (; size >= 8; data += 8, size -= 8) {
    state ^= static_cast<uint32_t>(data[0]) | static_cast<uint32_t>(data[1]) << 8 |
             static_cast<uint32_t>(data[2]) << 16 | static_cast<uint32_t>(data[3]) << 24;
    state = TABLES[7][state & 255] ^ TABLES[6][state >> 8 & 255] ^ TABLES[5][state >> 16 & 255] ^
            TABLES[4][state >> 24] ^ TABLES[3][data[4]] ^ TABLES[2][data[5]] ^ TABLES[1][data[6]] ^ TABLES[0][data[7]];
  }
  for (; size > 0; ++data, --size) state = (state >> 8) ^ TABLES[0][(state ^ *data) & 255];
  return state;
}

#ifdef HFRECORD_FOLDS

// 16 bytes are a polynomial of degree 127 whose highest coefficient is in bit 0. To move it over `bits` of message, its
// first eight bytes are multiplied by x^(bits + 64) and the others by x^bits, each mod P. A carry-less product of
// reflected words is the reflected product times x, so the powers are one lower. A remainder is in the upper half of
// its word.
struct Move {
  uint64_t first, second;
  constexpr explicit Move(int bits) : first(power(bits + 63)), second(power(bits - 1)) {}
  static constexpr uint64_t power(int n) { return static_cast<uint64_t>(times_x(0x80000000, n)) << 32; }
};

#define HFRECORD_PCLMUL __attribute__((target("pclmul,sse4.1")))
#define HFRECORD_VPCLMUL __attribute__((target("avx512f,avx512vl,avx512dq,vpclmulqdq,pclmul,sse4.1")))

// Loads 16 bytes. With COPIES, also stores them at `to` and advances it.
template <bool COPIES>
HFRECORD_PCLMUL inline __m128i load(const unsigned char* data, unsigned char*& to) {
  const __m128i x = _mm_loadu_si128(reinterpret_cast<const __m128i*>(data));
  if (COPIES) _mm_storeu_si128(reinterpret_cast<__m128i*>(to), x), to += 16;
  return x;
}

HFRECORD_PCLMUL inline __m128i moved(__m128i x, __m128i by) {
  return _mm_xor_si128(_mm_clmulepi64_si128(x, by, 0x00), _mm_clmulepi64_si128(x, by, 0x11));
}

HFRECORD_PCLMUL inline __m128i constant(Move move) {
  return _mm_set_epi64x(static_cast<long long>(move.second), static_cast<long long>(move.first));
}

// x stands for all bytes before `data`. Folds in the rest, then takes the CRC of the 16 bytes of x as of a message.
template <bool COPIES>
HFRECORD_PCLMUL inline uint32_t finished(__m128i x, const unsigned char* data, size_t size, unsigned char* to) {
  constexpr Move by_16(128);
  const __m128i by = constant(by_16);
  for (; size >= 16; data += 16, size -= 16) x = _mm_xor_si128(moved(x, by), load<COPIES>(data, to));
  unsigned char bytes[16];
  _mm_storeu_si128(reinterpret_cast<__m128i*>(bytes), x);
  return by_table<COPIES>(by_table<false>(0, bytes, 16, nullptr), data, size, to);
}

template <bool COPIES>
HFRECORD_PCLMUL uint32_t by_pclmul(uint32_t state, const unsigned char* data, size_t size, unsigned char* to) {
  if (size < 64) return by_table<COPIES>(state, data, size, to);
  constexpr Move by_64(512), by_16(128);
  __m128i x[4];
  for (int k = 0; k < 4; ++k) x[k] = load<COPIES>(data + 16 * k, to);
  x[0] = _mm_xor_si128(x[0], _mm_cvtsi32_si128(static_cast<int>(state)));
  data += 64, size -= 64;
  const __m128i far = constant(by_64), near = constant(by_16);
  for (; size >= 64; data += 64, size -= 64) {
    for (int k = 0; k < 4; ++k) x[k] = _mm_xor_si128(moved(x[k], far), load<COPIES>(data + 16 * k, to));
  }
  for (int k = 1; k < 4; ++k) x[k] = _mm_xor_si128(moved(x[k - 1], near), x[k]);
  return finished<COPIES>(x[3], data, size, to);
}

template <bool COPIES>
HFRECORD_VPCLMUL inline __m512i load_512(const unsigned char* data, unsigned char*& to) {
  const __m512i x = _mm512_loadu_si512(data);
  if (COPIES) _mm512_storeu_si512(to, x), to += 64;
  return x;
}

HFRECORD_VPCLMUL inline __m512i constant_512(Move move) {
  const auto a = static_cast<long long>(move.first), b = static_cast<long long>(move.second);
  return _mm512_set_epi64(b, a, b, a, b, a, b, a);
}

HFRECORD_VPCLMUL inline __m512i moved(__m512i x, __m512i by, __m512i more) {
  constexpr int XOR_OF_THREE = 0x96;
  return _mm512_ternarylogic_epi64(_mm512_clmulepi64_epi128(x, by, 0x00), _mm512_clmulepi64_epi128(x, by, 0x11), more,
                                   XOR_OF_THREE);
}

template <bool COPIES>
HFRECORD_VPCLMUL uint32_t by_vpclmul(uint32_t state, const unsigned char* data, size_t size, unsigned char* to) {
  if (size < 512) return by_pclmul<COPIES>(state, data, size, to);
  constexpr Move by_256(2048), by_64(512), by_16(128);
  __m512i x[4];
  for (int k = 0; k < 4; ++k) x[k] = load_512<COPIES>(data + 64 * k, to);
  x[0] = _mm512_xor_si512(x[0], _mm512_zextsi128_si512(_mm_cvtsi32_si128(static_cast<int>(state))));
  data += 256, size -= 256;
  const __m512i far = constant_512(by_256), mid = constant_512(by_64);
  for (; size >= 256; data += 256, size -= 256) {
    for (int k = 0; k < 4; ++k) x[k] = moved(x[k], far, load_512<COPIES>(data + 64 * k, to));
  }
  for (int k = 1; k < 4; ++k) x[k] = moved(x[k - 1], mid, x[k]);
  for (; size >= 64; data += 64, size -= 64) x[3] = moved(x[3], mid, load_512<COPIES>(data, to));
  alignas(64) unsigned char lanes[64];
  _mm512_store_si512(lanes, x[3]);
  unsigned char* nowhere = nullptr;
  const __m128i near = constant(by_16);
  __m128i whole = load<false>(lanes, nowhere);
  for (int k = 1; k < 4; ++k) whole = _mm_xor_si128(moved(whole, near), load<false>(lanes + 16 * k, nowhere));
  return finished<COPIES>(whole, data, size, to);
}

#endif

std::vector<Way> found() {
  std::vector<Way> ways{{"table", by_table<false>, by_table<true>}};
#ifdef HFRECORD_FOLDS
  __builtin_cpu_init();
  if (__builtin_cpu_supports("pclmul") && __builtin_cpu_supports("sse4.1")) {
    ways.push_back({"pclmul", by_pclmul<false>, by_pclmul<true>});
    if (__builtin_cpu_supports("vpclmulqdq") && __builtin_cpu_supports("avx512f") &&
        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq")) {
      ways.push_back({"vpclmul", by_vpclmul<false>, by_vpclmul<true>});
    }
  }
#endif
  return ways;
}

const std::vector<Way> WAYS = found();

}  // namespace

const Way* ways(size_t* count) {
  *count = WAYS.size();
  return WAYS.data();
}

uint32_t crc32(uint32_t before, const void* data, size_t size) {
  return ~WAYS.back().state(~before, static_cast<const unsigned char*>(data), size, nullptr);
}

uint32_t crc32_copied(uint32_t before, const void* data, size_t size, void* to) {
  return ~WAYS.back().copied(~before, static_cast<const unsigned char*>(data), size, static_cast<unsigned char*>(to));
}

}  // namespace hfrecord
