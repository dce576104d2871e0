// CRC-32 of zlib and of Ethernet: polynomial 0x04C11DB7, bits reflected, the state inverted at both ends.
#pragma once
#include <cstddef>
#include <cstdint>

namespace hfrecord {

// The checksum of `size` bytes, going on from that of what stood before them, 0 for nothing.
uint32_t crc32(uint32_t before, const void* data, size_t size);

// Ways to compute it: "table" on any processor, "pclmul" and "vpclmul" (512 bits) on those that have the instructions.
// The last one of these is what crc32 uses.
struct Way {
  const char* name;
  uint32_t (*state)(uint32_t state, const unsigned char* data, size_t size);
};
const Way* ways(size_t* count);
uint32_t crc32(const Way& way, uint32_t before, const void* data, size_t size);

}  // namespace hfrecord
