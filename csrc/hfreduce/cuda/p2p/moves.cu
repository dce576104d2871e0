// Kernels that only move bytes, through slots.
#include "cuda/p2p/steps.cuh"

namespace hfreduce::gpu {

// All-gather. In each round a block pushes the next piece of this rank's data to all peers, and copies the pieces that
// have arrived from them.
//
// With n ranks and b bytes each, a rank sends and receives (n-1) b over the link, in ceil(b / (blocks x slot)) steps.
// In its memory: b read to be sent (and b written, unless `in` is this rank's block of `out`); (n-1) b written by
// peers, then read and written to copy them.
namespace {
__global__ void __launch_bounds__(kMaxThreads, 1) gather(const __grid_constant__ Links links, const char* in, char* out,
                                                         int64_t all, int piece, uint32_t fingerprint) {
  Block block(links, fingerprint);
  char* const own = out + links.rank * all;
  const auto begin = [&](int k) { return (int64_t(k) * gridDim.x + blockIdx.x) * piece; };
  const auto push = [&](int k) {
    const int64_t first = begin(k);
    spread(block, in + first, within(all, first, piece), own == in ? nullptr : own + first);
  };
  const auto read = [&](int k) {
    const int64_t first = begin(k);
    const int bytes = within(all, first, piece);
    copy_parts(links.size - 1, bytes, [&](int i) {
      const int peer = block.peer(i);
      return Move{block.mine(peer), out + peer * all + first, bytes};
    });
  };
  block.run(rounds(all, piece), push, read);
}
}  // namespace

void all_gather(const Links& links, const void* in, void* out, int64_t bytes, const Launch& launch) {
  if (bytes == 0) return;
  const int most = piece(bytes, 1, launch.blocks, launch.slot);
  launch_kernel(launch, gather, links, static_cast<const char*>(in), static_cast<char*>(out), bytes, most,
                launch.fingerprint);
}

// All-to-all: in each round a block pushes the next piece of every peer's range to that peer, and copies what has
// arrived. The largest range determines the rounds; ranks with less data send less, and still arrive.
//
// A rank sends and receives its data over the link in ceil(most / (blocks x slot)) steps. In its memory, sent data is
// read once, and received data is written by peers, then read and written.
namespace {
__global__ void __launch_bounds__(kMaxThreads, 1)
    exchange(const __grid_constant__ Links links, const char* in, char* out, const __grid_constant__ Ranges ranges,
             int64_t most, int piece, uint32_t fingerprint) {
  Block block(links, fingerprint);
  const auto begin = [&](int k) { return (int64_t(k) * gridDim.x + blockIdx.x) * piece; };
  const auto push = [&](int k) {
    const int64_t first = begin(k);
    copy_parts(links.size, piece, [&](int i) {  // the last one is this rank itself
      const int peer = block.peer(i);
      char* to = peer == links.rank ? out + ranges.out_offsets[peer] + first : block.theirs(peer);
      return Move{in + ranges.in_offsets[peer] + first, to, within(ranges.in_sizes[peer], first, piece)};
    });
  };
  const auto read = [&](int k) {
    const int64_t first = begin(k);
    copy_parts(links.size - 1, piece, [&](int i) {
      const int peer = block.peer(i);
      return Move{block.mine(peer), out + ranges.out_offsets[peer] + first,
                  within(ranges.out_sizes[peer], first, piece)};
    });
  };
  block.run(rounds(most, piece), push, read);
}
}  // namespace

void all_to_all(const Links& links, const void* in, void* out, const Ranges& ranges, int64_t most,
                const Launch& launch) {
  if (most == 0) return;
  const int bytes = piece(most, 1, launch.blocks, launch.slot);
  launch_kernel(launch, exchange, links, static_cast<const char*>(in), static_cast<char*>(out), ranges, most, bytes,
                launch.fingerprint);
}

// Broadcast: the root sends each other rank a slice of a chunk. One step later these pass their slices on to one
// another (second half of the slot), so that nothing leaves the root twice. With two ranks nothing is passed on.
//
// With n ranks and N bytes, the root sends N over the link; every other rank sends (n-2)/(n-1) N and receives N, in
// ceil(N / (blocks x (n-1) x slot / 2)) + 1 steps; with two ranks in ceil(N / (blocks x slot)). In memory: N read on
// the root; on the others N written by peers, then read and written.
namespace {
__global__ void __launch_bounds__(kMaxThreads, 1) hand_on(const __grid_constant__ Links links, char* data, int64_t all,
                                                          int root, int slice, int half, uint32_t fingerprint) {
  Block block(links, fingerprint);
  const int n = links.size, me = links.rank, passed = n > 2;
  const int64_t chunk = int64_t(n - 1) * slice;
  const int chunks = rounds(all, chunk);
  // Slices are in the order of ranks after the root.
  const auto begin = [&](int k, int rank) {
    return (int64_t(k) * gridDim.x + blockIdx.x) * chunk + int64_t((rank - root - 1 + n) % n) * slice;
  };
  const auto hand_out = [&](int k) {
    if (k == chunks || me != root) return;
    copy_parts(n - 1, slice, [&](int i) {
      const int peer = block.peer(i);
      const int64_t first = begin(k, peer);
      return Move{data + first, block.theirs(peer), within(all, first, slice)};
    });
  };
  const auto pass_on = [&](int k) {
    const int64_t first = begin(k, me);
    const int bytes = within(all, first, slice);
    copy_parts(n - 1, slice, [&](int i) {
      const int peer = block.peer(i);
      return Move{block.mine(root), peer == root ? data + first : block.theirs(peer) + half, bytes};
    });
  };
  const auto take_over = [&](int k) {
    copy_parts(n - 1, slice, [&](int i) {
      const int peer = block.peer(i);
      const int64_t first = begin(k, peer);
      if (peer == root) return Move{nullptr, nullptr, 0};
      return Move{block.mine(peer) + half, data + first, within(all, first, slice)};
    });
  };
  block.run(chunks == 0 ? 0 : chunks + passed, hand_out, [&](int k) {
    if (me == root) return;
    if (k < chunks) pass_on(k);
    if (k > 0 && passed) take_over(k - 1);
  });
}
}  // namespace

void broadcast(const Links& links, void* data, int64_t bytes, int root, const Launch& launch) {
  if (bytes == 0) return;
  const int half = links.size > 2 ? launch.slot / 2 : launch.slot;
  const int slice = piece(bytes, links.size - 1, launch.blocks, half);
  launch_kernel(launch, hand_on, links, static_cast<char*>(data), bytes, root, slice, half, launch.fingerprint);
}

}  // namespace hfreduce::gpu
