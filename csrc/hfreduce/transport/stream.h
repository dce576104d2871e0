// One-way byte pipes from one rank to another, non-blocking; and waiting for several of them.
#pragma once

#include <poll.h>

#include <atomic>
#include <cstddef>
#include <functional>
#include <vector>

#include "bootstrap/roster.h"
#include "transport/socket.h"

namespace hfreduce {

// Something to wait for: bytes to read (Incoming), or room to write (Outgoing).
class Stream {
 public:
  virtual ~Stream() = default;

  // Adds what poll() must wait for. False: no descriptor signals this stream (a pipe), so a wait for several streams
  // polls it every millisecond.
  virtual bool descriptors(std::vector<pollfd>&) const { return false; }

  // For a stream without descriptors: sleeps until it is ready, or for `longest`; may return early. Any thread may call
  // it, also while another reads or writes.
  virtual void sleep(milliseconds) const {}
};

class Outgoing : public Stream {
 public:
  // Writes up to `bytes` bytes. Returns how many; 0 if the pipe is full. Throws Fault::broken (or the health's fault).
  virtual size_t write(const void* data, size_t bytes) = 0;
  virtual void drain(Deadline deadline) = 0;  // returns when all bytes have left this process
};

class Incoming : public Stream {
 public:
  virtual size_t read(void* data, size_t bytes) = 0;  // reads up to `bytes` bytes; 0 if there are none yet
};

// Between hosts (tcp.cpp): one stream over several parallel TCP connections. A single connection is limited to one
// core, one queue of the network card and one TCP window.
//
// Pieces of kPiece bytes go round-robin over the connections, so both ends know the position of each byte without extra
// headers. While one connection's window is full, the next piece waits, too, with up to a window of bytes in flight on
// each of the others.
class Connections {
 public:
  Connections(std::vector<Socket> sockets, const Peer& peer) : sockets_(std::move(sockets)), peer_(peer) {}

  int fd() const { return sockets_[at_ / kPiece % sockets_.size()].fd(); }  // of the next byte
  size_t left() const { return kPiece - at_ % kPiece; }                     // in this piece
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
  // Returns when the peer's kernel has all bytes, or at the deadline: this host's kernel continues sending by itself.
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
// Its head has two counters, of the bytes ever written and ever taken, modulo 2^32. Each is written by one side only. A
// write copies into the buffer, then advances its counter; a read copies out, then advances the other. Every byte is
// copied twice. A system call is made only if the other side sleeps on the counter.
//
// This is one end, in `bytes` bytes of memory, aligned to 64, which were zero when the first end was made.
class PipeEnd {
 protected:
  struct Counter {
    alignas(64) std::atomic<uint32_t> bytes;
    std::atomic<uint32_t> sleepers;  // threads of the other side that wait for it to change
  };
  struct Head {
    Counter written, taken;
  };

  PipeEnd(char* memory, size_t bytes);
  uint32_t unread() const;  // bytes written and not taken
  static void move(Counter& counter, uint32_t bytes);
  // Sleeps while the counter equals `seen`.
  static void sleep(Counter& counter, uint32_t seen, milliseconds longest);

  Head& head_;
  char* const data_;
  const uint32_t capacity_;
  uint32_t position_ = 0;  // of this end's next byte, in the buffer
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

// How a loop that moves bytes on several streams waits: it first retries at once, then yields the core, then sleeps.
class Backoff {
 public:
  explicit Backoff(const Watch& watch) : watch_(watch) {}

  // What is waited for; requested only before sleeping. Ranks are group ranks of the other ends.
  class Wanted {
   public:
    void add(const Stream& stream, int rank);
    void add(int rank);  // one that has no stream yet, and gives no wake-up when it has

   private:
    friend class Backoff;
    std::vector<pollfd> fds_;
    std::vector<int> ranks_;
    const Stream* silent_ = nullptr;  // a stream without descriptors
    bool unseen_ = false;
  };

  void moved() { idle_ = 0; }
  // Called if nothing could be moved. Throws what the watch throws. `longest` limits the sleep.
  void rest(const std::function<void(Wanted&)>& wanted, milliseconds longest = milliseconds(20));

 private:
  const Watch& watch_;
  int idle_ = 0;
};

}  // namespace hfreduce
