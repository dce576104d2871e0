// Connections between ranks, made when first asked for: Unix sockets inside a host, TCP between hosts.
//
// Each rank listens on one TCP port and one Unix socket. Who dials says who it is, what the connection is for, and the
// secret that only the ranks of this communicator know; a thread of the listening side takes it in, answers with one
// byte, and hands it to whoever asks for it with `take`. Whoever cannot show the secret within a second is dropped.
#pragma once

#include <sys/socket.h>

#include <cstdint>
#include <memory>
#include <string>

#include "bootstrap/roster.h"
#include "transport/socket.h"

namespace hfreduce {

// Which of this host's addresses the ranks of other hosts are told: interface.cpp.
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

enum class Purpose : uint8_t { liveness, segment, collective, message };
const char* name(Purpose);

class Mesh {
 public:
  // Listens, on the interface named ("" for the one that choose_interface finds), and fills the address, port and
  // socket of `mine`. listen() before the roster is known, start() after. The roster and the health must outlive the
  // mesh.
  explicit Mesh(const std::string& interface);
  ~Mesh();  // as close(); in a child of a fork, nothing
  void listen(Peer& mine);
  void start(const Roster& roster, Health& health);

  // A connection to a peer, for writing (and, for liveness, reading), which the peer's mesh has taken in. Throws
  // Fault::timeout, naming peer, address and errno, when it is not there by the deadline; Fault of health when that
  // fails. All ranks listen before they meet, so a peer that refuses for a whole second has ended, and is not waited
  // for longer (Fault::broken).
  Socket dial(int rank, Purpose purpose, int index, Deadline deadline);
  // The connection that a peer dialed. Throws as dial does; asks now and then whether the peer still listens.
  Socket take(int rank, Purpose purpose, int index, Deadline deadline);
  // Whether take would return, or throw, at once.
  bool dialed(int rank, Purpose purpose, int index) const;

  std::string interface() const;  // "eth0 10.0.0.3", for printing
  void close();                   // joins the thread; idempotent

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace hfreduce
