#include "transport/segment.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <map>
#include <mutex>
#include <string>
#include <system_error>
#include <utility>

namespace hfreduce {

static std::system_error failed(const std::string& what) {
  return std::system_error(errno, std::generic_category(), "hfreduce: " + what);
}

#ifdef __SANITIZE_THREAD__
// Two ranks in one process would map the same memory at two addresses, and ThreadSanitizer would not see that they
// share it. So each segment is mapped once and never unmapped.
static void* map(int fd, size_t bytes) {
  static std::mutex mutex;
  static std::map<ino_t, void*> mapped;
  struct stat stat;
  fstat(fd, &stat);
  std::lock_guard lock(mutex);
  void*& memory = mapped[stat.st_ino];
  if (!memory) memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  return memory;
}
static void unmap(void*, size_t) {}
#else
static void* map(int fd, size_t bytes) { return mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0); }
static void unmap(void* memory, size_t bytes) { munmap(memory, bytes); }
#endif

Segment::Segment(int fd, size_t bytes) : bytes_(bytes) {
  void* memory = map(fd, bytes);
  if (memory == MAP_FAILED) throw failed("cannot map " + std::to_string(bytes) + " bytes of shared memory");
  data_ = static_cast<char*>(memory);
  madvise(data_, bytes, MADV_DONTFORK);
}

Segment& Segment::operator=(Segment&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(bytes_, other.bytes_);
  return *this;
}

Segment::~Segment() {
  if (data_) unmap(data_, bytes_);
}

void Segment::settle(int node, size_t from) const {
  if (node >= 0 && node < 64) {
    const unsigned long nodes = 1ul << node;
    constexpr int kPreferred = 1;
    syscall(SYS_mbind, data_, bytes_, kPreferred, &nodes, 65, 0);
  }
  madvise(data_, bytes_, MADV_HUGEPAGE);
  for (size_t i = from; i < bytes_; i += 4096) static_cast<volatile char*>(data_)[i] = 0;
}

int Segment::create(size_t bytes) {
  const int fd = memfd_create("hfreduce", MFD_CLOEXEC | MFD_ALLOW_SEALING);
  if (fd < 0) throw failed("cannot make shared memory");
  if (ftruncate(fd, static_cast<off_t>(bytes)) || fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL)) {
    const auto error = failed("cannot make " + std::to_string(bytes) + " bytes of shared memory");
    close(fd);
    throw error;
  }
  return fd;
}

}  // namespace hfreduce
