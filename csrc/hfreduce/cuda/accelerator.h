// The GPU of a communicator: which path a collective on device memory takes, in what order streams come to it, and who
// notices when it does not end.
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

// Made by all ranks at their first operation on device memory, which is a collective: it meets the others over the
// communicator's own collectives on the CPU, proves by real copies and a kernel that peers reach each other, and agrees
// on what all can do. HFREDUCE_P2P=0 forbids peer access (one rank that has it is enough); 1 lets kernels wait for each
// other also where ranks share a device, which then runs them by turns.
//
// Kernels of all streams come one after another, by events, but for those that are captured into a graph: whoever
// replays it sees to it that nothing else of the group runs meanwhile.
class Accelerator {
 public:
  // rows: rank 0's are everybody's.
  Accelerator(Communicator&, std::unique_ptr<Driver>, std::vector<DeviceRow> rows, milliseconds timeout);
  ~Accelerator();  // as shutdown, at once

  Path path(const Message&) const;                                 // of a collective; equal on all ranks
  static bool captures(Path path) { return path < Path::staged; }  // into a CUDA graph

  // Enqueue on `stream`, of the device that is current; they throw Fault when the communicator has failed. What fails
  // later fails the communicator: kernels end, streams are let go, and the next operation throws. By the path that was
  // chosen, which is not Path::host.
  void all_reduce(Path, const void* in, void* out, int64_t count, DType, Reduction, Stream, milliseconds timeout);
  void reduce_scatter(Path, const void* in, void* out, int64_t count, DType, Reduction, Stream, milliseconds timeout);
  void all_gather(Path, const void* in, void* out, int64_t count, DType, Stream, milliseconds timeout);
  void broadcast(Path, void* data, int64_t count, DType, int root, Stream, milliseconds timeout);
  // Waits for the other ranks' hosts: what they exchange decides the path, and how many steps there are.
  void all_to_all(const void* in, const int64_t* in_offsets, const int64_t* in_counts, void* out,
                  const int64_t* out_offsets, const int64_t* out_counts, DType, Stream, milliseconds timeout);

  DeviceMessages* messages() const;  // send and recv; nullptr where they go by way of the host

  std::string describe() const;  // "peers reach each other", or why not
  // Waits for what runs, up to `patience`, and for the other ranks to have come here, 3 s at most; then lets go of the
  // memory. What still runs then is given up, with its memory. Idempotent.
  void shutdown(milliseconds patience);

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace hfreduce::gpu
