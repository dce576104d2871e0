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

// Whether files are in memory, by looks at some bytes of what is about to be advised. While all that was looked at
// lately was there, they count as warm: nothing is advised, and records are copied from a mapping, which spares a
// system call each. Otherwise they are read, for a read fetches all of a record at once, and a mapping page by page.
class Looks {
 public:
  static constexpr size_t OF_BATCH = 4;
  static constexpr uint64_t LARGE = 64 << 10;  // bytes from which a look at each record costs next to nothing

  bool warm() const { return found_ >= ENOUGH; }
  void found(bool there) {
    if (!there) {
      found_ = 0;
    } else if (!warm()) {
      ++found_;
    }
  }

 private:
  static constexpr int ENOUGH = 64;  // behind one another that have found what they looked for
  std::atomic<int> found_{0};
};

// A file that somebody has opened and closes, which threads and forked processes may share.
class File {
 public:
  // size: bytes of the file that count, of which records may be anywhere. own: of hfrecord's format, where a checksum
  // is also that of the record's number and place. index: of `records` entries, or of an .ffr file its checksums and
  // offsets; it stays where it is.
  File(int fd, uint64_t size, bool own, const unsigned char* index, uint64_t records)
      : fd_(fd), size_(size), own_(own), index_(index), records_(records) {}
  File(const File&) = delete;
  File& operator=(const File&) = delete;
  ~File();

  // Whether the file has as many bytes as when it was opened: if not, its index may be gone, and a look at it ends the
  // process.
  bool whole() const;

  // What the index says of a record. False for one that does not lie in the file.
  bool find(int64_t number, Entry* entry) const;

  // Looks whether a record is in memory, at its last byte.
  void look(const Entry& entry, Looks& looks) const;

  // Starts to read records, those that stand behind one another at once, and returns.
  void advise(const Entry* entries, size_t count) const;

  // Records, each to its own place, and where `check` is said their checksums: how many are there and right, from the
  // first one on.
  size_t read(const Entry* entries, const int64_t* numbers, size_t count, unsigned char* const* places, bool check,
              bool warm);

 private:
  size_t read_cold(const Entry* entries, size_t count, unsigned char* const* places) const;
  const unsigned char* mapped();
  uint32_t seed(const Entry& entry, int64_t number) const;

  const int fd_;
  const uint64_t size_;
  const bool own_;
  const unsigned char* const index_;
  const uint64_t records_;
  std::atomic<unsigned char*> map_{nullptr};
};

}  // namespace hfrecord
