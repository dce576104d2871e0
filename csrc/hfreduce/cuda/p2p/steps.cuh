// The device side of peers.h. Blocks of the same number on all ranks work together.
//
// A block pushes for a step, arrives (raises its flag at every peer), waits for the peers' flags, pushes for the next
// step, reads its own slots, arrives, and so on:
//
//   push(1)  arrive(1) wait(1)  push(2) read(1)  arrive(2) wait(2)  push(3) read(2)  arrive(3) ...
//
// So local reads and writes overlap with the next step's transfer over the link. What `read` computes may go to peers,
// too: it belongs to the step that is being pushed.
//
// Why two slots per writer are enough. Rank p pushes for step s + 1, into the slots of parity (s + 1) % 2, only after
// wait(s): it has seen flag s of every peer q. Before q raised it, q had finished read(s - 1): the reads precede q's
// arrive(s) in program order, all its threads synchronize (__syncthreads) before its flags are raised, the flag is a
// release and p's wait an acquire, and p's threads synchronize again after the wait. So what p writes into q's slots of
// the parity of s - 1 = (s + 1) - 2 comes after q's reads there. In the other direction, what p has pushed for step s
// comes before its flag s (same barrier, same release), and so before q's read(s). The same holds across operations:
// the first push of an operation, for step s + 1, comes after wait(s) of the one before, which ended with read(s), and
// so did its kernel. Flags only rise, by one per step. A peer is at most one step ahead: flag s + 1 implies that it has
// seen this rank's flag s, with its fingerprint.
//
// The blocks of one rank are not ordered and do not need each other: they may run in any order, at any pace, and not
// all at once, as long as each rank starts them in the order of their numbers.
//
// Bytes in flight: a block sends up to a slot to each peer in a step. A step without data takes about 2 us on NVLink
// (the release waits until all stores have arrived, then the flag travels). To saturate a link of b bytes/s, blocks x
// slot must be several times b x 2 us: about 2 MiB on an H200. Blocks drift out of phase, since they share the link:
// while one waits, others push. A block of 512 threads with four 16-byte loads each has 32 KiB of local loads in
// flight: 16 to 32 of them saturate the link's 400 GB/s and leave the other multiprocessors free.
#pragma once

#include "cuda/p2p/device.cuh"
#include "cuda/p2p/peers.h"
#include "cuda/p2p/sums.cuh"

namespace hfreduce::gpu {

constexpr int kLine = 128;  // bytes; pieces consist of whole lines
constexpr int kFlagsOfBlock = kLine / 8;
constexpr int kHeader = kLine;  // of a region of packets: see packets.cu
static_assert(kFlagsOfBlock >= kMaxRanks);

// Flags and steps wrap around.
__device__ __forceinline__ bool reached(uint32_t there, uint32_t wanted) { return int32_t(there - wanted) >= 0; }

// The number of bytes of [0, all) that lie in [begin, begin + most).
__host__ __device__ __forceinline__ int within(int64_t all, int64_t begin, int most) {
  const int64_t left = all - begin;
  return left <= 0 ? 0 : left < most ? int(left) : most;
}

// The number of the next operation of packets: never 0, which flags have before the first one, and of the other parity.
__device__ __forceinline__ uint32_t following(uint32_t number) { return number + 1 ? number + 1 : 2; }

// The region at rank `of` that rank `writer` writes in operation `number`.
__device__ __forceinline__ char* region(const Links& links, int of, uint32_t number, int writer) {
  return links.packets[of] + (int64_t(number % 2) * links.size + writer) * links.region;
}

// The other functions of this file and packets.cu that are not inlined are for rare cases. They take values, because an
// address would force a kernel's registers into memory.

__device__ __noinline__ inline void say_differs(const Links& links, int peer, uint32_t theirs) {
  write_board(&links.board->theirs, theirs);
  write_board(&links.board->differs, 1 + peer);
  write_board(&links.board->stop, 1);
}

// Returns the start of the wait (`start`; 0: now) if it may go on, or -1.
__device__ __noinline__ inline int64_t ask(const Links& links, int peer, int64_t start) {
  if (read_board(&links.board->stop)) return -1;
  const int64_t now = nanoseconds();
  if (start == 0 || now - start <= links.limit_ns) return start ? start : now;
  write_board(&links.board->overdue, 1 + peer);
  write_board(&links.board->stop, 1);
  return -1;
}

// A wait with a limit. `more` is called after each poll in vain.
//
// Reading the board is a trip over PCIe, and the trips of all threads take 30 ns each, one after another: if all
// threads of a small message did it at once, it would take a millisecond, for which the other ranks would wait, and so
// on. So it is rare, and the lanes of a warp take turns.
class Patience {
 public:
  __device__ __forceinline__ Patience(const Links& links, int peer)
      : links_(links), peer_(peer), looks_(threadIdx.x % 32 * (kLooks / 32)) {}

  // Whether to poll again. From time to time it checks whether peers are in another operation.
  template <class Elsewhere>
  __device__ __forceinline__ bool more(Elsewhere look_elsewhere) {
    relax();
    if (++looks_ % kLooks) return true;
    look_elsewhere();
    start_ = ask(links_, peer_, start_);
    return start_ >= 0;
  }

 private:
  const Links& links_;
  int peer_;
  uint32_t looks_;
  int64_t start_ = 0;
};

// Reports a peer that is in an operation of packets instead of this step. A peer's packets come after its flags, so a
// second look at the flag shows whether it has been in this step.
__device__ __noinline__ inline void look_at_packets(const Links& links, int peer, const uint64_t* flag, uint32_t step) {
  const uint32_t number = following(links.steps[kMaxBlocks]);
  const uint64_t header = see_flag(reinterpret_cast<uint64_t*>(region(links, links.rank, number, peer)));
  if (uint32_t(header >> 32) == number && !reached(uint32_t(see_flag(flag) >> 32), step))
    say_differs(links, peer, uint32_t(header));
}

class Block {
 public:
  __device__ __forceinline__ Block(const Links& links, uint32_t fingerprint)
      : links_(links), fingerprint_(fingerprint), next_(links.steps[blockIdx.x] + 1) {}

  __device__ __forceinline__ int rank() const { return links_.rank; }
  __device__ __forceinline__ int size() const { return links_.size; }
  // The i-th rank after this one, i from 0. Every rank begins with another peer, so that links are used evenly.
  __device__ __forceinline__ int peer(int i) const { return (links_.rank + 1 + i) % links_.size; }

  // theirs: where this rank writes at a peer, for the step that is being pushed. mine: what `writer` wrote here for the
  // last step that was arrived at.
  __device__ __forceinline__ char* theirs(int peer) const { return slot(peer, next_, links_.rank); }
  __device__ __forceinline__ const char* mine(int writer) const { return slot(links_.rank, next_ - 1, writer); }

  // Calls push(k) and read(k) for k in [0, steps). By all threads of the block.
  template <class Push, class Read>
  __device__ __forceinline__ void run(int steps, Push push, Read read) {
    if (steps == 0) return;
    for (int k = -1; k < steps; ++k) {
      if (k >= 0 && !arrive(k == 0 ? fingerprint_ : 0)) return;
      if (k + 1 < steps) push(k + 1);
      if (k >= 0) read(k);
    }
    if (threadIdx.x == 0) links_.steps[blockIdx.x] = next_ - 1;
  }

  // The factors of premul_sum are pushed with the first step, and read before the next arrival.
  __device__ __forceinline__ void push_factor(const Rule& rule, double factor) const {
    if (rule.op == Op::premul_sum && is_for_a_peer()) *factor_of(theirs(threadIdx.x)) = factor;
  }
  __device__ __forceinline__ void read_factors(Rule& rule, double factor) const {
    if (rule.op != Op::premul_sum) return;
#pragma unroll
    for (int i = 0; i < kMaxRanks; ++i)
      if (i < links_.size) rule.factors[i] = i == links_.rank ? factor : *factor_of(mine(i));
  }

 private:
  __device__ __forceinline__ char* slot(int of, uint32_t step, int writer) const {
    return links_.slots[of] + int64_t((blockIdx.x * 2 + step % 2) * links_.size + writer) * (links_.slot + kLine);
  }
  // In the line after a slot.
  __device__ __forceinline__ double* factor_of(char* slot) const {
    return reinterpret_cast<double*>(slot + links_.slot);
  }
  __device__ __forceinline__ const volatile double* factor_of(const char* slot) const {
    return reinterpret_cast<const volatile double*>(slot + links_.slot);
  }

  // The first threads handle one peer each.
  __device__ __forceinline__ bool is_for_a_peer() const {
    return int(threadIdx.x) < links_.size && int(threadIdx.x) != links_.rank;
  }

  // Returns whether all have arrived. note: the fingerprint in the first step of an operation, otherwise 0.
  __device__ __forceinline__ bool arrive(uint32_t note) {
    bool here = true;
    __syncthreads();
    if (is_for_a_peer()) {
      const int peer = threadIdx.x, line = blockIdx.x * kFlagsOfBlock;
      raise_flag(links_.flags[peer] + line + links_.rank, uint64_t(next_) << 32 | note);
      here = wait(links_.flags[links_.rank] + line + peer, peer, note);
    }
    ++next_;
    return !__syncthreads_or(!here);
  }

  __device__ __forceinline__ bool wait(const uint64_t* flag, int peer, uint32_t note) const {
    Patience patience(links_, peer);
    uint64_t value;
    while (!reached(uint32_t((value = see_flag(flag)) >> 32), next_))
      if (!patience.more([&] { look_at_packets(links_, peer, flag, next_); })) return false;
    if (note == 0 || uint32_t(value >> 32) != next_ || uint32_t(value) == note) return true;
    say_differs(links_, peer, uint32_t(value));
    return false;
  }

  const Links& links_;
  const uint32_t fingerprint_;
  uint32_t next_;  // the step that is being pushed
};

// Moves by all threads of a block, in units of 16 bytes: thread t has units t, t + blockDim, ..., and loads several
// before it stores the first. Each kind has a fast loop for aligned data, which returns the next unit, and a slow loop
// for the rest: unaligned data or the last few bytes.
constexpr int kQuad = sizeof(Quad);

__device__ __forceinline__ bool aligned(const void* p) { return reinterpret_cast<uintptr_t>(p) % kQuad == 0; }

// 16 bytes or less, at any addresses.
template <class T>
__device__ __forceinline__ void copy_units(char* to, const char* from, int bytes) {
  for (int i = 0; i < bytes; i += sizeof(T))
    memcpy(__builtin_assume_aligned(to + i, sizeof(T)), __builtin_assume_aligned(from + i, sizeof(T)), sizeof(T));
}
__device__ __forceinline__ void copy_some(char* to, const char* from, int bytes) {
  const uintptr_t all = reinterpret_cast<uintptr_t>(to) | reinterpret_cast<uintptr_t>(from) | uintptr_t(bytes);
  if (all % 8 == 0) return copy_units<uint64_t>(to, from, bytes);
  if (all % 4 == 0) return copy_units<uint32_t>(to, from, bytes);
  if (all % 2 == 0) return copy_units<uint16_t>(to, from, bytes);
  copy_units<uint8_t>(to, from, bytes);
}

__device__ __forceinline__ Words<4> words(const Quad& x) { return {{x.words[0], x.words[1], x.words[2], x.words[3]}}; }
__device__ __forceinline__ Quad quad(const Words<4>& x) { return {{x.words[0], x.words[1], x.words[2], x.words[3]}}; }

// The thread's first unit that is not before `end`, after a loop that has taken several at a time, up to v.
__device__ __forceinline__ int came_to(int v, int end) { return v - (v - end) / int(blockDim.x) * int(blockDim.x); }

struct Move {
  const char* from;
  char* to;
  int bytes;
};

__device__ __noinline__ inline void copy_slow(Move part, int v) {
  for (; v * kQuad < part.bytes; v += blockDim.x)
    copy_some(part.to + v * kQuad, part.from + v * kQuad, within(part.bytes, v * kQuad, kQuad));
}

__device__ __forceinline__ int copy_fast(const Move& part, int v) {
  constexpr int kUnroll = 4;
  const int stride = blockDim.x, end = part.bytes / kQuad;
  for (; v < end; v += kUnroll * stride) {
    Quad x[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u)
      if (v + u * stride < end) x[u] = load_quad(part.from + (v + u * stride) * kQuad);
#pragma unroll
    for (int u = 0; u < kUnroll; ++u)
      if (v + u * stride < end) store_quad(part.to + (v + u * stride) * kQuad, x[u]);
  }
  return came_to(v, end);
}

// Moves part(i) for i in [0, parts), of at most `most` bytes each. The threads treat all parts as one sequence, so that
// small parts are moved at the same time.
template <class F>
__device__ __forceinline__ void copy_parts(int parts, int most, F part) {
  const int whole = (most + kQuad - 1) / kQuad, stride = blockDim.x;
  int v = threadIdx.x;
  for (int i = 0; i < parts; ++i) {
    if (v < whole) {
      const Move p = part(i);
      const int rest = aligned(p.from) && aligned(p.to) ? copy_fast(p, v) : v;
      if (rest * kQuad < p.bytes) copy_slow(p, rest);
      v += (whole - v + stride - 1) / stride * stride;
    }
    v -= whole;
  }
}

// Copies the same bytes to the slots of all peers, and to `out` if it is not null.
__device__ __noinline__ inline void spread_slow(Block block, const char* from, int bytes, char* out, int v) {
  for (; v * kQuad < bytes; v += blockDim.x) {
    const int some = within(bytes, v * kQuad, kQuad);
    for (int i = 0; i < block.size() - 1; ++i)
      copy_some(block.theirs(block.peer(i)) + v * kQuad, from + v * kQuad, some);
    if (out) copy_some(out + v * kQuad, from + v * kQuad, some);
  }
}

__device__ __forceinline__ int spread_fast(const Block& block, const char* from, int bytes, char* out, int v) {
  constexpr int kUnroll = 4;
  const int stride = blockDim.x, end = bytes / kQuad;
  for (; v < end; v += kUnroll * stride) {
    Quad x[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u)
      if (v + u * stride < end) x[u] = load_quad(from + (v + u * stride) * kQuad);
    for (int i = 0; i < block.size(); ++i) {  // the last one is this rank
      char* to = i == block.size() - 1 ? out : block.theirs(block.peer(i));
      if (to == nullptr) break;
#pragma unroll
      for (int u = 0; u < kUnroll; ++u)
        if (v + u * stride < end) store_quad(to + (v + u * stride) * kQuad, x[u]);
    }
  }
  return came_to(v, end);
}

__device__ __forceinline__ void spread(const Block& block, const char* from, int bytes, char* out) {
  int v = threadIdx.x;
  if (aligned(from) && aligned(out)) v = spread_fast(block, from, bytes, out, v);
  if (v * kQuad < bytes) spread_slow(block, from, bytes, out, v);
}

// Adds up `bytes` of this rank's input, at `own`, and of all peers' slots, into `out`; and, unless `forward` is
// negative, into all peers' slots from that byte on (where the last 16 bytes are padded with arbitrary data).
struct Terms {
  const char* own;
  char* out;
  int bytes, forward;
};

__device__ __forceinline__ void forward(const Block& block, const Terms& terms, int v, const Quad& sum) {
  for (int i = 0; i < block.size() - 1 && terms.forward >= 0; ++i)
    store_quad(block.theirs(block.peer(i)) + terms.forward + v * kQuad, sum);
}

template <class A>
__device__ __noinline__ void reduce_slow(Block block, Terms terms, Rule rule, int v) {
  for (; v * kQuad < terms.bytes; v += blockDim.x) {
    const int some = within(terms.bytes, v * kQuad, kQuad);
    Words<4> x[A::kRanks];
#pragma unroll
    for (int i = 0; i < A::kRanks; ++i) {
      if (i >= rule.ranks) break;
      if (i == block.rank())
        copy_some(reinterpret_cast<char*>(&x[i]), terms.own + v * kQuad, some);
      else
        x[i] = words(load_quad(block.mine(i) + v * kQuad));
    }
    const Words<4> sum = A::of(x, rule);
    copy_some(terms.out + v * kQuad, reinterpret_cast<const char*>(&sum), some);
    forward(block, terms, v, quad(sum));
  }
}

template <class A>
__device__ __forceinline__ int reduce_fast(const Block& block, const Terms& terms, const Rule& rule, int v) {
  constexpr int kRanks = A::kRanks, kUnroll = 8 / kRanks;
  const int stride = blockDim.x, end = terms.bytes / kQuad;
  for (; v < end; v += kUnroll * stride) {
    Words<4> x[kUnroll][kRanks];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u)
#pragma unroll
      for (int i = 0; i < kRanks; ++i)
        if (i < A::ranks(rule) && v + u * stride < end)
          x[u][i] = words(load_quad((i == block.rank() ? terms.own : block.mine(i)) + (v + u * stride) * kQuad));
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      if (v + u * stride >= end) break;
      const Quad sum = quad(A::of(x[u], rule));
      store_quad(terms.out + (v + u * stride) * kQuad, sum);
      forward(block, terms, v + u * stride, sum);
    }
  }
  return came_to(v, end);
}

template <class A>
__device__ __forceinline__ void reduce_slots(const Block& block, const Terms& terms, const Rule& rule) {
  int v = threadIdx.x;
  if (aligned(terms.own) && aligned(terms.out)) v = reduce_fast<A>(block, terms, rule, v);
  if (v * kQuad < terms.bytes) reduce_slow<A>(block, terms, rule, v);
}

// Host code: pieces of equal size.

// Bytes of a piece of `all` bytes for `parts` ranks and `blocks` blocks: as few rounds as pieces of `most` bytes allow,
// and pieces as small as that number of rounds allows.
inline int piece(int64_t all, int parts, int blocks, int most) {
  const int64_t row = int64_t(parts) * blocks;
  const int64_t rounds = (all + row * most - 1) / (row * most);
  const int64_t bytes = (all + row * rounds - 1) / (row * rounds);
  return int((bytes + kLine - 1) / kLine * kLine);
}

// The number of rounds in which this block has data: rows of `row` bytes are assigned to blocks in turn.
__device__ __forceinline__ int rounds(int64_t all, int64_t row) {
  const int64_t rows = (all + row - 1) / row;
  return int((rows - blockIdx.x + gridDim.x - 1) / gridDim.x);
}

}  // namespace hfreduce::gpu
