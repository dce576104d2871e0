#include <arpa/inet.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netdb.h>
#include <netinet/in.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <vector>

#include "bootstrap/mesh.h"

namespace hfreduce {
namespace {

struct Found : Interface {
  bool loopback;
};

std::string numeric(const sockaddr* address) {
  char text[INET6_ADDRSTRLEN] = {};
  const void* bytes = address->sa_family == AF_INET
                          ? static_cast<const void*>(&reinterpret_cast<const sockaddr_in*>(address)->sin_addr)
                          : &reinterpret_cast<const sockaddr_in6*>(address)->sin6_addr;
  inet_ntop(address->sa_family, bytes, text, sizeof text);
  return text;
}

bool link_local(const std::string& address) {
  return address.rfind("169.254.", 0) == 0 || address.rfind("fe80:", 0) == 0;
}

// Interfaces that are up: IPv4 before IPv6, in the kernel's order. Without link-local addresses, which are only
// reachable with a scope.
std::vector<Found> interfaces() {
  ifaddrs* list = nullptr;
  if (getifaddrs(&list) != 0) throw std::runtime_error(std::string("hfreduce: getifaddrs: ") + std::strerror(errno));
  std::vector<Found> found;
  for (int family : {AF_INET, AF_INET6})
    for (const ifaddrs* each = list; each; each = each->ifa_next) {
      if (!each->ifa_addr || each->ifa_addr->sa_family != family || !(each->ifa_flags & IFF_UP)) continue;
      const std::string address = numeric(each->ifa_addr);
      if (!link_local(address)) found.push_back({{each->ifa_name, address}, (each->ifa_flags & IFF_LOOPBACK) != 0});
    }
  freeifaddrs(list);
  return found;
}

// The address from which this host would send to `host`; "" if the host is unknown or there is no route.
std::string source_to(const std::string& host) {
  addrinfo hints{}, *list = nullptr;
  hints.ai_socktype = SOCK_DGRAM;
  if (getaddrinfo(host.c_str(), "9", &hints, &list) != 0) return "";
  std::string source;
  for (const addrinfo* each = list; each && source.empty(); each = each->ai_next) {
    const int fd = socket(each->ai_family, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    if (fd < 0) continue;
    sockaddr_storage own{};
    socklen_t length = sizeof own;
    // connect() on a datagram socket only looks up the route; it sends nothing.
    if (connect(fd, each->ai_addr, each->ai_addrlen) == 0 &&
        getsockname(fd, reinterpret_cast<sockaddr*>(&own), &length) == 0)
      source = numeric(reinterpret_cast<sockaddr*>(&own));
    close(fd);
  }
  freeaddrinfo(list);
  return source;
}

}  // namespace

socklen_t to_sockaddr(const std::string& address, int port, sockaddr_storage& out) {
  out = {};
  auto& four = reinterpret_cast<sockaddr_in&>(out);
  auto& six = reinterpret_cast<sockaddr_in6&>(out);
  if (inet_pton(AF_INET, address.c_str(), &four.sin_addr) == 1) {
    four.sin_family = AF_INET;
    four.sin_port = htons(static_cast<uint16_t>(port));
    return sizeof four;
  }
  if (inet_pton(AF_INET6, address.c_str(), &six.sin6_addr) != 1)
    throw std::runtime_error("hfreduce: '" + address + "' is not a numeric IPv4 or IPv6 address");
  six.sin6_family = AF_INET6;
  six.sin6_port = htons(static_cast<uint16_t>(port));
  return sizeof six;
}

Interface choose_interface(const std::string& wanted) {
  const std::vector<Found> found = interfaces();
  const char* variable = std::getenv("HFREDUCE_INTERFACE");
  const std::string name = !wanted.empty() ? wanted : variable ? variable : "";
  if (!name.empty()) {
    std::string all;
    for (const Found& each : found) {
      if (each.name == name || each.address == name) return each;
      all += (all.empty() ? "" : ", ") + each.name + " " + each.address;
    }
    throw std::runtime_error("hfreduce: no network interface '" + name + "' that is up; give the name or the address " +
                             "of one of these in HFREDUCE_INTERFACE: " + (all.empty() ? "(there are none)" : all));
  }
  const char* master = std::getenv("MASTER_ADDR");
  const std::string source = master ? source_to(master) : "";
  const std::string given = master ? master : "";
  // A name that resolves to loopback is often this host's own, from /etc/hosts, which other hosts cannot use.
  const bool loopback_meant = given == "localhost" || given == "127.0.0.1" || given == "::1";
  for (const Found& each : found)
    if (each.address == source && (!each.loopback || loopback_meant)) return each;
  for (const Found& each : found)
    if (!each.loopback) return each;
  if (!found.empty()) return found[0];
  throw std::runtime_error("hfreduce: no network interface of this host is up, not even loopback: `ip link set lo up`");
}

}  // namespace hfreduce
