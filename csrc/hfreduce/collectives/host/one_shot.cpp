// One-shot all-reduce: the latency path.
//
// Each rank copies its input into its slot, all arrive, each adds up its own input and the slots of the n - 1 others
// into its output, in the order of ranks: equal bits everywhere. One step a chunk, N bytes written to slots and (n-1) N
// read from them by each rank. The next chunk is written while slower ranks still read, for slots alternate. For two
// ranks that is no more traffic than two-shot, with half the steps.
#include "collectives/host/local.h"
#include "collectives/host/slots.h"

namespace hfreduce::local {

void all_reduce_one_shot(ShmGroup& shm, const void* in, void* out, int64_t count, DType dtype, Reduction reduction,
                         int64_t chunk, const Watch& watch) {
  const int64_t size = size_of(dtype);
  for_chunks(shm, count, size, chunk, [&](int64_t done, int64_t now) {
    copy(shm.mine(), at(in, done * size), now * size);
    shm.arrive(watch);
    Inputs inputs(shm, 0, reduction);
    inputs.memory[shm.rank()] = at(in, done * size);
    inputs.reduce(at(out, done * size), now, dtype, reduction.op, shm.size());
    shm.next();
  });
}

}  // namespace hfreduce::local
