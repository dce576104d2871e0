// The ranks of one host: shared memory with flags, and two slots per rank.
//
// All communication is in steps. In step s a rank writes into its own slot of parity s % 2, arrives, waits until all
// others have arrived, and then may read any slot of that parity. So data written before a step may be read until the
// reader arrives at step s + 1, and a slot may be written again after step s + 1. There are no other rules.
//
// Each rank's memory is a segment of its own, with pages on its NUMA node:
//   header (flags, its calls)   slot 0   slot 1   one pipe for each local rank that sends to it
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
  // The start of a segment.
  struct Header {
    alignas(64) std::atomic<uint32_t> step;      // the last step at which this rank arrived; futex for the others
    alignas(64) std::atomic<uint32_t> sleepers;  // number of ranks that sleep on it
    alignas(64) Call calls[2];                   // this rank's last two, alternating
    // Calls that are only enqueued on a device, by sequence number modulo kEnqueued; the newest sequence number; and
    // whether this rank has finished its work on the device for good.
    alignas(64) std::atomic<uint64_t> enqueued[kEnqueued][sizeof(Call) / sizeof(uint64_t)];
    alignas(64) std::atomic<uint64_t> newest;
    std::atomic<uint32_t> quiet;
  };
  static constexpr size_t kHeader = 4096;
  static constexpr size_t kPipe = 256 << 10;  // of each ordered pair, see transport/stream.h

  static size_t segment_bytes(int local_size, size_t slot_bytes);
  // Throws std::invalid_argument if slots of this size do not work for this many ranks.
  static void check_slots(int local_size, size_t slot_bytes);

  // segments: of every local rank, in order, including this one's. ranks, names: their group ranks, and their names for
  // messages.
  ShmGroup(std::vector<Segment> segments, int local_rank, std::vector<int> ranks, std::vector<std::string> names,
           size_t slot_bytes, int cores);

  int rank() const { return rank_; }
  int size() const { return static_cast<int>(segments_.size()); }
  size_t slot_bytes() const { return slot_bytes_; }
  const std::vector<int>& ranks() const { return ranks_; }
  const std::string& name(int local_rank) const { return names_[local_rank]; }

  // Begins a collective: publishes its call, which the others read at its first step.
  void begin(const Call& call);
  // The call of a local rank. Valid after the first step of the collective.
  const Call& call(int local_rank) const;
  // Publishes a call that is only enqueued and takes no step here. The others can find it until this rank has enqueued
  // kEnqueued more. What they find is consistent.
  void note(const Call& call);
  std::optional<Call> noted(int local_rank, uint64_t sequence) const;
  uint64_t newest(int local_rank) const;  // sequence number of its last enqueued call
  // be_quiet: this rank's enqueued work has ended for good. all_quiet: whether all ranks have said so.
  void be_quiet() { header(rank_).quiet.store(1, std::memory_order_release); }
  bool all_quiet() const;

  // The newest call of a local rank, for messages about a rank that has died. `rank`: its group rank. For a rank of
  // another host the sequence is 0.
  Call last(int rank) const;

  char* slot(int local_rank) const;  // of the current step: being written, or just arrived at
  char* mine() const { return slot(rank_); }

  // Arrives and waits for all ranks. At the first step after `begin`, throws Fault::mismatch if calls differ, with the
  // same message on every rank. Afterwards slot() still refers to this step, until `next`.
  void arrive(const Watch& watch);
  // Switches to the slots of the other parity. Call it before writing for the next step.
  void next() { ++step_; }

  // Wakes all sleepers, who then check the watch. For Health::on_failure.
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
  uint64_t calls_ = 0;  // calls begun here; sequence numbers also count enqueued calls
  bool first_ = false;
};

}  // namespace hfreduce
