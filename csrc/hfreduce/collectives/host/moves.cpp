// Collectives inside a host that only move bytes, in pieces of a slot: the sources copy a piece into their slots, all
// ranks arrive, and the destinations copy it out while the next piece is written into the other slot.
#include "collectives/host/host.h"
#include "collectives/host/slots.h"

namespace hfreduce::host {

// One step per piece. The root writes N bytes, and each other rank reads N.
void broadcast(ShmGroup& shm, void* data, int64_t bytes, int root, const Watch& watch) {
  const auto write = [&](int64_t done, int64_t now) {
    if (shm.rank() == root) copy(shm.mine(), at(data, done), now);
  };
  const auto read = [&](int64_t done, int64_t now) {
    if (shm.rank() != root) copy(at(data, done), shm.slot(root), now);
  };
  for_pieces(shm, 1, bytes, watch, write, read);
}

// One step per piece. Each rank but the root writes B bytes, and the root reads (n-1) B.
void gather(ShmGroup& shm, const void* in, void* out, int64_t bytes, int root, const Watch& watch) {
  if (shm.rank() == root) copy(at(out, root * bytes), in, bytes);
  const auto write = [&](int64_t done, int64_t now) {
    if (shm.rank() != root) copy(shm.mine(), at(in, done), now);
  };
  const auto read = [&](int64_t done, int64_t now) {
    for (int b = 0; shm.rank() == root && b < shm.size(); ++b)
      if (b != root) copy(at(out, b * bytes + done), shm.slot(b), now);
  };
  for_pieces(shm, 1, bytes, watch, write, read);
}

// The root copies a piece of each block into its slot. One step per piece. The root writes (n-1) B bytes, and each
// other rank reads B.
void scatter(ShmGroup& shm, const void* in, void* out, int64_t bytes, int root, const Watch& watch) {
  const int64_t part = piece(shm.slot_bytes(), shm.size(), 1);
  if (shm.rank() == root) copy(out, at(in, root * bytes), bytes);
  const auto write = [&](int64_t done, int64_t now) {
    for (int b = 0; shm.rank() == root && b < shm.size(); ++b)
      if (b != root) copy(shm.mine() + b * part, at(in, b * bytes + done), now);
  };
  const auto read = [&](int64_t done, int64_t now) {
    if (shm.rank() != root) copy(at(out, done), shm.slot(root) + shm.rank() * part, now);
  };
  for_pieces(shm, shm.size(), bytes, watch, write, read);
}

// One step per piece. With blocks of B bytes a rank writes B into its slot and reads (n-1) B. Its own block is copied
// directly to its place, unless it is already there.
void all_gather(ShmGroup& shm, const void* in, void* out, int64_t stride, int64_t bytes, const Watch& watch) {
  copy(at(out, shm.rank() * stride), in, bytes);
  const auto write = [&](int64_t done, int64_t now) { copy(shm.mine(), at(in, done), now); };
  const auto read = [&](int64_t done, int64_t now) {
    for (int b = 0; b < shm.size(); ++b)
      if (b != shm.rank()) copy(at(out, b * stride + done), shm.slot(b), now);
  };
  for_pieces(shm, 1, bytes, watch, write, read);
}

namespace {

// The bytes that rank i sends to b, and that it expects from b, as written in the slots.
int64_t sent(const ShmGroup& shm, int i, int b) { return reinterpret_cast<const int64_t*>(shm.slot(i))[b]; }
int64_t expected(const ShmGroup& shm, int i, int b) { return sent(shm, i, shm.size() + b); }

// Compares them and returns the largest block.
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

// A block of any size from each rank to each other. First all ranks write the sizes that they send and expect, arrive,
// and compare: a mismatch gives the same error on all ranks. Then a slot is divided into n parts. In a step each rank
// copies a piece of each of its blocks into the receiver's part, all arrive, and each copies its parts out of the
// others' slots. The largest block determines the number of steps. Every byte is written once and read once.
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

}  // namespace hfreduce::host
