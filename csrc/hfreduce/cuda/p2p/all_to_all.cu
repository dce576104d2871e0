// All-to-all: in each round a block pushes the next piece of every peer's range to that peer, and takes over what has
// come. The rounds are those of the largest range of all; who has less sends less, and still arrives.
//
// A rank sends over the link what it has for others, and receives what they have for it, in ceil(most / (blocks x
// slot)) steps. In its memory what is sent is read once, and what comes is written by peers, read and written.
#include "cuda/p2p/steps.cuh"

namespace hfreduce::gpu {

namespace {
__global__ void __launch_bounds__(kMaxThreads, 1)
    exchange(const __grid_constant__ Links links, const char* in, char* out, const __grid_constant__ Ranges ranges,
             int64_t most, int piece, uint32_t fingerprint) {
  Block block(links, fingerprint);
  const auto begin = [&](int k) { return (int64_t(k) * gridDim.x + blockIdx.x) * piece; };
  const auto push = [&](int k) {
    const int64_t first = begin(k);
    copy_parts(links.size, piece, [&](int i) {  // this rank itself is the last one
      const int peer = block.peer(i);
      char* to = peer == links.rank ? out + ranges.out_offsets[peer] + first : block.theirs(peer);
      return Part{in + ranges.in_offsets[peer] + first, to, within(ranges.in_sizes[peer], first, piece)};
    });
  };
  const auto read = [&](int k) {
    const int64_t first = begin(k);
    copy_parts(links.size - 1, piece, [&](int i) {
      const int peer = block.peer(i);
      return Part{block.mine(peer), out + ranges.out_offsets[peer] + first,
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

}  // namespace hfreduce::gpu
