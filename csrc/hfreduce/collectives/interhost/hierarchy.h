// Collectives over several hosts: shared memory inside a host, rails between hosts.
//
// A rail is a set of ranks, one on each host: rail i has the i-th rank of every host. There are as many rails as the
// smallest host has ranks. Each rail carries one slice of the message between the hosts, all at the same time.
#pragma once

#include <memory>

#include "collectives/host/shm_group.h"
#include "collectives/interhost/stages.h"
#include "plan.h"

namespace hfreduce::interhost {

class Hierarchy {
 public:
  Hierarchy(const Roster& roster, Mesh& mesh, ShmGroup& shm, Health& health, const Plan& plan);

  void all_reduce(const void* in, void* out, int64_t count, DType, Reduction, const Choice&, const Watch&);
  void reduce(const void* in, void* out, int64_t count, DType, Reduction, int root, const Choice&, const Watch&);
  // count: elements of one rank's block. Blocks are in the order of group ranks.
  void reduce_scatter(const void* in, void* out, int64_t count, DType, Reduction, const Choice&, const Watch&);
  void all_gather(const void* in, void* out, int64_t bytes, const Choice&, const Watch&);
  void broadcast(void* data, int64_t bytes, int root, const Watch&);
  void gather(const void* in, void* out, int64_t bytes, int root, const Watch&);
  void scatter(const void* in, void* out, int64_t bytes, int root, const Watch&);
  void all_to_all(const void* in, const int64_t* in_offsets, const int64_t* in_sizes, void* out,
                  const int64_t* out_offsets, const int64_t* out_sizes, const Watch&);
  void barrier(const Watch&);

  // The part of the watch's operation between hosts, in place; see gpu::Hosts::carry. lane: 0 or 1. Each serves one
  // thread and shares no connections with the other, nor with the collectives above.
  void carry(int lane, void* data, int64_t count, const Choice&, const Watch&);

 private:
  bool alone() const { return layout_.largest == 1; }  // every host has one rank
  int host_of(int rank) const { return roster_.peers[rank].host; }
  int place_of(int rank) const { return roster_.places[host_of(rank)]; }
  int local_of(int rank) const { return roster_.peers[rank].local_rank; }

  // Memory for the slices in flight, and for one padded chunk.
  void reserve(int64_t bytes, int64_t pad_bytes);
  char* slices(int64_t chunk) { return memory_.get() + chunk % Stages::kUnderWay * slice_bytes_; }
  char* pad() { return memory_.get() + Stages::kUnderWay * slice_bytes_; }

  // The ranks of this host wait for one another. Each collective has at least one such step, which compares the calls.
  void meet(const Watch& watch) {
    shm_.arrive(watch);
    shm_.next();
  }
  // Adds up the chunk inside this host. Slice i goes to `slice` of rail i.
  void sum_inside(const void* chunk, void* slice, int64_t count, DType dtype, Reduction reduction, const Watch& watch);
  // Distributes the slices of the rails, of `bytes` each, to all ranks of this host.
  void share_inside(const void* slice, void* chunk, int64_t bytes, const Watch& watch);
  // Adds up over both levels. If `root` is a rank, only its host receives the sum.
  void sum(const void* in, void* out, int64_t count, DType dtype, Reduction reduction, const Choice& choice, int root,
           const Watch& watch);
  void sum_alone(const void* in, void* out, int64_t count, DType dtype, Reduction reduction, const Choice& choice,
                 const Watch& watch);

  const Roster& roster_;
  ShmGroup& shm_;
  const HostLayout layout_;
  std::unique_ptr<char[]> memory_;
  int64_t reserved_ = 0, slice_bytes_ = 0;
  HostStreams carriers_[2];
  Stages stages_;  // last: its threads end before what they use is destroyed
};

}  // namespace hfreduce::interhost
