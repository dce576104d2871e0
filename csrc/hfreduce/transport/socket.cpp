// Descriptors that forked children do not keep. A child that inherits a socket, such as a DataLoader's worker, would
// hold the connection open after its parent's death, and the peers would think the parent alive. So all sockets of the
// process are registered here, and a fork handler closes them in the child.
#include "transport/socket.h"

#include <poll.h>
#include <pthread.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstring>
#include <mutex>
#include <utility>
#include <vector>

namespace hfreduce {
namespace {

class Registry {
 public:
  void add(int fd) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (open_.size() <= size_t(fd)) open_.resize(fd + 1);
    open_[fd] = true;
  }

  // Closes registered descriptors only: in a child the number may refer to another file by now.
  void close(int fd) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (size_t(fd) >= open_.size() || !open_[fd]) return;
    open_[fd] = false;
    ::close(fd);
  }

  // Never destroyed: sockets in static objects may outlive it.
  static Registry& instance() {
    static Registry& registry = *new Registry;
    return registry;
  }

 private:
  Registry() {
    // fork copies the mutex, so it is held meanwhile: the child finds the list consistent.
    pthread_atfork([] { instance().mutex_.lock(); }, [] { instance().mutex_.unlock(); }, [] { instance().forget(); });
  }

  void forget() {
    for (size_t fd = 0; fd < open_.size(); ++fd)
      if (open_[fd]) ::close(static_cast<int>(fd));
    open_.assign(open_.size(), false);
    mutex_.unlock();
  }

  std::mutex mutex_;
  std::vector<bool> open_;
};

// A message of one byte with space for one descriptor.
struct DescriptorMessage {
  char byte = 0;
  iovec part{&byte, 1};
  alignas(cmsghdr) char room[CMSG_SPACE(sizeof(int))] = {};
  msghdr head{};

  DescriptorMessage() {
    head.msg_iov = &part;
    head.msg_iovlen = 1;
    head.msg_control = room;
    head.msg_controllen = sizeof room;
  }
};

[[noreturn]] void fail(const Socket& socket, const std::string& why) {
  ucred peer{};
  socklen_t length = sizeof peer;
  getsockopt(socket.fd(), SOL_SOCKET, SO_PEERCRED, &peer, &length);
  throw Fault(Fault::Cause::broken, {},
              "no shared memory with process " + std::to_string(peer.pid) + " of this host: " + why);
}

// Waits until the socket may be ready. Throws if errno is neither EAGAIN nor EINTR.
void wait_more(const Socket& socket, short events, Deadline deadline) {
  if (errno != EAGAIN && errno != EINTR) fail(socket, std::strerror(errno));
  const auto left = std::chrono::ceil<milliseconds>(deadline - Clock::now()).count();
  if (left <= 0) fail(socket, "it has not answered by the deadline; has it stopped?");
  pollfd asked{socket.fd(), events, 0};
  poll(&asked, 1, static_cast<int>(left));
}

std::atomic<int> forked{0};
[[maybe_unused]] const int counts_forks =
    pthread_atfork(nullptr, nullptr, [] { forked.fetch_add(1, std::memory_order_relaxed); });

}  // namespace

int forks() { return forked.load(std::memory_order_relaxed); }

void send_descriptor(const Socket& socket, int fd, Deadline deadline) {
  DescriptorMessage message;
  cmsghdr* control = CMSG_FIRSTHDR(&message.head);
  control->cmsg_level = SOL_SOCKET;
  control->cmsg_type = SCM_RIGHTS;
  control->cmsg_len = CMSG_LEN(sizeof fd);
  std::memcpy(CMSG_DATA(control), &fd, sizeof fd);
  while (sendmsg(socket.fd(), &message.head, MSG_NOSIGNAL) != 1) wait_more(socket, POLLOUT, deadline);
}

int receive_descriptor(const Socket& socket, Deadline deadline) {
  while (true) {
    DescriptorMessage message;
    const ssize_t got = recvmsg(socket.fd(), &message.head, MSG_CMSG_CLOEXEC);
    if (got < 0) {
      wait_more(socket, POLLIN, deadline);
      continue;
    }
    const cmsghdr* control = CMSG_FIRSTHDR(&message.head);
    if (got == 0) fail(socket, "it has closed the connection; it has ended, or failed");
    if (!control || control->cmsg_type != SCM_RIGHTS)
      fail(socket, "it has sent no descriptor; this process may be out of them");
    int fd = -1;
    std::memcpy(&fd, CMSG_DATA(control), sizeof fd);
    return fd;
  }
}

Socket::Socket(int fd) : fd_(fd) {
  if (fd_ >= 0) Registry::instance().add(fd_);
}

Socket& Socket::operator=(Socket&& other) noexcept {
  std::swap(fd_, other.fd_);
  return *this;
}

Socket::~Socket() {
  if (fd_ >= 0) Registry::instance().close(fd_);
}

}  // namespace hfreduce
