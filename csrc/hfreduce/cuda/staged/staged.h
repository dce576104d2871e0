// The host-staged reduction: GPUs of one host without peer access (or whose multiprocessors are needed otherwise)
// reduce through host memory, by copy engines and host cores only.
//
// A message goes in chunks. Each rank's copy engine copies its chunk D2H into pinned memory that all local ranks share.
// When all inputs have arrived, each rank's cores add up their slice of the chunk, in rank order. When all slices are
// done, each rank's other copy engine copies them H2D. Both directions and the cores work at the same time, on
// different chunks, in a ring of Options::depth. Streams are ordered by flags in shared memory (Driver::write, wait):
// the host never blocks, and no kernel runs.
//
// With several hosts, each adds up its own ranks' inputs. Then threads of each rank exchange its slices with the ranks
// of the same local rank on the other hosts, which gives the sum of all. So all ranks carry an equal share of the
// bytes, and copies, sums and transfers overlap.
#pragma once

#include <exception>
#include <functional>
#include <memory>
#include <vector>

#include "communicator.h"
#include "cuda/driver.h"
#include "transport/segment.h"
#include "types.h"

namespace hfreduce::gpu {

// The hosts of an operation, and how chunks are exchanged between them.
struct Hosts {
  static constexpr int kLanes = 2;  // carrying threads per rank: one keeps the link busy while the other waits

  int count = 1, index = 0;  // this host's
  int rails = 0;             // ranks of each host that add up and carry; 0: all
  // Completes this rank's part of a chunk over all hosts, in place. all_reduce: the sum. reduce_scatter: blocks of each
  // host in order; this host's becomes the sum. all_gather: such blocks; the others' are received. broadcast: the
  // root's. count: elements; bytes if data is only moved. Chunks of one lane come in the order of the operations, on
  // all hosts. Throws if the communicator has failed, or must fail.
  std::function<void(const Enqueued&, int lane, void* data, int64_t count)> carry;
  // Gets what `carry` has thrown, when the data is no longer accessed.
  std::function<void(const Enqueued&, std::exception_ptr)> failed;
};

class HostStaged {
 public:
  struct Options {
    int rank = 0, size = 1;    // among the ranks of this host
    int threads = 0;           // host cores that add for this rank; 0: half of the host's cores / ranks, at most 8
    int64_t share = 32 << 10;  // minimum bytes of a chunk's sum per core
    int64_t chunk = 16 << 20;  // maximum bytes of a rank's input per chunk; the caller waits for each chunk's calls
    int64_t least = 8 << 20;   // bytes of the first and the last chunks of a message
    int depth = 4;             // chunks in the ring, a power of two
    int streaming = -1;  // whether sums use non-temporal stores: 0, 1, or -1: if the ring does not fit in the caches
    uint32_t first = 0;  // number of the first chunk; tests begin shortly before the wrap-around
    Hosts hosts;         // for reduce_scatter and all_gather all must have equally many ranks, with consecutive numbers
  };
  static size_t segment_bytes(const Options&);

  // Called by all local ranks at the same time. Returns when all have settled their memory. segments: zeroed shared
  // memory for this object only, of every local rank, in order, including this one's; pinned here. stopped: whether the
  // communicator has failed. Called about every millisecond by waiting cores, and by this constructor; if true, all is
  // let go. Must be thread-safe.
  HostStaged(Driver&, std::vector<Segment> segments, const Options&, std::function<bool()> stopped);
  // Calls quit. Releases streams that still wait. Leaks the memory of operations that do not end even so.
  ~HostStaged();

  // Bytes/s of each rank's float32 that the cores of all ranks add up while no stream copies: the best of some tries.
  // Called by all ranks of the host together, before anything is enqueued. Not with several hosts.
  double rate();

  // Enqueued after earlier work on `stream`, and done before later work on it. in and out: device memory; they may be
  // the same (all_reduce), or `in` this rank's block of `out` (all_gather). Ranks make the same calls in the same
  // order. Operations on several streams need no events between them for this object, and overlap: one copies D2H while
  // the last one copies H2D. Not in a graph: the host counts the flags' values. Blocks are those of all ranks of all
  // hosts, host by host. root: whether this rank is the root. Enqueued: passed to Hosts::carry.
  void all_reduce(const void* in, void* out, int64_t count, DType, Reduction, Stream, const Enqueued& = {});
  void reduce_scatter(const void* in, void* out, int64_t count, DType, Reduction, Stream, const Enqueued& = {});
  void all_gather(const void* in, void* out, int64_t bytes, Stream, const Enqueued& = {});
  void broadcast(void* data, int64_t bytes, bool root, Stream, const Enqueued& = {});

  // After a failure: releases every stream that waits here, for good. This rank's outputs are then undefined. First
  // gives the other ranks up to 200 ms to take complete results. Any thread may call it.
  void let_go();
  // Joins the threads; nothing may be enqueued afterwards. Carrying threads end when the communicator has failed, or
  // when all enqueued work is done.
  void quit();

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace hfreduce::gpu
