// The GPU of a communicator: chooses the path of a collective on device memory, orders the streams, and detects
// operations that do not end.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "cuda/driver.h"
#include "cuda/paths.h"
#include "types.h"

namespace hfreduce {
class Communicator;
}

namespace hfreduce::gpu {

class DeviceMessages;

// Made by all ranks at their first operation on device memory. This is a collective: over the communicator's CPU
// collectives the ranks test by real copies and a kernel that they reach each other's memory, and agree on what all can
// do. HFREDUCE_P2P=0 forbids peer access (on one rank is enough). 1 lets kernels wait for each other even if ranks
// share a device, which then time-slices them.
//
// Kernels on different streams are serialized by events, except those captured into a graph: whoever replays it must
// not run anything else of the group meanwhile.
class Accelerator {
 public:
  // Rank 0's rows apply to all ranks.
  Accelerator(Communicator&, std::unique_ptr<Driver>, std::vector<DeviceRow> rows, milliseconds timeout);
  ~Accelerator();  // shuts down without waiting

  Path path(const Message&) const;                                 // of a collective; equal on all ranks
  static bool captures(Path path) { return path < Path::staged; }  // into a CUDA graph

  // Enqueue on `stream`, of the current device, by the chosen path, which is not Path::host. Throw Fault if the
  // communicator has failed. A later failure fails the communicator: kernels end, waiting streams are released, and the
  // next operation throws.
  void all_reduce(Path, const void* in, void* out, int64_t count, DType, Reduction, Stream, milliseconds timeout);
  void reduce_scatter(Path, const void* in, void* out, int64_t count, DType, Reduction, Stream, milliseconds timeout);
  void all_gather(Path, const void* in, void* out, int64_t count, DType, Stream, milliseconds timeout);
  void broadcast(Path, void* data, int64_t count, DType, int root, Stream, milliseconds timeout);
  // Waits for the other ranks' hosts: they exchange sizes, which determine the path and the number of steps.
  void all_to_all(const void* in, const int64_t* in_offsets, const int64_t* in_counts, void* out,
                  const int64_t* out_offsets, const int64_t* out_counts, DType, Stream, milliseconds timeout);

  DeviceMessages* messages() const;  // for send and recv; nullptr: they go by way of the host

  std::string describe() const;  // whether peers reach each other, or why not
  // Waits for running operations, up to `patience`, and until the other ranks have arrived here, up to 3 s. Then frees
  // the memory. Memory that may still be in use is leaked. Idempotent.
  void shutdown(milliseconds patience);

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace hfreduce::gpu
