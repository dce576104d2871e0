// send and recv: messages with a tag, between any two ranks, in order for each pair and direction.
#pragma once

#include <memory>

#include "mesh.h"
#include "stream.h"
#include "team.h"

namespace hfreduce {

// A message is a header (tag, bytes, the sender's call) and its bytes. send and recv of one pair and direction are
// called by one thread at a time; different pairs and the two directions do not wait for one another.
class Messages {
 public:
  Messages(const Roster& roster, Mesh& mesh, Team& team, Health& health);
  ~Messages();

  // Returns when the bytes have left `data`. A receiver need not have asked for them yet where they fit into the pipe.
  void send(const void* data, int64_t bytes, int to, int tag, const Watch&);
  // The next message with this tag; those with other tags that came before are kept for their receivers. A message of
  // another size, or of another dtype by the calls, is Fault::mismatch and names both sides.
  void recv(void* data, int64_t bytes, int from, int tag, const Watch&);
  // From whoever has sent one with this tag; returns who.
  int recv_any(void* data, int64_t bytes, int tag, const Watch&);

  void drain(Deadline deadline);  // returns when all that was sent has left this process

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace hfreduce
