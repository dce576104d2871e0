// Connections between ranks, made on first use: Unix sockets inside a host, TCP between hosts.
//
// Each rank listens on one TCP port and one Unix socket. The dialer sends its rank, the connection's purpose and the
// communicator's secret, which only its ranks know. A thread of the listener accepts it, replies with one byte, and
// hands it to the caller of `take`. A connection that does not send the secret within a second is dropped.
#pragma once

#include <sys/socket.h>

#include <cstdint>
#include <memory>
#include <string>

#include "bootstrap/roster.h"
#include "transport/socket.h"

namespace hfreduce {

// The address of this host that ranks of other hosts connect to: interface.cpp.
struct Interface {
  std::string name;     // "eth0"
  std::string address;  // numeric
};

// `wanted`: a name or a numeric address. "": in this order, HFREDUCE_INTERFACE; the address from which the kernel would
// reach MASTER_ADDR; the first interface that is up and not loopback; loopback. If there is no such interface, throws
// std::runtime_error that lists the existing ones.
Interface choose_interface(const std::string& wanted);

// The socket address of a numeric IPv4 or IPv6 address. Returns its length. Throws std::runtime_error for other text.
socklen_t to_sockaddr(const std::string& address, int port, sockaddr_storage& out);

enum class Purpose : uint8_t { liveness, segment, collective, message };
const char* name(Purpose);

class Mesh {
 public:
  // Listens on `interface` (see choose_interface), and fills in the address, port and socket of `mine`. Call listen()
  // before the roster is known, start() after. The health must outlive the mesh.
  explicit Mesh(const std::string& interface);
  ~Mesh();  // calls close(); in a forked child, does nothing
  void listen(Peer& mine);
  void start(const Roster& roster, Health& health);

  // A connection to a peer, accepted by the peer's mesh; for writing (liveness: also reading). Throws Fault::timeout
  // with peer, address and errno at the deadline, and the fault of `health` if that fails. All ranks listen before they
  // meet, so a peer that refuses connections for a second has ended: Fault::broken.
  Socket dial(int rank, Purpose purpose, int index, Deadline deadline);
  // The connection that a peer dialed. Throws as dial does. Checks from time to time that the peer still listens.
  Socket take(int rank, Purpose purpose, int index, Deadline deadline);
  // Whether take would return or throw at once.
  bool dialed(int rank, Purpose purpose, int index) const;

  std::string interface() const;  // "eth0 10.0.0.3", for printing
  void close();                   // joins the thread; idempotent

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace hfreduce
