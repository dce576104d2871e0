// Descriptors that children of a fork do not keep. A child that inherits a socket, such as a DataLoader's worker, would
// hold the connection open after its parent's death, and the peers would take the parent for alive. So all sockets of
// the process are written down here, and a handler of fork closes them in the child.
#include <poll.h>
#include <pthread.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <mutex>
#include <utility>
#include <vector>

#include "bootstrap/mesh.h"

namespace hfreduce {
namespace {

class Registry {
 public:
  void add(int fd) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (open_.size() <= size_t(fd)) open_.resize(fd + 1);
    open_[fd] = true;
  }

  // Only what is still written down is closed: in a child the number may mean another file by now.
  void close(int fd) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (size_t(fd) >= open_.size() || !open_[fd]) return;
    open_[fd] = false;
    ::close(fd);
  }

  // Never destroyed: sockets of static objects may outlive it.
  static Registry& instance() {
    static Registry& registry = *new Registry;
    return registry;
  }

 private:
  Registry() {
    // fork copies the mutex: it is held meanwhile, so that the child finds the list whole.
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

// A message of one byte with room for one descriptor.
struct Parcel {
  char byte = 0;
  iovec part{&byte, 1};
  alignas(cmsghdr) char room[CMSG_SPACE(sizeof(int))] = {};
  msghdr message{};

  Parcel() {
    message.msg_iov = &part;
    message.msg_iovlen = 1;
    message.msg_control = room;
    message.msg_controllen = sizeof room;
  }
};

[[noreturn]] void fail(const Socket& socket, const std::string& why) {
  ucred peer{};
  socklen_t length = sizeof peer;
  getsockopt(socket.fd(), SOL_SOCKET, SO_PEERCRED, &peer, &length);
  throw Fault(Fault::Cause::broken, {},
              "no shared memory with process " + std::to_string(peer.pid) + " of this host: " + why);
}

// Waits until the socket may be ready. EAGAIN and EINTR alone are worth it.
void wait_more(const Socket& socket, short events, Deadline deadline) {
  if (errno != EAGAIN && errno != EINTR) fail(socket, std::strerror(errno));
  const auto left = std::chrono::ceil<milliseconds>(deadline - Clock::now()).count();
  if (left <= 0) fail(socket, "it has not answered by the deadline; has it stopped?");
  pollfd asked{socket.fd(), events, 0};
  poll(&asked, 1, static_cast<int>(left));
}

}  // namespace

void Mesh::give(const Socket& socket, int fd, Deadline deadline) {
  Parcel parcel;
  cmsghdr* head = CMSG_FIRSTHDR(&parcel.message);
  head->cmsg_level = SOL_SOCKET;
  head->cmsg_type = SCM_RIGHTS;
  head->cmsg_len = CMSG_LEN(sizeof fd);
  std::memcpy(CMSG_DATA(head), &fd, sizeof fd);
  while (sendmsg(socket.fd(), &parcel.message, MSG_NOSIGNAL) != 1) wait_more(socket, POLLOUT, deadline);
}

int Mesh::receive(const Socket& socket, Deadline deadline) {
  while (true) {
    Parcel parcel;
    const ssize_t got = recvmsg(socket.fd(), &parcel.message, MSG_CMSG_CLOEXEC);
    if (got < 0) {
      wait_more(socket, POLLIN, deadline);
      continue;
    }
    const cmsghdr* head = CMSG_FIRSTHDR(&parcel.message);
    if (got == 0) fail(socket, "it has closed the connection; it has ended, or failed");
    if (!head || head->cmsg_type != SCM_RIGHTS)
      fail(socket, "it has sent no descriptor; this process may be out of them");
    int fd = -1;
    std::memcpy(&fd, CMSG_DATA(head), sizeof fd);
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
