// Reading records of a file, by what its index says of them.
#pragma once
#include <cstddef>
#include <cstdint>

namespace hfrecord {

// An entry of an index, as hfrecord/format.py has it. Little-endian, as the processor is.
struct Entry {
  uint64_t offset, length;
  uint32_t crc, codec;
};
static_assert(sizeof(Entry) == 24);

// Reads `count` records of a file, each to its own place: those that stand behind one another by one system call.
// How many are there in full, from the first one on.
size_t read(int fd, const Entry* entries, size_t count, unsigned char* const* places);

// Whether a record's bytes are those that were written. own: of hfrecord's format, where the checksum is also that of
// the record's number and place.
bool matches(const Entry& entry, int64_t number, bool own, const unsigned char* bytes);

// Starts to read records, and returns.
void advise(int fd, const Entry* entries, size_t count);

}  // namespace hfrecord
