// All-gather by copy engines over peer access. No kernel of ours runs, so none occupies multiprocessors while it waits
// for another rank.
//
// Each rank has rings of chunks in its device memory, one for each other rank, which opens it. A rank's copy engine
// writes its block there in chunks, and the receiver copies them into its output, at the bandwidth of its own memory.
// So no rank needs another's pointers. Streams are ordered by flags in pinned host memory (Driver::write, wait): the
// host does not wait.
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
    int64_t chunk = 8 << 20;    // maximum bytes of a rank's block per chunk
    int64_t least = 512 << 10;  // bytes of the first chunk of a message
    int depth = 4;              // chunks in a ring, a power of two
    milliseconds grace{200};    // that let_go gives the other ranks
    uint32_t first = 0;         // number of the first chunk; tests begin shortly before the wrap-around
  };
  static size_t segment_bytes();

  // segments: zeroed shared memory for this object only, of every rank, in order, including this one's; pinned here.
  // Ready for use after open(), which needs the handles of all ranks.
  Copies(Driver&, std::vector<Segment> segments, const Options&);
  Handle handle() const;                     // of this rank's rings
  void open(const std::vector<Handle>& of);  // of all ranks, by rank
  // Only after all ranks have ended their work, because peers write to this rank's rings. Releases its own streams if
  // they still wait. Leaks the memory of those that do not end even so.
  ~Copies();

  // Enqueued after earlier work on `stream`, and done before later work on it. `in` may be this rank's block of `out`.
  // Ranks make the same calls in the same order. The caller orders calls on the device, by events between their
  // streams. Not in a graph: the host counts the flags' values.
  void all_gather(const void* in, void* out, int64_t bytes, Stream);

  // Releases streams that wait here. Call it after a failure, and again every few milliseconds until nothing runs,
  // because a peer's stream may lower a raised flag. This rank's outputs are then undefined. The first call gives the
  // other ranks time to take their data. Any thread may call it.
  void let_go();

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace hfreduce::gpu
