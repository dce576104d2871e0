// send and recv: messages with a tag, between any two ranks, in order for each pair and direction.
#pragma once

#include <functional>
#include <memory>

#include "bootstrap/mesh.h"
#include "collectives/host/shm_group.h"
#include "transport/stream.h"

namespace hfreduce {

// A message is a header (tag, bytes, the sender's call) and its bytes. send and recv of one pair and direction are
// called by one thread at a time; different pairs and the two directions do not wait for one another.
//
// Bytes that go another way have a ticket in their header, which is not 0: what the sender tells the receiver of them.
class Messages {
 public:
  Messages(const Roster& roster, Mesh& mesh, ShmGroup& shm, Health& health);
  ~Messages();

  // Asked for once, when the message has come, and not where it has a ticket.
  using Place = std::function<void*()>;

  // Returns when the bytes have left `data`. A receiver need not have asked for them yet where they fit into the pipe.
  // With a ticket there is nothing else to send.
  void send(const void* data, int64_t bytes, int to, int tag, uint64_t ticket, const Watch&);
  // The next message with this tag; those with other tags that came before are kept for their receivers. Returns its
  // ticket. A message of another size, or of another dtype by the calls, is Fault::mismatch and names both sides.
  uint64_t recv(const Place& place, int64_t bytes, int from, int tag, const Watch&);
  // From whoever has sent one with this tag: `from`.
  uint64_t recv_any(const Place& place, int64_t bytes, int& from, int tag, const Watch&);

  void drain(Deadline deadline);  // returns when all that was sent has left this process

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace hfreduce
