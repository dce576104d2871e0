// Reads records of a file, located by its index.
#pragma once
#include <atomic>
#include <cstddef>
#include <cstdint>

namespace hfrecord {

// An index entry, as defined in hfrecord/format.py. Little-endian, like the processor.
struct Entry {
  uint64_t offset, length;
  uint32_t crc, codec;
};
static_assert(sizeof(Entry) == 24);

// Whether files are in the page cache, estimated by probing some bytes of what is about to be advised. While all recent
// probes hit, the files count as warm: nothing is advised, and records are copied from a mapping, which saves one
// system call each. Otherwise records are read by pread, which fetches a whole record at once; a mapping faults page by
// page.
class Looks {
 public:
  static constexpr size_t OF_BATCH = 4;
  static constexpr uint64_t LARGE = 64 << 10;  // mean bytes above which each record is probed: cheap then

  bool warm() const { return found_ >= ENOUGH; }
  void found(bool there) {
    if (!there) {
      found_ = 0;
    } else if (!warm()) {
      ++found_;
    }
  }

 private:
  static constexpr int ENOUGH = 64;  // consecutive hits
  std::atomic<int> found_{0};
};

// A file that the caller opens and closes. Threads and forked processes may share it.
class File {
 public:
  // size: bytes of the file that count; records lie within them. own: hfrecord's format, whose checksums also cover a
  // record's number and location. index: `records` entries, or an .ffr file's checksums and offsets. It must not move.
  File(int fd, uint64_t size, bool own, const unsigned char* index, uint64_t records)
      : fd_(fd), size_(size), own_(own), index_(index), records_(records) {}
  File(const File&) = delete;
  File& operator=(const File&) = delete;
  ~File();

  // Whether the file is at least as long as when it was opened. If not, its index may be gone, and reading the mapped
  // index would kill the process (SIGBUS).
  bool whole() const;

  // Reads a record's entry from the index. False if the record does not lie in the file.
  bool find(int64_t number, Entry* entry) const;

  // Probes whether a record is in memory, at its last byte.
  void look(const Entry& entry, Looks& looks) const;

  // Starts to read records, contiguous ones together, and returns at once.
  void advise(const Entry* entries, size_t count) const;

  // Reads each record to its own place and, with `check`, verifies its checksum. Returns how many records, from the
  // first on, were read and correct.
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
