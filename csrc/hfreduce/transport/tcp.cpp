#include <linux/sockios.h>
#include <sys/ioctl.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <thread>

#include "transport/stream.h"

namespace hfreduce {
namespace {

bool would_wait() { return errno == EAGAIN || errno == EINTR; }

}  // namespace

void Connections::broken(const char* doing, const char* why) const {
  throw Fault(Fault::Cause::broken, {peer_.rank},
              std::string("the connection ") + doing + " " + peer_.name() + " broke: " + why);
}

bool TcpOutgoing::descriptors(std::vector<pollfd>& fds) const {
  fds.push_back({connections_.fd(), POLLOUT, 0});
  return true;
}

size_t TcpOutgoing::write(const void* data, size_t bytes) {
  size_t done = 0;
  while (done < bytes) {
    const size_t part = std::min(bytes - done, connections_.left());
    const ssize_t sent = send(connections_.fd(), static_cast<const char*>(data) + done, part, MSG_NOSIGNAL);
    if (sent < 0 && would_wait()) break;
    if (sent < 0) connections_.broken("to", std::strerror(errno));
    connections_.advance(static_cast<size_t>(sent));
    done += static_cast<size_t>(sent);
  }
  return done;
}

void TcpOutgoing::drain(Deadline deadline) {
  for (const Socket& socket : connections_.sockets())
    for (int unsent = 1; unsent > 0 && Clock::now() < deadline;) {
      int error = 0;
      socklen_t length = sizeof error;
      if (getsockopt(socket.fd(), SOL_SOCKET, SO_ERROR, &error, &length) == 0 && error)
        connections_.broken("to", std::strerror(error));
      if (ioctl(socket.fd(), SIOCOUTQ, &unsent) != 0) connections_.broken("to", std::strerror(errno));
      if (unsent > 0) std::this_thread::sleep_for(milliseconds(1));  // nothing signals an acknowledgement
    }
}

bool TcpIncoming::descriptors(std::vector<pollfd>& fds) const {
  fds.push_back({connections_.fd(), POLLIN, 0});
  return true;
}

size_t TcpIncoming::read(void* data, size_t bytes) {
  size_t done = 0;
  while (done < bytes) {
    const size_t part = std::min(bytes - done, connections_.left());
    const ssize_t got = recv(connections_.fd(), static_cast<char*>(data) + done, part, 0);
    if (got < 0 && would_wait()) break;
    if (got < 0) connections_.broken("from", std::strerror(errno));
    if (got == 0 && done == 0) connections_.broken("from", "it has closed its end");
    if (got == 0) break;
    connections_.advance(static_cast<size_t>(got));
    done += static_cast<size_t>(got);
  }
  return done;
}

}  // namespace hfreduce
