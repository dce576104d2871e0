#include "read.h"

#include <fcntl.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "crc32.h"

namespace hfrecord {
namespace {

constexpr size_t MOST_PARTS = 64;  // of a system call

// Fills the parts, which stand behind one another in the file. False at its end, or where the system says no.
bool fill(int fd, iovec* parts, size_t count, uint64_t offset) {
  for (;;) {
    while (count > 0 && parts->iov_len == 0) ++parts, --count;
    if (count == 0) return true;
    const auto at = static_cast<off_t>(offset);
    ssize_t done =
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

size_t read(int fd, const Entry* entries, size_t count, unsigned char* const* places) {
  for (size_t begin = 0, end; begin < count; begin = end) {
    iovec parts[MOST_PARTS];
    end = begin;
    do {
      parts[end - begin] = {places[end], static_cast<size_t>(entries[end].length)};
      ++end;
    } while (end < count && end - begin < MOST_PARTS &&
             entries[end].offset == entries[end - 1].offset + entries[end - 1].length);
    if (!fill(fd, parts, end - begin, entries[begin].offset)) return begin;
  }
  return count;
}

bool matches(const Entry& entry, int64_t number, bool own, const unsigned char* bytes) {
  uint32_t crc = 0;
  if (own) {
    unsigned char place[28];
    std::memcpy(place, &number, 8);
    std::memcpy(place + 8, &entry.offset, 8);
    std::memcpy(place + 16, &entry.length, 8);
    std::memcpy(place + 24, &entry.codec, 4);
    crc = crc32(0, place, sizeof place);
  }
  return crc32(crc, bytes, entry.length) == entry.crc;
}

void advise(int fd, const Entry* entries, size_t count) {
#ifdef POSIX_FADV_WILLNEED
  for (size_t k = 0; k < count; ++k) {
    posix_fadvise(fd, static_cast<off_t>(entries[k].offset), static_cast<off_t>(entries[k].length),
                  POSIX_FADV_WILLNEED);
  }
#else
  static_cast<void>(fd), static_cast<void>(entries), static_cast<void>(count);
#endif
}

}  // namespace hfrecord
