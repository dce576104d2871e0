// The device memory of the ranks of one host, mapped by all of them: kernels over NVLink and PCIe peer access work in
// it. If devices do not reach each other, a smaller version is in pinned host memory, which all devices write, poll and
// read over PCIe.
//
// All communication is in steps, as on the CPU (shm_group.h), but separately for each block of a kernel: the blocks b
// of all ranks take part in the steps of block b only. In step s of block b a rank writes into slot (b, s % 2, its
// rank) of every peer (stores over the link), raises flag (b, its rank) of every peer to s, waits until its own flags
// (b, *) have reached s, and then reads its own slots (b, s % 2, *). A rank that has seen flag s of a peer knows that
// the peer has finished step s - 1. So a slot may be rewritten two steps later, and there are no other rules.
// (steps.cuh has the proof, for the order in which the kernels push, wait and read.) *Every* rank raises *every* peer's
// flag in every step, even if it sends no data. The steps of each block are counted in device memory, across operations
// of any kind and number of blocks: so a kernel can be captured into a graph. An operation must have the same number of
// blocks and steps on all ranks, and operations must run one after another, by a stream or events.
//
// A flag has 64 bits: the step in the upper half; in the lower half the call's fingerprint in its first step, otherwise
// 0. Ranks whose fingerprints differ stop and report it in Board. Small messages (packets.cu) have slots and counters
// of their own. A rank that waits in one kind of operation for a peer in the other notices after a while.
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
constexpr int kSlot = 64 << 10;      // bytes that a block moves to one peer in one step
constexpr int kPackets = 512 << 10;  // payload bytes of a small message, for each rank and parity
// The same in host memory: as many blocks and slots as saturate PCIe.
constexpr int kMapped = 64 << 10, kMappedBlocks = 32, kMappedSlot = 32 << 10;

// Pinned host memory, one per process: the host stops its kernels by it, and they report what they saw. A kernel that
// waits polls `stop` from time to time, and ends if it is not 0. Its outputs are then undefined, it raises no more
// flags, and these Peers cannot be used again.
struct Board {
  uint32_t stop;     // written by the host; also by a kernel that writes one of the others, for its other blocks
  uint32_t overdue;  // by a kernel that has waited beyond limit_ns: 1 + the rank that it waited for
  uint32_t differs;  // by a kernel whose peer made a different call: 1 + that rank
  uint32_t theirs;   // that peer's fingerprint
};

// Kernels take it by value.
struct Links {
  int rank, size;
  char* slots[kMaxRanks];      // [rank] in each rank's memory: blocks x 2 x size x (a slot and a line for the factor)
  uint64_t* flags[kMaxRanks];  // one line of kMaxRanks per block
  char* packets[kMaxRanks];    // 2 x size regions: see packets.cu
  int blocks, slot;  // number of blocks, and bytes of a slot: kMaxBlocks and kSlot, or kMappedBlocks and kMappedSlot
  int region;        // bytes of a region: a line, and twice the payload
  uint32_t* steps;   // this rank's own counters: kMaxBlocks for slots, then kMaxBlocks for packets
  Board* board;
  int64_t limit_ns;  // of one wait: far beyond the host's timeout, in case the host process has died
};

// Allocates this rank's memory and opens the others'. One object per communicator.
class Peers {
 public:
  // Sends this rank's handle, and returns those of all ranks, by rank. May throw.
  using Exchange = std::function<std::vector<Handle>(const Handle&)>;

  // size: 2 to kMaxRanks ranks that reach each other's memory. limit: for Links::limit_ns.
  Peers(Driver& driver, int rank, int size, const Exchange& exchange, milliseconds limit = kLimit);
  // In host memory: zeroed segments of mapped_bytes of all ranks, by rank, which are pinned here. The ranks need not
  // synchronize before it is destroyed.
  Peers(Driver& driver, int rank, std::vector<Segment> segments, milliseconds limit = kLimit);
  // Only when no rank's kernels run any more. CUDA requires that peers close memory before its owner frees it: if ranks
  // can still synchronize, they do so between `close` and the destructor, which closes what is still open.
  ~Peers();
  void close();
  Peers(const Peers&) = delete;
  Peers& operator=(const Peers&) = delete;

  const Links& links() const { return links_; }
  volatile Board& board() { return *links_.board; }

  static size_t bytes(int size);         // device memory of each rank
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
  size_t pinned_ = 0;  // number of segments
  Links links_{};
};

// The kernels are enqueued on a stream of the current device and never block the host. They throw std::runtime_error if
// CUDA rejects the launch. in and out: device memory of this rank, at any alignment (16 bytes is fast), distinct or the
// same as host.h says. 16-bit and 8-bit floats are added in float32, in rank order, and rounded once: the bits are
// those of reduce.h on the CPU. A count of 0 launches nothing.
struct Launch {
  Stream stream;
  int blocks, threads;   // at most kMaxBlocks (slots: Links::blocks), kMaxThreads; whole warps. Equal on all ranks
  uint32_t fingerprint;  // of the call, not 0
  int slot = kSlot;      // bytes used of each slot: a multiple of 256, at most Links::slot. Equal on all ranks
};

// packets.cu. Each store of 8 bytes has 4 of payload and a flag, so no other flags are needed. Every rank sends
// everything to all, in one trip over the link; up to kPackets bytes (or kMapped) from one rank to another.
void all_reduce_packets(const Links&, const void* in, void* out, int64_t count, DType, Reduction, const Launch&);
void reduce_scatter_packets(const Links&, const void* in, void* out, int64_t count, DType, Reduction, const Launch&);
void all_gather_packets(const Links&, const void* in, void* out, int64_t bytes, const Launch&);
void broadcast_packets(const Links&, void* data, int64_t bytes, int root, const Launch&);
// All-reduce in two trips: slices, then their sums. Sends less over the link for three or more ranks. Up to
// packets_two_shot_bytes.
void all_reduce_packets_two_shot(const Links&, const void* in, void* out, int64_t count, DType, Reduction,
                                 const Launch&);
constexpr int64_t packets_two_shot_bytes(int size) { return int64_t(size) * (kPackets / 2); }
// reductions.cu. Each rank adds up its slice of a chunk and sends the sum to all. Two ranks use the one-shot.
void all_reduce(const Links&, const void* in, void* out, int64_t count, DType, Reduction, const Launch&);
// Every rank sends everything to all, through slots.
void all_reduce_one_shot(const Links&, const void* in, void* out, int64_t count, DType, Reduction, const Launch&);
// Blocks of `count` elements, one per rank. `out` may be this rank's block of `in`.
void reduce_scatter(const Links&, const void* in, void* out, int64_t count, DType, Reduction, const Launch&);
// moves.cu. In bytes. `in` may be this rank's block of `out`.
void all_gather(const Links&, const void* in, void* out, int64_t bytes, const Launch&);
void broadcast(const Links&, void* data, int64_t bytes, int root, const Launch&);
// Byte ranges of each peer, up to kMaxRanks of them. `most`: the largest range of all ranks, equal on all ranks.
struct Ranges {
  int64_t in_offsets[kMaxRanks], in_sizes[kMaxRanks], out_offsets[kMaxRanks], out_sizes[kMaxRanks];
};
void all_to_all(const Links&, const void* in, void* out, const Ranges&, int64_t most, const Launch&);

// Whether the kernels support this pair: the same as reduce.h.
bool reduces(DType dtype, Op op);

}  // namespace hfreduce::gpu
