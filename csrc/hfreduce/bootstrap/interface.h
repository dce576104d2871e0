// Which of this host's addresses the ranks of other hosts are told.
#pragma once

#include <sys/socket.h>

#include <string>

namespace hfreduce {

struct Interface {
  std::string name;     // "eth0"
  std::string address;  // numeric
};

// `wanted`: a name or a numeric address, or "" for, in this order: HFREDUCE_INTERFACE; the address from which the
// kernel would reach MASTER_ADDR; the first interface that is up and not loopback; loopback. Throws std::runtime_error
// that lists what there is when `wanted` is not.
Interface choose_interface(const std::string& wanted);

// A socket address of a numeric IPv4 or IPv6 one; its length is returned. Throws std::runtime_error for another text.
socklen_t to_sockaddr(const std::string& address, int port, sockaddr_storage& out);

}  // namespace hfreduce
