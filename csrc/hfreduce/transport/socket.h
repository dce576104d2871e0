// Descriptors that children of a fork do not keep, and who is such a child.
#pragma once

#include "diagnostics/fault.h"

namespace hfreduce {

// A connected, non-blocking socket; closed by its destructor. Children of a fork do not keep it open: a peer would not
// notice the parent's death.
class Socket {
 public:
  explicit Socket(int fd = -1);
  Socket(Socket&& other) noexcept : fd_(other.fd_) { other.fd_ = -1; }
  Socket& operator=(Socket&& other) noexcept;
  ~Socket();
  int fd() const { return fd_; }

 private:
  int fd_;
};

// Gives a local peer a file descriptor of ours, and the other way round, over a Unix socket. They throw Fault::broken
// that names the peer's process when the peer has gone or the deadline has passed.
void send_descriptor(const Socket& socket, int fd, Deadline deadline);
int receive_descriptor(const Socket& socket, Deadline deadline);

// How many forks lie between this process and the one in which the program began; costs a load. A child has its
// parent's memory, but none of its threads.
int forks();

}  // namespace hfreduce
