// Reading records of a file, by what its index says of them.
#pragma once
#include <atomic>
#include <cstddef>
#include <cstdint>

namespace hfrecord {

// An entry of an index, as hfrecord/format.py has it. Little-endian, as the processor is.
struct Entry {
  uint64_t offset, length;
  uint32_t crc, codec;
};
static_assert(sizeof(Entry) == 24);

// A file that somebody has opened and closes, which threads and forked processes may share.
//
// Whether its pages are in memory is found out by looks at some bytes of a batch, before it is advised. While all that
// were looked at lately are in memory, the file counts as warm: nothing is advised, and records are copied from a
// mapping, which spares a system call each. Otherwise they are read, for a read fetches all of a record at once and a
// mapping page by page.
class File {
 public:
  // size: bytes of the file that count, of which records may be anywhere. own: of hfrecord's format, where a checksum
  // is also that of the record's number and place.
  File(int fd, uint64_t size, bool own) : fd_(fd), size_(size), own_(own) {}
  File(const File&) = delete;
  File& operator=(const File&) = delete;
  ~File();

  // Whether all of these lie in the file.
  bool holds(const Entry* entries, size_t count) const;

  // Starts to read records, those that stand behind one another at once, and returns.
  void advise(const Entry* entries, size_t count);

  // Records, each to its own place, and where `check` is said their checksums: how many are there and right, from the
  // first one on.
  size_t read(const Entry* entries, const int64_t* numbers, size_t count, unsigned char* const* places, bool check);

  // Looks whether records are in memory, one byte of some of them.
  void look(const Entry* entries, size_t count);
  bool warm() const { return found_ >= ENOUGH; }

 private:
  static constexpr int LOOKS = 4;     // of a batch
  static constexpr int ENOUGH = 128;  // looks behind one another that have found what they looked for

  size_t read_cold(const Entry* entries, size_t count, unsigned char* const* places) const;
  const unsigned char* mapped();
  uint32_t seed(const Entry& entry, int64_t number) const;

  const int fd_;
  const uint64_t size_;
  const bool own_;
  std::atomic<int> found_{0};
  std::atomic<unsigned char*> map_{nullptr};
};

}  // namespace hfrecord
