// The shared memory of the host-staged reduction, and who may do what in it when.
//
// Chunks are counted from operation to operation, whatever their kind, modulo 2^32; chunk k is in slot k % depth of the
// ring. Each rank's segment has for every slot the rank's input, and every size-th slot's result: so results are spread
// over the NUMA nodes, and each is in one piece. A flag that has reached k + 1 says of chunk k:
//
//   arrived  by this rank's stream: what it brings has come down; it does so for every chunk, also with nothing
//   reduced  by its cores: they have seen all arrive, and added up their slice; of several hosts, for all of them
//   taken    by its stream: what it wants has been taken up
//   ready    its streams may take the result up: all ranks have reduced
//   freed    its streams may use the slot again: all ranks have taken
//
// Where there is nothing to add up, a result is ready as soon as this rank's cores have seen all arrive: a root, whose
// streams wait for nobody, may be gone by then; but of several hosts, when all ranks of this one have reduced, whatever
// the operation. Streams wait for ready and freed alone, once for each, however many ranks there are; the cores see to
// them. That is all the order there is: a stream brings down chunk k when freed has reached k + 1 - depth, the cores
// touch it when all have arrived, a stream takes it up when it is ready.
//
// A rank that lets go raises its own ready and freed beyond all that may be waited for. Before, it says so in `gone`,
// which the cores look at last, before they raise ready: what all had read was whole if nobody was gone. So do they
// before they send anything to another host; `carrying` says how many of them do.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "collectives/host/slots.h"
#include "communicator.h"
#include "cuda/driver.h"
#include "transport/segment.h"
#include "types.h"

namespace hfreduce::gpu {

class StagingRing {
 public:
  static constexpr int kMaxDepth = 64;
  struct Head {
    alignas(64) Flag settled;
    alignas(64) Flag arrived;
    alignas(64) Flag reduced;
    alignas(64) Flag taken;
    alignas(64) Flag ready;
    alignas(64) Flag freed;
    alignas(64) Flag gone;
    alignas(64) Flag carrying;
    alignas(64) uint32_t factors[kMaxDepth][2];  // of premul_sum, by slot: halves of this rank's, from its stream
  };
  static constexpr int64_t kHead = 4096;
  static_assert(sizeof(Head) <= kHead);

  static size_t bytes(int size, int64_t chunk, int depth) {
    return kHead + (depth + (depth + size - 1) / size) * chunk;
  }

  StagingRing(std::vector<Segment> segments, int rank, int64_t chunk, int depth)
      : rank(rank),
        size(static_cast<int>(segments.size())),
        depth(depth),
        chunk(chunk),
        segments(std::move(segments)) {}

  Head& head(int r) const { return *reinterpret_cast<Head*>(segments[r].data()); }
  Head& mine() const { return head(rank); }
  uint32_t slot(uint32_t k) const { return k % static_cast<uint32_t>(depth); }
  char* input(int r, uint32_t k) const { return segments[r].data() + kHead + slot(k) * chunk; }
  char* result(uint32_t k) const {
    const int s = static_cast<int>(slot(k));
    return segments[s % size].data() + kHead + (depth + s / size) * chunk;
  }

  // Whether this flag of all ranks has reached the value.
  bool all(Flag Head::* flag, uint32_t value) const {
    for (int r = 0; r < size; ++r)
      if (!passed((head(r).*flag).load(std::memory_order_seq_cst), value)) return false;
    return true;
  }
  bool gone() const {  // whether any rank has let go
    for (int r = 0; r < size; ++r)
      if (head(r).gone.load(std::memory_order_seq_cst)) return true;
    return false;
  }
  bool carrying() const {  // whether any rank's cores are between hosts
    for (int r = 0; r < size; ++r)
      if (head(r).carrying.load(std::memory_order_seq_cst)) return true;
    return false;
  }
  // Whether the other ranks that have not let go have taken all that is ready there.
  bool taken_all_ready() const {
    for (int r = 0; r < size; ++r)
      if (r != rank && !head(r).gone.load(std::memory_order_seq_cst) && !passed(head(r).taken, head(r).ready))
        return false;
    return true;
  }
  // Brings this rank's `freed` up to date.
  void sweep() const {
    uint32_t least = mine().taken.load(std::memory_order_acquire);
    for (int r = 0; r < size; ++r) {
      const uint32_t taken = head(r).taken.load(std::memory_order_acquire);
      if (passed(least, taken)) least = taken;
    }
    raise(mine().freed, least);
  }

  const int rank, size, depth;
  const int64_t chunk;
  std::vector<Segment> segments;
};

// An operation, as all ranks see it: `count` elements (of a block, where there are several) of `size` bytes. In a slot
// lie `rows` blocks, one behind the other in whole cache lines: first those of the first rank of each host, and so on.
struct Work {
  Kind kind;
  DType dtype;
  Reduction reduction;  // inside this host
  int64_t count, size;
  int rows;
  Enqueued enqueued;
  uint32_t first = 0, chunks = 0;  // numbers of its chunks

  bool sums() const { return kind == Kind::all_reduce || kind == Kind::reduce_scatter; }
};

// The elements of one chunk.
struct Span {
  int64_t begin, count;
  int64_t step(const Work& work) const { return (count * work.size + kLine - 1) / kLine * kLine; }  // bytes of a row
};

// Cuts an operation into chunks: small ones at its begin and its end, where a direction of the link would wait for the
// other one, each at most half of what is before, or behind it.
class ChunkCut {
 public:
  ChunkCut(const Work& work, int64_t chunk, int64_t least)
      : line_(kLine / work.size),
        most_(piece(chunk, work.rows, work.size)),
        least_(std::min(most_, piece(least, work.rows, work.size))),
        left_(work.count) {}

  bool done() const { return left_ == 0; }
  Span next() {
    const int64_t half = std::min(begin_, left_) / 2 / line_ * line_;
    int64_t count = std::min(std::max(half, least_), most_);
    if (left_ <= std::min(least_ + least_ / 2, most_)) count = left_;
    count = std::min(count, left_);
    const Span part{begin_, count};
    begin_ += count, left_ -= count;
    return part;
  }

 private:
  const int64_t line_, most_, least_;
  int64_t begin_ = 0, left_;
};

}  // namespace hfreduce::gpu
