// All-gather. In each round a block pushes the next piece of this rank's bytes to all peers, and takes over what has
// come from them.
//
// With n ranks and b bytes each, a rank sends (n-1) b over the link and receives as much, in ceil(b / (blocks x slot))
// steps. In its memory: b read to be sent (and b written, where `in` is not the right part of `out`); (n-1) b written
// by peers, read and written to take them over.
#include "cuda/p2p/steps.cuh"

namespace hfreduce::gpu {

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
      return Part{block.mine(peer), out + peer * all + first, bytes};
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

}  // namespace hfreduce::gpu
