// Collectives over several hosts: inside each by shared memory, between them by rails.
//
// A rail is a set of ranks, one on each host: rail i has the i-th rank of every host, and there are as many rails as
// the smallest host has ranks. Each rail carries one slice of the message between the hosts, all at the same time.
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
  // count: elements of one rank's block; blocks in the order of group ranks.
  void reduce_scatter(const void* in, void* out, int64_t count, DType, Reduction, const Choice&, const Watch&);
  void all_gather(const void* in, void* out, int64_t bytes, const Choice&, const Watch&);
  void broadcast(void* data, int64_t bytes, int root, const Watch&);
  void gather(const void* in, void* out, int64_t bytes, int root, const Watch&);
  void scatter(const void* in, void* out, int64_t bytes, int root, const Watch&);
  void all_to_all(const void* in, const int64_t* in_offsets, const int64_t* in_sizes, void* out,
                  const int64_t* out_offsets, const int64_t* out_sizes, const Watch&);
  void barrier(const Watch&);

  // A part of the watch's operation, between hosts alone and in place; see gpu::Hosts::carry. lane: 0 or 1, for a
  // thread each, which share no connections with one another, nor with the collectives above.
  void carry(int lane, void* data, int64_t count, const Choice&, const Watch&);

 private:
  bool alone() const { return layout_.largest == 1; }  // every rank is alone on its host
  int host_of(int rank) const { return roster_.peers[rank].host; }
  int local_of(int rank) const { return roster_.peers[rank].local_rank; }

  // Memory for the slices that are under way, and for a chunk that is padded.
  void reserve(int64_t bytes, int64_t pad_bytes);
  char* slices(int64_t chunk) { return memory_.get() + chunk % Stages::kUnderWay * slice_bytes_; }
  char* pad() { return memory_.get() + Stages::kUnderWay * slice_bytes_; }

  // The ranks of this host wait for one another: each collective has one step of theirs or more, which compares it.
  void meet(const Watch& watch) {
    shm_.arrive(watch);
    shm_.next();
  }
  // The sum of the chunk inside this host, slice i in `slice` of rail i.
  void sum_inside(const void* chunk, void* slice, int64_t count, DType dtype, Reduction reduction, const Watch& watch);
  // Slices of the rails, of so many bytes, to all ranks of this host.
  void share_inside(const void* slice, void* chunk, int64_t bytes, const Watch& watch);
  // Adds up over both levels; where `root` is a rank, only the ranks of its host get the sum.
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
  Stages stages_;  // last: its threads end before all that they use
};

}  // namespace hfreduce::interhost
