#include "file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "crc32.h"

namespace hfrecord {
namespace {

constexpr size_t MOST_PARTS = 64;      // per system call
constexpr uint64_t PIECE = 128 << 10;  // Linux limits advice to its read-ahead window, by default at least this size

// Fills the parts, which are contiguous in the file. False at the end of the file or on an error.
bool fill(int fd, iovec* parts, size_t count, uint64_t offset) {
  for (;;) {
    while (count > 0 && parts->iov_len == 0) ++parts, --count;
    if (count == 0) return true;
    const auto at = static_cast<off_t>(offset);
    const ssize_t done =
        count == 1 ? pread(fd, parts->iov_base, parts->iov_len, at) : preadv(fd, parts, static_cast<int>(count), at);
    if (done < 0 && errno == EINTR) continue;
    if (done <= 0) return false;
    offset += static_cast<uint64_t>(done);
    for (auto left = static_cast<size_t>(done); left > 0;) {
      const size_t taken = std::min(left, parts->iov_len);
      parts->iov_base = static_cast<unsigned char*>(parts->iov_base) + taken;
      parts->iov_len -= taken;
      left -= taken;
      if (parts->iov_len == 0) ++parts, --count;
    }
  }
}

}  // namespace

File::~File() {
  if (map_ != nullptr) munmap(map_, size_);
}

bool File::whole() const {
  struct stat now;
  return fstat(fd_, &now) == 0 && static_cast<uint64_t>(now.st_size) >= size_;
}

bool File::find(int64_t number, Entry* entry) const {
  const auto at = static_cast<uint64_t>(number);
  if (at >= records_) return false;
  if (own_) {
    std::memcpy(entry, index_ + sizeof(Entry) * at, sizeof(Entry));
  } else {
    const unsigned char* offsets = index_ + 4 * records_;
    uint64_t end = size_;
    std::memcpy(&entry->crc, index_ + 4 * at, 4);
    std::memcpy(&entry->offset, offsets + 8 * at, 8);
    if (at + 1 < records_) std::memcpy(&end, offsets + 8 * (at + 1), 8);
    entry->length = end - entry->offset;  // if it ends before it begins, this wraps to more than the file has
    entry->codec = 0;
  }
  return entry->offset <= size_ && entry->length <= size_ - entry->offset;
}

void File::look(const Entry& entry, Looks& looks) const {
#ifdef RWF_NOWAIT
  if (entry.length == 0) return;
  char byte;
  iovec part{&byte, 1};
  const auto last = static_cast<off_t>(entry.offset + entry.length - 1);
  looks.found(preadv2(fd_, &part, 1, last, RWF_NOWAIT) == 1);
#else
  static_cast<void>(entry), static_cast<void>(looks);
#endif
}

void File::advise(const Entry* entries, size_t count) const {
#ifdef POSIX_FADV_WILLNEED
  const auto page = static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
  for (size_t begin = 0, end; begin < count; begin = end) {
    const uint64_t offset = entries[begin].offset;
    uint64_t length = 0;
    for (end = begin; end < count && entries[end].offset == offset + length; ++end) length += entries[end].length;
    // A length of 0 would mean the rest of the file.
    for (uint64_t at = offset / page * page; length > 0 && at < offset + length; at += PIECE) {
      const uint64_t piece = std::min(PIECE, offset + length - at);
      posix_fadvise(fd_, static_cast<off_t>(at), static_cast<off_t>(piece), POSIX_FADV_WILLNEED);
    }
  }
#else
  static_cast<void>(entries), static_cast<void>(count);
#endif
}

const unsigned char* File::mapped() {
  unsigned char* map = map_;
  if (map != nullptr) return map;
  void* found = mmap(nullptr, size_, PROT_READ, MAP_SHARED, fd_, 0);
  if (found == MAP_FAILED) return nullptr;
  madvise(found, size_, MADV_RANDOM);
  // If two threads get here at once, one unmaps its own. A lock could stay locked in a forked process.
  if (map_.compare_exchange_strong(map, static_cast<unsigned char*>(found))) return static_cast<unsigned char*>(found);
  munmap(found, size_);
  return map;
}

uint32_t File::seed(const Entry& entry, int64_t number) const {
  if (!own_) return 0;
  unsigned char place[28];
  std::memcpy(place, &number, 8);
  std::memcpy(place + 8, &entry.offset, 8);
  std::memcpy(place + 16, &entry.length, 8);
  std::memcpy(place + 24, &entry.codec, 4);
  return crc32(0, place, sizeof place);
}

size_t File::read_cold(const Entry* entries, size_t count, unsigned char* const* places) const {
  for (size_t begin = 0, end; begin < count; begin = end) {
    iovec parts[MOST_PARTS];
    end = begin;
    do {
      parts[end - begin] = {places[end], static_cast<size_t>(entries[end].length)};
      ++end;
    } while (end < count && end - begin < MOST_PARTS &&
             entries[end].offset == entries[end - 1].offset + entries[end - 1].length);
    if (!fill(fd_, parts, end - begin, entries[begin].offset)) return begin;
  }
  return count;
}

size_t File::read(const Entry* entries, const int64_t* numbers, size_t count, unsigned char* const* places, bool check,
                  bool warm) {
  const unsigned char* map = warm ? mapped() : nullptr;
  const size_t there = map != nullptr ? count : read_cold(entries, count, places);
  for (size_t k = 0; k < there; ++k) {
    const Entry& entry = entries[k];
    if (map != nullptr && !check) {
      std::memcpy(places[k], map + entry.offset, entry.length);
    } else if (check) {
      const uint32_t before = seed(entry, numbers[k]);
      const uint32_t crc = map != nullptr ? crc32_copied(before, map + entry.offset, entry.length, places[k])
                                          : crc32(before, places[k], entry.length);
      if (crc != entry.crc) return k;
    }
  }
  return there;
}

}  // namespace hfrecord
