// Device memory under c10d, through torch's device-generic interfaces: one source serves torch with and without CUDA.
#pragma once

#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <utility>

#include "communicator.h"
#include "cuda/accelerator.h"

namespace hfreduce {

inline c10::Stream current_stream(c10::Device device) {
  return c10::impl::VirtualGuardImpl(device.type()).getStream(device);
}

inline c10::Stream pool_stream(c10::Device device) {
  return c10::impl::VirtualGuardImpl(device.type()).getStreamFromGlobalPool(device, /*isHighPriority=*/true);
}

// How a collective runs: by the accelerator, or on the host, with device tensors staged through pinned memory.
struct Way {
  Communicator* host;
  Deadline deadline;
  gpu::Accelerator* accelerator = nullptr;
  gpu::Path path = gpu::Path::host;  // of the accelerator

  // Blocks this thread until the device's current stream has finished its work so far. Throws if the communicator fails
  // meanwhile. Fails it if the deadline passes, because the other ranks wait for this one.
  void settle(c10::Device device) const {
    c10::Event event(device.type());
    event.record(current_stream(device));
    for (int i = 0; !event.query(); ++i) {
      host->check();
      if (Clock::now() >= deadline)
        host->abort("what its stream was given before a collective did not end within the timeout");
      if (i < 100)
        std::this_thread::yield();
      else
        std::this_thread::sleep_for(std::chrono::microseconds(20));
    }
  }
};

// An operation's stream, and the events that order it with other streams.
class Placed {
 public:
  // own: one of our streams, which waits for the current stream's work so far; none: the current stream.
  Placed(c10::Device device, std::optional<c10::Stream> own, bool captured, std::shared_ptr<Communicator> communicator)
      : stream_(own ? *own : current_stream(device)),
        own_(own.has_value()),
        captured_(captured),
        communicator_(std::move(communicator)) {
    if (!own_) return;
    ready_.emplace(device.type());
    ready_->record(current_stream(device));
  }

  c10::Device device() const { return stream_.device(); }
  const c10::Stream& stream() const { return stream_; }
  bool own() const { return own_; }
  bool captured() const { return captured_; }

  void begin() const {
    if (ready_) ready_->block(stream_);
  }
  void end() {
    if (own_) mark();
  }

  // Makes the current stream wait for the work. Throws the communicator's fault, which may concern this operation.
  void synchronize() {
    if (communicator_->failed() && !communicator_->was_shut_down()) communicator_->check();
    const c10::Stream current = current_stream(device());
    if (current == stream_) return;
    if (!done_) mark();
    done_->block(current);
  }

  bool reached() {
    if (captured_) return true;  // captured work runs only when its graph is replayed, any number of times
    if (!done_) mark();
    return done_->query();
  }

 private:
  void mark() {
    done_.emplace(device().type());
    done_->record(stream_);
  }

  const c10::Stream stream_;
  const bool own_, captured_;
  std::shared_ptr<Communicator> communicator_;
  std::optional<c10::Event> ready_, done_;
};

}  // namespace hfreduce
