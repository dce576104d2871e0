// Collectives over several hosts: inside each by shared memory, between them by rails.
//
// A rail is a set of ranks, one on each host: rail i has the i-th rank of every host, and there are as many rails as
// the smallest host has ranks. Each rail carries one slice of the message between the hosts, all at the same time.
#pragma once

#include <memory>

#include "bootstrap/mesh.h"
#include "collectives/host/shm_group.h"
#include "plan.h"
#include "transport/stream.h"

namespace hfreduce::interhost {

class Hierarchy {
 public:
  Hierarchy(const Roster& roster, Mesh& mesh, ShmGroup& shm, Health& health, const Plan& plan);
  ~Hierarchy();

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
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace hfreduce::interhost
