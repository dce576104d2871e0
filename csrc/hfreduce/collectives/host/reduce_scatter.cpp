// Reduce-scatter inside a host.
//
// A piece of each of the n blocks, together a slot: each rank copies the pieces of the others' blocks into its slot,
// all arrive, each adds up its own block's piece straight into its output (rank order). One step a piece; with blocks
// of B bytes a rank writes (n-1) B and reads n B through the caches, and writes B of output.
#include "collectives/host/local.h"
#include "collectives/host/slots.h"

namespace hfreduce::local {

void reduce_scatter(ShmGroup& shm, const void* in, int64_t stride, void* out, int64_t count, DType dtype,
                    Reduction reduction, int64_t divisor, const Watch& watch) {
  const int64_t size = size_of(dtype), most = piece(shm.slot_bytes(), shm.size(), size);
  int64_t done = 0;
  do {
    const int64_t now = std::min(most, count - done);
    for (int b = 0; b < shm.size(); ++b)
      if (b != shm.rank()) copy(shm.mine() + b * most * size, at(in, (b * stride + done) * size), now * size);
    shm.arrive(watch);
    Inputs inputs(shm, shm.rank() * most * size, reduction);
    inputs.memory[shm.rank()] = at(in, (shm.rank() * stride + done) * size);
    inputs.reduce(at(out, done * size), now, dtype, reduction.op, divisor);
    shm.next();
    done += now;
  } while (done < count);
}

}  // namespace hfreduce::local
