// The host-staged reduction: GPUs of one host without peer access (or whose multiprocessors belong to somebody else)
// reduce through the host's memory, by copy engines and host cores alone.
//
// A message goes in chunks. Each rank's copy engine brings its chunk down into pinned memory that all local ranks
// share; as soon as it is there from all, each rank's cores add up their slice of the chunk, in rank order; as soon as
// all slices are there, each rank's other copy engine takes them up. Both directions and the cores work at the same
// time, on different chunks, in a ring of kDepth. Streams are ordered by flags in shared memory that streams write and
// wait for (Driver::write, wait): the host never blocks, and no kernel runs.
//
// Of several hosts, each adds up what its own ranks have; then each rank's slices travel to the ranks of the same place
// on the other hosts, by threads of their own, and come back as the sum of all. So every rank carries one share of the
// bytes, at the same time, and copies, sums and travels overlap.
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

// The hosts that an operation spans, and how chunks come from one to another.
struct Hosts {
  static constexpr int kLanes = 2;  // threads of a rank that carry: one fills the link while the other waits

  int count = 1, index = 0;  // this one
  int rails = 0;             // ranks of each host that add up and carry; 0: all
  // Turns this rank's part of a chunk of the operation into what all hosts have together, in place: all_reduce, the
  // sum; reduce_scatter, blocks of each host in order, of which this host's becomes the sum; all_gather, such blocks,
  // of which the others' come; broadcast, the root's. count: elements, or bytes of what is only moved. Chunks of one
  // lane come in the order of the operations, on all hosts. Throws when the communicator has failed, or must fail.
  std::function<void(const Enqueued&, int lane, void* data, int64_t count)> carry;
  // What it has thrown. Called when the data is not touched any more.
  std::function<void(const Enqueued&, std::exception_ptr)> failed;
};

class HostStaged {
 public:
  struct Options {
    int rank = 0, size = 1;    // among the ranks of this host
    int threads = 0;           // host cores that add for this rank; 0: half of the host's cores / ranks, at most 8
    int64_t share = 32 << 10;  // bytes of a chunk's sum that one of them adds up, at least
    int64_t chunk = 16 << 20;  // bytes of a rank's input in one chunk, at most: its calls are what a caller waits for
    int64_t least = 8 << 20;   // and in the first and the last ones of a message
    int depth = 4;             // chunks in the ring, a power of two
    int streaming = -1;        // sums are written past the caches: 0, 1, or -1: if the ring does not fit into them
    uint32_t first = 0;        // number of the first chunk; tests begin shortly before it wraps around
    Hosts hosts;               // for reduce_scatter and all_gather all must have equally many ranks, one after another
  };
  static size_t segment_bytes(const Options&);

  // All local ranks do this at the same time: each returns when all have settled their memory. segments: of zeroed
  // shared memory that nothing else lies in, of every local rank, in order, this one's own included; pinned here.
  // stopped: asked about every millisecond by the cores while they wait, and by this: whether the communicator has
  // failed; then they let go of everything. Any thread may call it.
  HostStaged(Driver&, std::vector<Segment> segments, const Options&, std::function<bool()> stopped);
  // As quit. What still runs is let go of; what does not end even so keeps its memory.
  ~HostStaged();

  // Bytes a second of each rank's float32 that the cores of all ranks add up while no stream copies: the best of some
  // tries. All ranks of the host call this together, before anything is enqueued; not of several hosts.
  double rate();

  // Enqueued behind `stream`, and done before what `stream` does next. in and out: device memory; they may be the same
  // (all_reduce), or `in` the right part of `out` (all_gather). Ranks call the same, in the same order. Operations of
  // several streams need no events between them for this object's sake, and overlap: one comes down while the last one
  // goes up. Not into a graph: the flags' values are counted by the host. Blocks are those of all ranks of all hosts,
  // host after host. root: whether this rank is it. Enqueued: what Hosts::carry is told.
  void all_reduce(const void* in, void* out, int64_t count, DType, Reduction, Stream, const Enqueued& = {});
  void reduce_scatter(const void* in, void* out, int64_t count, DType, Reduction, Stream, const Enqueued& = {});
  void all_gather(const void* in, void* out, int64_t bytes, Stream, const Enqueued& = {});
  void broadcast(void* data, int64_t bytes, bool root, Stream, const Enqueued& = {});

  // Lets every stream that waits here go, for good: after a failure. What is in this rank's outputs is of no use then.
  // It first gives the other ranks time, 200 ms at most, to take up what is whole. Any thread may call it.
  void let_go();
  // Joins the cores' threads: nothing is enqueued afterwards. Those that carry end when the communicator has failed, or
  // when what was enqueued is done.
  void quit();

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace hfreduce::gpu
