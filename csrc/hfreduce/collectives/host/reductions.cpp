// Reductions inside a host. Sums are in the order of ranks, so all ranks get equal bits.
#include "collectives/host/host.h"
#include "collectives/host/slots.h"

namespace hfreduce::host {

// The latency path. Each rank copies its input into its slot, all arrive, and each adds up its own input and the n - 1
// other slots into its output. One step per chunk. Each rank writes N bytes to slots and reads (n-1) N. Slots
// alternate, so the next chunk is written while slower ranks still read. For two ranks the traffic is that of two-shot,
// with half the steps.
void all_reduce_one_shot(ShmGroup& shm, const void* in, void* out, int64_t count, DType dtype, Reduction reduction,
                         int64_t chunk, const Watch& watch) {
  const int64_t size = size_of(dtype), most = chunk_of(shm, chunk, size);
  int64_t done = 0;
  do {
    const int64_t now = std::min(most, count - done);
    copy(shm.mine(), at(in, done * size), now * size);
    shm.arrive(watch);
    Inputs inputs(shm, 0, reduction);
    inputs.memory[shm.rank()] = at(in, done * size);
    inputs.reduce(at(out, done * size), now, dtype, reduction.op, shm.size());
    shm.next();
    done += now;
  } while (done < count);
}

// The bandwidth path; also reduce, which differs only in who reads the result.
//
// A chunk, small enough that the slots of all ranks stay in the caches, takes two steps. Each rank copies the others'
// slices into its slot, all arrive, each adds up its own slice, all arrive, and every rank that wants the sum copies
// all slices out. With n ranks and N bytes, each rank reads its input once from memory and writes its output once.
// Through the caches it writes (n-1)/n N and 1/n N, and reads (n-1)/n N and N.
void all_reduce_two_shot(ShmGroup& shm, const void* in, void* out, int64_t count, DType dtype, Reduction reduction,
                         int64_t chunk, const Watch& watch, int root) {
  const int64_t size = size_of(dtype), most = chunk_of(shm, chunk, size);
  const int n = shm.size();
  const bool wanted = root < 0 || root == shm.rank();
  int64_t done = 0;
  do {
    const int64_t now = std::min(most, count - done);
    const void* const from = at(in, done * size);
    const Slice own(now, size, shm.rank(), n);
    copy(shm.mine(), from, own.first * size);
    copy(shm.mine() + own.last * size, at(from, own.last * size), (now - own.last) * size);
    shm.arrive(watch);
    Inputs inputs(shm, own.first * size, reduction);
    inputs.memory[shm.rank()] = at(from, own.first * size);
    shm.next();
    inputs.reduce(shm.mine() + own.first * size, own.count(), dtype, reduction.op, n);
    shm.arrive(watch);
    for (int i = 0; wanted && i < n; ++i) {
      const Slice slice(now, size, i, n);
      copy(at(out, (done + slice.first) * size), shm.slot(i) + slice.first * size, slice.count() * size);
    }
    shm.next();
    done += now;
  } while (done < count);
}

// A step takes a piece of each of the n blocks, which together fill a slot: each rank copies the pieces of the others'
// blocks into its slot, all arrive, and each adds up its own block's piece directly into its output. With blocks of B
// bytes a rank writes (n-1) B and reads n B through the caches, and writes B of output.
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

}  // namespace hfreduce::host
