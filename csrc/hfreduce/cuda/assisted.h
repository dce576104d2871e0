// The CPU-assisted reduce: GPUs of one host without peer access (or whose multiprocessors belong to somebody else)
// reduce through the host's memory, by copy engines and host cores alone.
//
// A message goes in chunks. Each rank's copy engine brings its chunk down into pinned memory that all local ranks
// share; as soon as it is there from all, each rank's cores add up their slice of the chunk, in rank order; as soon as
// all slices are there, each rank's other copy engine takes them up. Both directions and the cores work at the same
// time, on different chunks, in a ring of kDepth. Streams are ordered by flags in shared memory that streams write and
// wait for (Driver::write, wait): the host never blocks, and no kernel runs.
#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "cuda/driver.h"
#include "segment.h"
#include "types.h"

namespace hfreduce::gpu {

class Assisted {
 public:
  struct Options {
    int rank = 0, size = 1;     // among the ranks of this host
    int threads = 0;            // host cores that add for this rank; 0: the host's cores / ranks, at most 8
    int64_t chunk = 8 << 20;    // bytes of a rank's input in one chunk, at most
    int64_t least = 512 << 10;  // and in the first and the last ones of a message
    int depth = 4;              // chunks in the ring, a power of two
    int streaming = -1;         // sums are written past the caches: 0, 1, or -1: if the ring does not fit into them
    uint32_t first = 0;         // number of the first chunk; tests begin shortly before it wraps around
  };
  static size_t segment_bytes(const Options&);

  // All local ranks do this at the same time: each returns when all have settled their memory. segments: of zeroed
  // shared memory that nothing else lies in, of every local rank, in order, this one's own included; pinned here.
  // stopped: asked about every millisecond by the cores while they wait, and by this: whether the communicator has
  // failed; then they let go of everything. Any thread may call it.
  Assisted(Driver&, std::vector<Segment> segments, const Options&, std::function<bool()> stopped);
  // Joins the cores' threads. What still runs is let go of; what does not end even so keeps its memory.
  ~Assisted();

  // Enqueued behind `stream`, and done before what `stream` does next. in and out: device memory; they may be the same
  // (all_reduce), or `in` the right part of `out` (all_gather). Ranks call the same, in the same order. Operations of
  // several streams need no events between them for this object's sake, and overlap: one comes down while the last one
  // goes up. Not into a graph: the flags' values are counted by the host.
  void all_reduce(const void* in, void* out, int64_t count, DType, Reduction, Stream);
  void reduce_scatter(const void* in, void* out, int64_t count, DType, Reduction, Stream);  // size blocks of `count`
  void all_gather(const void* in, void* out, int64_t bytes, Stream);
  void broadcast(void* data, int64_t bytes, int root, Stream);

  // Lets every stream that waits here go, for good: after a failure. What is in this rank's outputs is of no use then.
  // It first gives the other ranks time, 200 ms at most, to take up what is whole. Any thread may call it.
  void let_go();

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace hfreduce::gpu
