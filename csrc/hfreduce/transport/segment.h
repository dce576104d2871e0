// Shared memory of one host that cannot leak: a memfd, which has no name, handed from process to process over a Unix
// socket. When the last process that maps it is gone, by whatever death, so is the memory.
#pragma once

#include <cstddef>
#include <string>

namespace hfreduce {

// A mapping. Children of a fork do not inherit it. Pages are taken when first touched, on the NUMA node of whoever
// does.
class Segment {
 public:
  Segment() = default;
  Segment(int fd, size_t bytes);  // maps all of it; the descriptor stays the caller's
  Segment(Segment&& other) noexcept { *this = std::move(other); }
  Segment& operator=(Segment&& other) noexcept;
  ~Segment();

  char* data() const { return data_; }
  size_t bytes() const { return bytes_; }

  // Takes the pages from byte `from` on, in which nobody has written yet: on this NUMA node (-1: this thread's own), as
  // far as the kernel wants to.
  void settle(int node, size_t from = 0) const;

  // A new descriptor of zeroed shared memory, sealed against shrinking, so that no peer can take it away. Throws
  // std::system_error.
  static int create(size_t bytes);

 private:
  char* data_ = nullptr;
  size_t bytes_ = 0;
};

// Of threads that wait by looking at it again and again: leaves the core to its other thread for some cycles.
inline void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

}  // namespace hfreduce
