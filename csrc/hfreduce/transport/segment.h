// Shared memory of a host that cannot leak: a memfd, which has no name, passed between processes over a Unix socket. It
// is freed when the last process that maps it ends, however it ends.
#pragma once

#include <cstddef>
#include <string>

namespace hfreduce {

// A mapping. Forked children do not inherit it. Pages are allocated on first touch, on the NUMA node of the touching
// thread.
class Segment {
 public:
  Segment() = default;
  Segment(int fd, size_t bytes);  // maps all of it; the caller keeps the descriptor
  Segment(Segment&& other) noexcept { *this = std::move(other); }
  Segment& operator=(Segment&& other) noexcept;
  ~Segment();

  char* data() const { return data_; }
  size_t bytes() const { return bytes_; }

  // Allocates the untouched pages from byte `from` on: on this NUMA node (-1: the calling thread's), if the kernel can.
  void settle(int node, size_t from = 0) const;

  // A new descriptor of zeroed shared memory, sealed against resizing, so that no peer can shrink it. Throws
  // std::system_error.
  static int create(size_t bytes);

 private:
  char* data_ = nullptr;
  size_t bytes_ = 0;
};

// For spin loops: yields the core to its other hardware thread for some cycles.
inline void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

}  // namespace hfreduce
