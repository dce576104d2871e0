// All-to-all inside a host: a block of any size from each rank to each other.
//
// First all write down what they send to and expect from whom, arrive, and compare: the same mismatch everywhere. Then
// a slot is cut into n parts. In a step each rank copies a piece of each of its blocks into the part of its receiver,
// all arrive, and each copies its part out of the others' slots. There are as many steps as the largest block needs.
// Every byte is written once and read once.
#include "collectives/host/local.h"
#include "collectives/host/slots.h"

namespace hfreduce::local {

namespace {

// What rank i sends to b, in bytes, and what it expects from b, as written down in the slots.
int64_t sent(const ShmGroup& shm, int i, int b) { return reinterpret_cast<const int64_t*>(shm.slot(i))[b]; }
int64_t expected(const ShmGroup& shm, int i, int b) { return sent(shm, i, shm.size() + b); }

// Compares, and returns the largest block.
int64_t agree(const ShmGroup& shm) {
  int64_t largest = 0;
  for (int from = 0; from < shm.size(); ++from)
    for (int to = 0; to < shm.size(); ++to) {
      const int64_t bytes = sent(shm, from, to), wanted = expected(shm, to, from);
      largest = std::max(largest, bytes);
      if (bytes == wanted) continue;
      throw Fault(Fault::Cause::mismatch, {shm.ranks()[from], shm.ranks()[to]},
                  "all_to_all number " + std::to_string(shm.call(0).sequence) + ": " + shm.name(from) + " sends " +
                      std::to_string(bytes) + " bytes to " + shm.name(to) + ", which expects " +
                      std::to_string(wanted) + ".");
    }
  return largest;
}

}  // namespace

void all_to_all(ShmGroup& shm, const void* in, const int64_t* in_offsets, const int64_t* in_sizes, void* out,
                const int64_t* out_offsets, const int64_t* out_sizes, const Watch& watch) {
  const int me = shm.rank(), n = shm.size();
  copy(shm.mine(), in_sizes, n * sizeof(int64_t));
  copy(shm.mine() + n * sizeof(int64_t), out_sizes, n * sizeof(int64_t));
  shm.arrive(watch);
  const int64_t largest = agree(shm), most = piece(shm.slot_bytes(), n, 1);
  shm.next();
  copy(at(out, out_offsets[me]), at(in, in_offsets[me]), in_sizes[me]);
  for (int64_t done = 0; done < largest; done += most) {
    for (int b = 0; b < n; ++b)
      if (b != me) copy(shm.mine() + b * most, at(in, in_offsets[b] + done), std::min(most, in_sizes[b] - done));
    shm.arrive(watch);
    for (int b = 0; b < n; ++b)
      if (b != me) copy(at(out, out_offsets[b] + done), shm.slot(b) + me * most, std::min(most, out_sizes[b] - done));
    shm.next();
  }
}

}  // namespace hfreduce::local
