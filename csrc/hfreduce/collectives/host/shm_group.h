// The ranks of one host over shared memory: flags, and two slots of memory for each rank.
//
// Everything is made of steps. In step s a rank writes into its own slot of parity s % 2, arrives, waits for all others
// to arrive, and then reads any slot of that parity. So what was written before a step may be read until its reader
// arrives at step s + 1, and a slot may be written again after step s + 1. No other rule is needed.
//
// Each rank's memory is a segment of its own, so that its pages lie on its NUMA node:
//   header (flags, the calls it has made)   slot 0   slot 1   one pipe for each local rank that sends to it
#pragma once

#include <atomic>
#include <optional>
#include <string>
#include <vector>

#include "diagnostics/fault.h"
#include "transport/segment.h"
#include "types.h"

namespace hfreduce {

class ShmGroup {
 public:
  static constexpr int kEnqueued = 64;
  // What lies at the head of a segment.
  struct Header {
    alignas(64) std::atomic<uint32_t> step;      // the last step at which this rank arrived; others sleep on it
    alignas(64) std::atomic<uint32_t> sleepers;  // how many do
    alignas(64) Call calls[2];                   // of this rank, its last two, in turn
    // Calls that are only enqueued, on a device, by their sequence numbers, and the newest of these; and whether none
    // runs any more, for good.
    alignas(64) std::atomic<uint64_t> enqueued[kEnqueued][sizeof(Call) / sizeof(uint64_t)];
    alignas(64) std::atomic<uint64_t> newest;
    std::atomic<uint32_t> quiet;
  };
  static constexpr size_t kHeader = 4096;
  static constexpr size_t kPipe = 256 << 10;  // of each ordered pair, see pipe.h

  static size_t segment_bytes(int local_size, size_t slot_bytes);
  // Throws std::invalid_argument for slots that so many ranks cannot work with.
  static void check_slots(int local_size, size_t slot_bytes);

  // segments: of every local rank, in order, this one's own included. ranks, names: their group ranks, and what
  // messages call them.
  ShmGroup(std::vector<Segment> segments, int local_rank, std::vector<int> ranks, std::vector<std::string> names,
           size_t slot_bytes, int cores);

  int rank() const { return rank_; }
  int size() const { return static_cast<int>(segments_.size()); }
  size_t slot_bytes() const { return slot_bytes_; }
  const std::vector<int>& ranks() const { return ranks_; }
  const std::string& name(int local_rank) const { return names_[local_rank]; }

  // A collective begins: writes its call down for the others to see at its first step.
  void begin(const Call& call);
  // The call of a local rank, once the first step of the collective is over.
  const Call& call(int local_rank) const;
  // Writes down a call that is only enqueued: it takes no step here. The others may look for it as long as this rank
  // has not enqueued kEnqueued more; what they find is whole.
  void note(const Call& call);
  std::optional<Call> noted(int local_rank, uint64_t sequence) const;
  uint64_t newest(int local_rank) const;  // sequence number of what it has enqueued last
  // Nothing that this rank has enqueued runs any more, nor will. Whether all have said so.
  void be_quiet() { header(rank_).quiet.store(1, std::memory_order_release); }
  bool all_quiet() const;

  // The newest call of a local rank, as it lies there: for messages about a rank that is dead. `rank`: its group rank;
  // sequence 0 for a rank of another host.
  Call last(int rank) const;

  char* slot(int local_rank) const;  // of the step that is being written, or has just been arrived at
  char* mine() const { return slot(rank_); }

  // Arrives, and waits for all. At the first step after `begin`, throws Fault::mismatch when calls differ: the same
  // message on every rank. Afterwards slots are those of this step, until `next`.
  void arrive(const Watch& watch);
  // The slots of the other parity are meant from here on. Called before writing for the next step.
  void next() { ++step_; }

  // Wakes everybody of this process who sleeps here: they will ask the watch. For Health::on_failure.
  void wake();

  char* pipe(int from, int to) const;  // kPipe bytes, in the segment of `to`

 private:
  Header& header(int local_rank) const { return *reinterpret_cast<Header*>(segments_[local_rank].data()); }
  void wait_for(int local_rank, uint32_t step, const Watch& watch);
  std::vector<int> missing(uint32_t step) const;
  void compare() const;

  std::vector<Segment> segments_;
  std::vector<int> ranks_;
  std::vector<std::string> names_;
  int rank_, spins_;
  size_t slot_bytes_;
  uint32_t step_ = 1;
  uint64_t calls_ = 0;  // begun here: not all that have a sequence number are
  bool first_ = false;
};

}  // namespace hfreduce
