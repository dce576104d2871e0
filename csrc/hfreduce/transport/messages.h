// send and recv: tagged messages between any two ranks, ordered for each pair and direction.
#pragma once

#include <functional>
#include <memory>

#include "bootstrap/mesh.h"
#include "collectives/host/shm_group.h"
#include "transport/stream.h"

namespace hfreduce {

// A message is a header (tag, size, the sender's call) and a payload. send and recv of one pair and direction are
// called by one thread at a time. Different pairs, and the two directions, do not wait for each other.
//
// If `ticket` is not 0, the payload stays on the sender's device; only the header is sent (Communicator::announce).
class Messages {
 public:
  Messages(const Roster& roster, Mesh& mesh, ShmGroup& shm, Health& health);
  ~Messages();

  // Returns the destination. Called once, when the message has arrived; not called if it has a ticket.
  using Place = std::function<void*()>;

  // Returns when `data` may be reused. An eager message that fits into the pipe does not wait for a recv. With a
  // ticket, only the header is sent.
  void send(const void* data, int64_t bytes, int to, int tag, uint64_t ticket, const Watch&);
  // The next message with this tag. Earlier messages with other tags are kept for their receivers. Returns the ticket.
  // A message of another size or dtype than expected throws Fault::mismatch, naming both sides.
  uint64_t recv(const Place& place, int64_t bytes, int from, int tag, const Watch&);
  // From any rank that has sent a message with this tag; sets `from`.
  uint64_t recv_any(const Place& place, int64_t bytes, int& from, int tag, const Watch&);

  void drain(Deadline deadline);  // returns when all sent bytes have left this process

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace hfreduce
