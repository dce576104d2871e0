// The device memory of the ranks of one host, each mapped by all: what the kernels over NVLink and PCIe peer access
// work in. Where devices do not reach each other, they have the same, but less of it, in pinned memory of the host,
// which all of them write to, look at and read over PCIe.
//
// Everything is made of steps, as on the CPU (shm_group.h), but each block of a kernel is a team of its own: block b of
// all ranks take part in the steps of block b, and of no other. In step s of block b a rank writes into slot (b, s % 2,
// its rank) of every peer (stores over the link), raises flag (b, its rank) of every peer to s, waits until its own
// flags (b, *) have reached s, and then reads its own slots (b, s % 2, *). A rank that has seen flag s of a peer knows
// that the peer has done with step s - 1; so a slot may be written again two steps later, and no other rule is needed.
// (The proof, for the order in which the kernels push, wait and read, is in steps.cuh.)
// *Every* rank raises *every* peer's flag in every step, also when it has nothing to say. The steps of each block are
// counted in device memory, from operation to operation, whatever their kind and number of blocks: so a kernel can be
// captured into a graph. An operation must run with the same number of blocks and steps on all ranks, and operations
// one after another: a stream, or events, must see to it.
//
// A flag is 64 bits: the step in the upper half, in the lower the fingerprint of the call in its first step (0 in the
// others). Ranks whose fingerprints differ stop, and say so in Board. The small messages (packets.cu) have slots and
// counters of their own; a rank that waits in one kind of operation for a peer in the other kind sees it after a while.
#pragma once

#include <functional>
#include <vector>

#include "cuda/driver.h"
#include "transport/segment.h"
#include "types.h"

namespace hfreduce::gpu {

constexpr int kMaxRanks = 8;
constexpr int kMaxBlocks = 128;
constexpr int kMaxThreads = 512;
constexpr int kSlot = 64 << 10;      // bytes of one slot: what a block moves to one peer in one step
constexpr int kPackets = 512 << 10;  // bytes of payload for small messages, of each rank and parity
// The same in the host's memory: of blocks and slots as many as keep PCIe busy.
constexpr int kMapped = 64 << 10, kMappedBlocks = 32, kMappedSlot = 32 << 10;

// Pinned host memory, one per process: how the host stops its kernels, and how they tell it what they saw. A kernel
// that waits looks at `stop` every now and then, and ends when it is not 0: what it leaves in the outputs is then of no
// use, and no flag is raised any more; nor can these Peers be used again.
struct Board {
  uint32_t stop;     // written by the host; and by a kernel that has written one of the others, for its other blocks
  uint32_t overdue;  // by a kernel whose clock limit was over: 1 + the rank it waited for
  uint32_t differs;  // by a kernel whose peer called something else: 1 + that rank
  uint32_t theirs;   // its fingerprint
};

// As a kernel takes it, by value.
struct Links {
  int rank, size;
  char* slots[kMaxRanks];      // [rank] of each rank's memory: blocks x 2 x size x (a slot and a line: its notes)
  uint64_t* flags[kMaxRanks];  // a line of kMaxRanks for each block
  char* packets[kMaxRanks];    // 2 x size regions: see packets.cu
  int blocks, slot;  // how many of them, and bytes of one: kMaxBlocks and kSlot, or kMappedBlocks, kMappedSlot
  int region;        // bytes of a region: a line, and twice the payload
  uint32_t* steps;   // this rank's own counters: of kMaxBlocks blocks in slots, and again in packets
  Board* board;
  int64_t limit_ns;  // of the clock, for one wait: far beyond the host's timeout, should the host be gone
};

// Allocates this rank's memory, and opens the others'. One object for each communicator.
class Peers {
 public:
  // All ranks' handles, by rank, for this rank's: an all-gather among the ranks. It may throw.
  using Exchange = std::function<std::vector<Handle>(const Handle&)>;

  // size: 2 to kMaxRanks, ranks that reach each other's memory. limit: of Links::limit_ns.
  Peers(Driver& driver, int rank, int size, const Exchange& exchange, milliseconds limit = kLimit);
  // In the host's memory: zeroed segments of mapped_bytes of all ranks, by rank, which are pinned here. Its ranks need
  // not meet before it is destroyed.
  Peers(Driver& driver, int rank, std::vector<Segment> segments, milliseconds limit = kLimit);
  // When no kernel runs any more, on any rank. CUDA wants others to close memory before its owner frees it: where ranks
  // can still meet, they do so between `close` and the destructor, which closes what is open.
  ~Peers();
  void close();
  Peers(const Peers&) = delete;
  Peers& operator=(const Peers&) = delete;

  const Links& links() const { return links_; }
  volatile Board& board() { return *links_.board; }

  static size_t bytes(int size);         // of device memory, of each rank
  static size_t mapped_bytes(int size);  // of a segment

 private:
  static constexpr milliseconds kLimit = std::chrono::minutes(60);

  Peers(Driver& driver, int rank, int size, milliseconds limit);
  void place(int of, char* memory);
  void free();

  Driver& driver_;
  void* mine_ = nullptr;
  std::vector<void*> opened_;
  std::vector<Segment> segments_;
  size_t pinned_ = 0;  // of them
  Links links_{};
};

// The kernels: enqueued on a stream of the current device, never blocking the host; std::runtime_error when CUDA
// refuses the launch. in and out are device memory of this rank's, any alignment (16 bytes is fast), distinct or the
// same as local.h says. Sums of 16-bit and 8-bit floats are in float32, rounded once, in rank order: bits are those of
// reduce.h on the CPU. A count of 0 launches nothing.
struct Launch {
  Stream stream;
  int blocks, threads;   // at most kMaxBlocks (slots: Links::blocks), kMaxThreads; whole warps. Equal on all ranks
  uint32_t fingerprint;  // of the call, not 0
  int slot = kSlot;      // bytes used of each slot: whole lines of 256, at most Links::slot. Equal on all ranks
};

// packets.cu: each 8 bytes stored at once being 4 of payload and a flag, so that no other flags are needed. Everybody
// sends everything to all, one trip over the link; up to kPackets bytes, or kMapped, from one rank to another.
void all_reduce_packets(const Links&, const void* in, void* out, int64_t count, DType, Reduction, const Launch&);
void reduce_scatter_packets(const Links&, const void* in, void* out, int64_t count, DType, Reduction, const Launch&);
void all_gather_packets(const Links&, const void* in, void* out, int64_t bytes, const Launch&);
void broadcast_packets(const Links&, void* data, int64_t bytes, int root, const Launch&);
// All-reduce in two trips: slices, then their sums; less over the link from three ranks on. Up to
// packets_two_shot_bytes.
void all_reduce_packets_two_shot(const Links&, const void* in, void* out, int64_t count, DType, Reduction,
                                 const Launch&);
constexpr int64_t packets_two_shot_bytes(int size) { return int64_t(size) * (kPackets / 2); }
// reductions.cu. Each rank adds up its slice of a chunk, and sends the sum to all. Of two ranks it is the one-shot.
void all_reduce(const Links&, const void* in, void* out, int64_t count, DType, Reduction, const Launch&);
// Everybody sends everything to all, through slots.
void all_reduce_one_shot(const Links&, const void* in, void* out, int64_t count, DType, Reduction, const Launch&);
// Blocks of `count` elements, one for each rank. `out` may be the right part of `in`.
void reduce_scatter(const Links&, const void* in, void* out, int64_t count, DType, Reduction, const Launch&);
// moves.cu. Of bytes: `in` may be the right part of `out`.
void all_gather(const Links&, const void* in, void* out, int64_t bytes, const Launch&);
void broadcast(const Links&, void* data, int64_t bytes, int root, const Launch&);
// Byte ranges of each peer, at most kMaxRanks of them; all ranks pass the largest of all ranks' ranges as `most`.
struct Ranges {
  int64_t in_offsets[kMaxRanks], in_sizes[kMaxRanks], out_offsets[kMaxRanks], out_sizes[kMaxRanks];
};
void all_to_all(const Links&, const void* in, void* out, const Ranges&, int64_t most, const Launch&);

// Whether the kernels take this pair: all that reduce.h takes.
bool reduces(DType dtype, Op op);

}  // namespace hfreduce::gpu
