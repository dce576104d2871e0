// Sockets that forked children do not keep, and detection of such children.
#pragma once

#include "diagnostics/fault.h"

namespace hfreduce {

// A connected, non-blocking socket, closed by its destructor. Forked children do not keep it open: a peer would not
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

// Pass a file descriptor to a local peer, or receive one, over a Unix socket. If the peer has ended or the deadline has
// passed, they throw Fault::broken naming the peer's process.
void send_descriptor(const Socket& socket, int fd, Deadline deadline);
int receive_descriptor(const Socket& socket, Deadline deadline);

// The number of forks between the start of the program and this process. Costs one load. A forked child has its
// parent's memory, but none of its threads.
int forks();

}  // namespace hfreduce
