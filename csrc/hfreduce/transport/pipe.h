// A ring of bytes in shared memory, from one process to another of the same host.
//
// Its head has two counters, of the bytes ever written and ever taken, modulo 2^32; each is written by one side alone.
// A write copies into the ring and then moves its counter, a read copies out and then moves the other: every byte is
// copied twice, and no system call is made unless the other side sleeps, on the counter that it waits for.
#pragma once

#include <atomic>

#include "transport/stream.h"

namespace hfreduce {

// One end of a ring in `bytes` bytes of memory that were zero when the first end was made; aligned to 64.
class Ring {
 protected:
  struct Counter {
    alignas(64) std::atomic<uint32_t> bytes;
    std::atomic<uint32_t> sleepers;  // threads of the other side that wait for it to move
  };
  struct Head {
    Counter written, taken;
  };

  Ring(char* memory, size_t bytes);
  uint32_t unread() const;  // bytes that were written and not taken
  static void move(Counter& counter, uint32_t bytes);
  // Sleeps while the counter has the value `seen`.
  static void sleep(Counter& counter, uint32_t seen, milliseconds longest);

  Head& head_;
  char* const data_;
  const uint32_t capacity_;
  uint32_t position_ = 0;  // of the next byte of this end, in the ring
};

class PipeOutgoing : public Outgoing, private Ring {
 public:
  PipeOutgoing(char* memory, size_t bytes) : Ring(memory, bytes) {}
  size_t write(const void* data, size_t bytes) override;
  void drain(Deadline) override {}  // the memory outlives this process
  void sleep(milliseconds longest) const override;
};

class PipeIncoming : public Incoming, private Ring {
 public:
  PipeIncoming(char* memory, size_t bytes) : Ring(memory, bytes) {}
  size_t read(void* data, size_t bytes) override;
  void sleep(milliseconds longest) const override;
};

}  // namespace hfreduce
