// One-way pipes of bytes from one rank to another, as far as they go without waiting; and waiting for several at once.
// Inside a host a ring in shared memory (pipe.cpp), between hosts several TCP connections side by side (tcp.cpp).
#pragma once

#include <poll.h>

#include <cstddef>
#include <functional>
#include <memory>
#include <vector>

#include "bootstrap/mesh.h"
#include "collectives/host/shm_group.h"

namespace hfreduce {

// What one can wait for: that bytes have come (Incoming), or that there is room for more (Outgoing).
class Stream {
 public:
  virtual ~Stream() = default;

  // Adds what poll() must look at until this stream may go on. False: no descriptor tells (a pipe, a transport with a
  // delay), so whoever waits for several streams looks again after a millisecond.
  virtual bool descriptors(std::vector<pollfd>& fds) const {
    static_cast<void>(fds);
    return false;
  }

  // Of a stream without descriptors: sleeps until it may go on, or for `longest`; may return early. Any thread may call
  // it, whoever reads or writes meanwhile.
  virtual void sleep(milliseconds longest) const;
};

class Outgoing : public Stream {
 public:
  // Takes up to `bytes` bytes and says how many; 0 when the pipe is full. Throws Fault::broken (or the health's fault).
  virtual size_t write(const void* data, size_t bytes) = 0;
  virtual void drain(Deadline deadline) = 0;  // returns when all of it has left this process
};

class Incoming : public Stream {
 public:
  virtual size_t read(void* data, size_t bytes) = 0;  // gives up to `bytes` bytes; 0 when there are none yet
};

// How a loop waits that moves bytes on several streams: it looks again at once, then lets others run, then sleeps.
class Backoff {
 public:
  explicit Backoff(const Watch& watch) : watch_(watch) {}

  // What is waited for, asked for only when it comes to sleeping; ranks are those at the other ends, of the group.
  class Wanted {
   public:
    void add(const Stream& stream, int rank);
    void add(int rank);  // one that has no stream yet, and wakes nobody when it has

   private:
    friend class Backoff;
    std::vector<pollfd> fds_;
    std::vector<int> ranks_;
    const Stream* silent_ = nullptr;  // one without descriptors
    bool unseen_ = false;
  };

  void moved() { idle_ = 0; }
  // Called when nothing could be moved. Throws what the watch throws. `longest` bounds the sleep.
  void rest(const std::function<void(Wanted&)>& wanted, milliseconds longest = milliseconds(20));

 private:
  const Watch& watch_;
  int idle_ = 0;
};

}  // namespace hfreduce
