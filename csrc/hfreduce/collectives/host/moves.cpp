// Collectives inside a host that only move bytes. Each goes a slot's worth at a time: who has bytes copies them into
// its slot, all arrive, who wants them copies them out, while the next piece is written into the other slot.
#include "collectives/host/host.h"
#include "collectives/host/slots.h"

namespace hfreduce::host {

// One step a piece; N bytes written by the root, N read by each of the others.
void broadcast(ShmGroup& shm, void* data, int64_t bytes, int root, const Watch& watch) {
  const auto write = [&](int64_t done, int64_t now) {
    if (shm.rank() == root) copy(shm.mine(), at(data, done), now);
  };
  const auto read = [&](int64_t done, int64_t now) {
    if (shm.rank() != root) copy(at(data, done), shm.slot(root), now);
  };
  for_pieces(shm, 1, bytes, watch, write, read);
}

// One step a piece; B bytes written by each rank but the root, (n-1) B read by the root.
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

// The root copies a piece of each block into its slot. One step a piece; (n-1) B bytes written by the root, B read by
// each of the others.
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

// One step a piece; with blocks of B bytes a rank writes B into its slot and reads (n-1) B. Its own block goes straight
// to its place, unless it is there already.
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

// A block of any size from each rank to each other. First all write down what they send to and expect from whom,
// arrive, and compare: the same mismatch everywhere. Then a slot is cut into n parts. In a step each rank copies a
// piece of each of its blocks into the part of its receiver, all arrive, and each copies its part out of the others'
// slots. There are as many steps as the largest block needs. Every byte is written once and read once.
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
