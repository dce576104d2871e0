// One-way pipes of bytes from one rank to another, as far as they go without waiting; and waiting for several at once.
#pragma once

#include <poll.h>

#include <atomic>
#include <cstddef>
#include <functional>
#include <vector>

#include "bootstrap/roster.h"
#include "transport/socket.h"

namespace hfreduce {

// What one can wait for: that bytes have come (Incoming), or that there is room for more (Outgoing).
class Stream {
 public:
  virtual ~Stream() = default;

  // Adds what poll() must look at until this stream may go on. False: no descriptor tells (a pipe), so whoever waits
  // for several streams looks again after a millisecond.
  virtual bool descriptors(std::vector<pollfd>&) const { return false; }

  // Of a stream without descriptors: sleeps until it may go on, or for `longest`; may return early. Any thread may call
  // it, whoever reads or writes meanwhile.
  virtual void sleep(milliseconds) const {}
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

// Between hosts (tcp.cpp): one stream over several TCP connections side by side. A single connection is held to one
// core, one queue of the network card and one window; several are not.
//
// Bytes go in pieces of kPiece round and round the connections, so both ends know where each byte travels, and no byte
// is added to them. While one connection's window is full the next piece waits too, with up to a window of bytes of
// every other one under way.
class Connections {
 public:
  Connections(std::vector<Socket> sockets, const Peer& peer) : sockets_(std::move(sockets)), peer_(peer) {}

  int fd() const { return sockets_[at_ / kPiece % sockets_.size()].fd(); }  // of the next byte
  size_t left() const { return kPiece - at_ % kPiece; }                     // of this piece
  void advance(size_t bytes) { at_ += bytes; }
  const std::vector<Socket>& sockets() const { return sockets_; }
  // Throws Fault::broken.
  [[noreturn]] void broken(const char* doing, const char* why) const;

 private:
  static constexpr size_t kPiece = 64 << 10;
  std::vector<Socket> sockets_;
  const Peer peer_;
  size_t at_ = 0;
};

class TcpOutgoing : public Outgoing {
 public:
  TcpOutgoing(std::vector<Socket> sockets, const Peer& peer) : connections_(std::move(sockets), peer) {}
  bool descriptors(std::vector<pollfd>& fds) const override;
  size_t write(const void* data, size_t bytes) override;
  // Returns when the peer's kernel has all of it; at the deadline whatever has become of it, for then this host's
  // kernel goes on by itself.
  void drain(Deadline deadline) override;

 private:
  Connections connections_;
};

class TcpIncoming : public Incoming {
 public:
  TcpIncoming(std::vector<Socket> sockets, const Peer& peer) : connections_(std::move(sockets), peer) {}
  bool descriptors(std::vector<pollfd>& fds) const override;
  size_t read(void* data, size_t bytes) override;

 private:
  Connections connections_;
};

// Inside a host (pipe.cpp): a ring buffer in shared memory, from one process to another.
//
// Its head has two counters, of the bytes ever written and ever taken, modulo 2^32; each is written by one side alone.
// A write copies into the buffer and then moves its counter, a read copies out and then moves the other: every byte is
// copied twice, and no system call is made unless the other side sleeps, on the counter that it waits for.
//
// This is one end of it, in `bytes` bytes of memory that were zero when the first end was made; aligned to 64.
class PipeEnd {
 protected:
  struct Counter {
    alignas(64) std::atomic<uint32_t> bytes;
    std::atomic<uint32_t> sleepers;  // threads of the other side that wait for it to move
  };
  struct Head {
    Counter written, taken;
  };

  PipeEnd(char* memory, size_t bytes);
  uint32_t unread() const;  // bytes that were written and not taken
  static void move(Counter& counter, uint32_t bytes);
  // Sleeps while the counter has the value `seen`.
  static void sleep(Counter& counter, uint32_t seen, milliseconds longest);

  Head& head_;
  char* const data_;
  const uint32_t capacity_;
  uint32_t position_ = 0;  // of the next byte of this end, in the buffer
};

class PipeOutgoing : public Outgoing, private PipeEnd {
 public:
  PipeOutgoing(char* memory, size_t bytes) : PipeEnd(memory, bytes) {}
  size_t write(const void* data, size_t bytes) override;
  void drain(Deadline) override {}  // the memory outlives this process
  void sleep(milliseconds longest) const override;
};

class PipeIncoming : public Incoming, private PipeEnd {
 public:
  PipeIncoming(char* memory, size_t bytes) : PipeEnd(memory, bytes) {}
  size_t read(void* data, size_t bytes) override;
  void sleep(milliseconds longest) const override;
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
