// CRC-32 as in zlib and Ethernet: polynomial 0x04C11DB7, reflected bits, state inverted at both ends.
#pragma once
#include <cstddef>
#include <cstdint>

namespace hfrecord {

// The checksum of `size` bytes, continued from `before`, the checksum of the preceding bytes (0 if none).
uint32_t crc32(uint32_t before, const void* data, size_t size);
// The same, and copies the bytes to `to` in the same pass.
uint32_t crc32_copied(uint32_t before, const void* data, size_t size, void* to);

// Implementations: "table" on every processor; "pclmul" and "vpclmul" (512 bits) where the instructions exist. The
// functions above use the last one listed. The state is the inverted checksum.
struct Way {
  const char* name;
  uint32_t (*state)(uint32_t state, const unsigned char* data, size_t size, unsigned char* to);
  uint32_t (*copied)(uint32_t state, const unsigned char* data, size_t size, unsigned char* to);
};
const Way* ways(size_t* count);

}  // namespace hfrecord
