// CRC-32 of zlib and of Ethernet: polynomial 0x04C11DB7, bits reflected, the state inverted at both ends.
#pragma once
#include <cstddef>
#include <cstdint>

namespace hfrecord {

// The checksum of `size` bytes, going on from that of what stood before them, 0 for nothing.
uint32_t crc32(uint32_t before, const void* data, size_t size);
// The same, and a copy of the bytes: what is read once is copied on the way.
uint32_t crc32_copied(uint32_t before, const void* data, size_t size, void* to);

// Ways to compute it: "table" on any processor, "pclmul" and "vpclmul" (512 bits) on those that have the instructions.
// The last one of these is what the functions above use. The state is the checksum, inverted.
struct Way {
  const char* name;
  uint32_t (*state)(uint32_t state, const unsigned char* data, size_t size, unsigned char* to);
  uint32_t (*copied)(uint32_t state, const unsigned char* data, size_t size, unsigned char* to);
};
const Way* ways(size_t* count);

}  // namespace hfrecord
