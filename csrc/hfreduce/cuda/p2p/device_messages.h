// send and recv of device memory, between ranks of one host whose devices reach each other: by copies, without a kernel
// that waits for another rank's.
//
// A rank has a ring of slots in its device memory for each rank that sends to it. A message goes chunk by chunk: the
// sender's stream copies into a slot, over the link, and the receiver's stream out of it. The hosts move no bytes. The
// sender's waits for the receiver's device only where the ring is full, the receiver's for the sender's host alone.
//
// Which way a message goes the sender decides, and the receiver follows: what the ranks say to each other on the host
// (Communicator::announce) either has the bytes behind it, or the number of the message's first chunk. So it does not
// matter who knows of what first. The first messages of a pair go by way of the host. The sender of one leaves a wish;
// the rank that receives it makes the ring, and offers it. A ring keeps the order in which it was filled: so messages
// with another tag than 0, which may be received in any order, go by way of the host as well.
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
    uint32_t first = 0;  // number of the first chunk of a pair; tests begin shortly before it wraps around
  };
  static size_t segment_bytes(int size);

  // segments: of zeroed shared memory that nothing else lies in, of every rank, in order, this one's own included;
  // pinned here.
  DeviceMessages(Communicator&, Driver&, std::shared_ptr<const std::vector<Segment>> segments, const Options&);
  ~DeviceMessages();  // when no rank's streams work here any more

  // Whether a message goes this way. One thread at a time asks, and sends, for each receiver.
  bool sends(int to, int tag);
  // Enqueued behind `stream`. Throws Fault as Communicator::send does.
  void send(const void* data, int64_t count, DType, int to, Stream, milliseconds timeout);

  // For Communicator::receive: takes a message that was sent this way. Enqueued behind `stream`.
  void take(void* data, const Received&, const Watch&, Stream stream);
  // After a message that came by way of the host into memory of this device: makes a ring for the next ones, where its
  // sender wishes so.
  void offer(int from);

  bool empty_by(Deadline deadline);  // whether the devices have done all that was enqueued here by then
  void quit();                       // nobody looks after what has not ended any more: no further messages
  std::string why_not() const;       // a pair has no ring: "" where none was refused

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace hfreduce::gpu
