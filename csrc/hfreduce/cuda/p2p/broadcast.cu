// Broadcast: the root hands each other rank a slice of a chunk, and they pass their slices on to one another, one step
// later (second half of the slot), so that nothing leaves the root twice. Of two ranks there is nothing to pass on.
//
// With n ranks and N bytes, the root sends N over the link, every other one (n-2)/(n-1) N, and receives N, in ceil(N /
// (blocks x (n-1) x slot / 2)) + 1 steps; of two ranks in ceil(N / (blocks x slot)). In memory: N read at the root; N
// written by peers, read and written elsewhere.
#include "cuda/p2p/steps.cuh"

namespace hfreduce::gpu {

namespace {
__global__ void __launch_bounds__(kMaxThreads, 1) hand_on(const __grid_constant__ Links links, char* data, int64_t all,
                                                          int root, int slice, int half, uint32_t fingerprint) {
  Block block(links, fingerprint);
  const int n = links.size, me = links.rank, passed = n > 2;
  const int64_t chunk = int64_t(n - 1) * slice;
  const int chunks = rounds(all, chunk);
  // Ranks have the slices in their order behind the root.
  const auto begin = [&](int k, int rank) {
    return (int64_t(k) * gridDim.x + blockIdx.x) * chunk + int64_t((rank - root - 1 + n) % n) * slice;
  };
  const auto hand_out = [&](int k) {
    if (k == chunks || me != root) return;
    copy_parts(n - 1, slice, [&](int i) {
      const int peer = block.peer(i);
      const int64_t first = begin(k, peer);
      return Part{data + first, block.theirs(peer), within(all, first, slice)};
    });
  };
  const auto pass_on = [&](int k) {
    const int64_t first = begin(k, me);
    const int bytes = within(all, first, slice);
    copy_parts(n - 1, slice, [&](int i) {
      const int peer = block.peer(i);
      return Part{block.mine(root), peer == root ? data + first : block.theirs(peer) + half, bytes};
    });
  };
  const auto take_over = [&](int k) {
    copy_parts(n - 1, slice, [&](int i) {
      const int peer = block.peer(i);
      const int64_t first = begin(k, peer);
      if (peer == root) return Part{nullptr, nullptr, 0};
      return Part{block.mine(peer) + half, data + first, within(all, first, slice)};
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
