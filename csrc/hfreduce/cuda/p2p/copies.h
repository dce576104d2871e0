// All-gather by copy engines, over peer access: no kernel of ours runs, so none of a rank waits for another's on
// multiprocessors that compute could have.
//
// Each rank has rings of chunks in its device's memory, one for each of the others, which have opened them. A rank's
// copy engine writes its block there chunk by chunk, and the receiver copies them on into its output, at the rate of
// its own memory. So nobody needs to know another rank's pointers. Streams are ordered by flags in pinned memory of the
// host that streams write and wait for (Driver::write, wait): the host waits for nothing.
#pragma once

#include <memory>
#include <vector>

#include "cuda/driver.h"
#include "transport/segment.h"
#include "types.h"

namespace hfreduce::gpu {

class Copies {
 public:
  struct Options {
    int rank = 0, size = 1;     // all on one host
    int64_t chunk = 8 << 20;    // bytes of a rank's block in one chunk, at most
    int64_t least = 512 << 10;  // and in the first one of a message
    int depth = 4;              // chunks in a ring, a power of two
    milliseconds grace{200};    // that let_go gives the others
    uint32_t first = 0;         // number of the first chunk; tests begin shortly before it wraps around
  };
  static size_t segment_bytes();

  // segments: of zeroed shared memory that nothing else lies in, of every rank, in order, this one's own included;
  // pinned here. Of use once it has been given all ranks' handles: which is after all have made theirs.
  Copies(Driver&, std::vector<Segment> segments, const Options&);
  Handle handle() const;                     // of this rank's rings
  void open(const std::vector<Handle>& of);  // of all, by rank
  // When no rank runs any more, for peers write to this one's rings. What its own streams still wait for is let go of,
  // and what does not end even so keeps its memory.
  ~Copies();

  // Enqueued behind `stream`, and done before what `stream` does next. `in` may be the right part of `out`. Ranks call
  // the same, in the same order; calls come one after another also on the device: events between their streams see to
  // it. Not into a graph: the flags' values are counted by the host.
  void all_gather(const void* in, void* out, int64_t bytes, Stream);

  // Lets go of what waits here: after a failure, and again every few milliseconds until nothing runs, for a peer's
  // stream may take back what was raised. What is in this rank's outputs is of no use then. The first time it gives the
  // others time to take what is theirs. Any thread may call it.
  void let_go();

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace hfreduce::gpu
