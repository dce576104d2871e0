// Two-shot all-reduce: the bandwidth path, and reduce, which is its first half.
//
// A chunk of the message, small enough that all ranks' slots stay in the caches, goes in two steps. Each rank copies
// the slices of the others into its slot, all arrive, each adds up its own slice (rank order: equal bits everywhere),
// all arrive, each copies all slices out. With n ranks and N bytes, each rank reads its input once and writes its
// output once in memory; through the caches it writes (n-1)/n N and 1/n N, and reads (n-1)/n N and N.
#include "collectives/host/local.h"
#include "collectives/host/slots.h"

namespace hfreduce::local {

namespace {

// The chunk that begins at `in`; `here` says whether this rank wants it in `out`.
void chunk_two_shot(ShmGroup& shm, const void* in, void* out, int64_t count, DType dtype, Reduction reduction,
                    bool here, const Watch& watch) {
  const int64_t size = size_of(dtype);
  const int n = shm.size();
  const Slice own(count, size, shm.rank(), n);
  copy(shm.mine(), in, own.first * size);
  copy(shm.mine() + own.last * size, at(in, own.last * size), (count - own.last) * size);
  shm.arrive(watch);
  Inputs inputs(shm, own.first * size, reduction);
  inputs.memory[shm.rank()] = at(in, own.first * size);
  shm.next();
  inputs.reduce(shm.mine() + own.first * size, own.count(), dtype, reduction.op, n);
  shm.arrive(watch);
  for (int i = 0; here && i < n; ++i) {
    const Slice slice(count, size, i, n);
    copy(at(out, slice.first * size), shm.slot(i) + slice.first * size, slice.count() * size);
  }
  shm.next();
}

void two_shot(ShmGroup& shm, const void* in, void* out, int64_t count, DType dtype, Reduction reduction, bool here,
              int64_t chunk, const Watch& watch) {
  const int64_t size = size_of(dtype);
  for_chunks(shm, count, size, chunk, [&](int64_t done, int64_t now) {
    chunk_two_shot(shm, at(in, done * size), at(out, done * size), now, dtype, reduction, here, watch);
  });
}

}  // namespace

void all_reduce_two_shot(ShmGroup& shm, const void* in, void* out, int64_t count, DType dtype, Reduction reduction,
                         int64_t chunk, const Watch& watch) {
  two_shot(shm, in, out, count, dtype, reduction, true, chunk, watch);
}

void reduce(ShmGroup& shm, const void* in, void* out, int64_t count, DType dtype, Reduction reduction, int root,
            const Watch& watch) {
  two_shot(shm, in, out, count, dtype, reduction, shm.rank() == root, shm.slot_bytes(), watch);
}

}  // namespace hfreduce::local
