// send and recv of device memory between ranks of one host whose devices reach each other: by copies, without kernels
// that wait for other ranks.
//
// A rank has a ring of slots in its device memory for each sender. A message goes in chunks: the sender's stream copies
// into a slot, over the link; the receiver's stream copies out of it. The hosts move no bytes. The sender's host waits
// for the receiver's device only if the ring is full, the receiver's only for the sender's host.
//
// The sender decides how a message goes, and the receiver follows: the message on the host (Communicator::announce)
// carries either the payload or the number of its first chunk as a ticket. So the two need not learn of a ring at the
// same time. The first messages of a pair go by way of the host. Their sender sets `wish`; the receiver then makes the
// ring and offers it. A ring keeps the order in which it was filled. So messages with a tag other than 0, which may be
// received in any order, also go by way of the host.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "communicator.h"
#include "cuda/driver.h"

namespace hfreduce::gpu {

class DeviceMessages {
 public:
  struct Options {
    int64_t chunk = 4 << 20;
    int depth = 8;       // slots in a ring, a power of two
    uint32_t first = 0;  // number of the first chunk of a pair; tests begin shortly before the wrap-around
  };
  static size_t segment_bytes(int size);

  // segments: zeroed shared memory for this object only, of every rank, in order, including this one's; pinned here.
  DeviceMessages(Communicator&, Driver&, std::shared_ptr<const std::vector<Segment>> segments, const Options&);
  ~DeviceMessages();  // only after all ranks' streams have ended their work here

  // Whether a message goes this way. Each receiver's `sends` and `send` are called by one thread at a time.
  bool sends(int to, int tag);
  // Enqueued after earlier work on `stream`. Throws Fault like Communicator::send.
  void send(const void* data, int64_t count, DType, int to, Stream, milliseconds timeout);

  // For Communicator::receive: takes a message that was sent this way. Enqueued after earlier work on `stream`.
  void take(void* data, const Received&, const Watch&, Stream stream);
  // Call it after a message came by way of the host into memory of this device: makes a ring for the next ones, if the
  // sender wants one.
  void offer(int from);

  bool empty_by(Deadline deadline);  // whether all that was enqueued here is done by then
  void quit();                       // stops watching unfinished messages; no further messages
  std::string why_not() const;       // why a pair has no ring; "" if none was refused

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace hfreduce::gpu
