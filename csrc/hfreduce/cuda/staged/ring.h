// The shared memory of the host-staged reduction, and the rules for its use. Below, "down" is D2H, and "up" is H2D.
//
// Chunks are numbered across operations of all kinds, modulo 2^32. Chunk k uses slot k % depth of the ring. Each rank's
// segment has its input for every slot, and the result of every size-th slot: so results are distributed over the NUMA
// nodes, and each is contiguous. A flag that has reached k + 1 means for chunk k:
//
//   arrived  set by this rank's stream: its input has come down; set for every chunk, even without input
//   reduced  by its cores: all inputs have arrived, and its slice is added up (with several hosts: over all of them)
//   taken    by its stream: the output that it wants has gone up
//   ready    its streams may copy the result up: all ranks have reduced
//   freed    its streams may reuse the slot: all ranks have taken
//
// Without a reduction, a result is ready when this rank's cores have seen all ranks arrive: a root, whose streams wait
// for nobody, may have left by then. With several hosts, it is ready when all ranks of this host have reduced, whatever
// the operation. Streams wait only for ready and freed, once each, whatever the number of ranks; the cores raise these.
// So the order is: a stream brings chunk k down when freed has reached k + 1 - depth, the cores touch it when all have
// arrived, and a stream takes it up when it is ready.
//
// A rank that lets go raises its own ready and freed beyond all values that are waited for. Before that, it sets
// `gone`, which the cores check last before they raise ready: if nobody is gone, all that was read is valid. They also
// check it before they send anything to another host; `carrying` counts those that are sending.
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
    alignas(64) uint32_t factors[kMaxDepth][2];  // of premul_sum, by slot: halves of a double, written by the stream
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

  // Whether all ranks' flags have reached the value.
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
  // Whether the other ranks that have not let go have taken all that is ready for them.
  bool taken_all_ready() const {
    for (int r = 0; r < size; ++r)
      if (r != rank && !head(r).gone.load(std::memory_order_seq_cst) && !passed(head(r).taken, head(r).ready))
        return false;
    return true;
  }
  // Updates this rank's `freed`.
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

// An operation, equal on all ranks: `count` elements (of a block, if there are several) of `size` bytes. A slot holds
// `rows` blocks, each padded to whole cache lines: first those of the first rank of each host, and so on.
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

// Cuts an operation into chunks. They are small at the beginning and the end, when one direction of the link has to
// wait for the other: each is at most half of what is before it, or half of what is left.
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
