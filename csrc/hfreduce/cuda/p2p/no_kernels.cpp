// The kernels of peers.h in a build without nvcc. They are not called, because `reduces` returns false.
#ifndef HFNN_CUDA

#include <stdexcept>

#include "cuda/p2p/peers.h"

namespace hfreduce::gpu {

[[noreturn]] static void refuse() {
  throw std::runtime_error("hfreduce was built without nvcc: it has no GPU kernels");
}

void all_reduce_packets(const Links&, const void*, void*, int64_t, DType, Reduction, const Launch&) { refuse(); }
void all_reduce_packets_two_shot(const Links&, const void*, void*, int64_t, DType, Reduction, const Launch&) {
  refuse();
}
void reduce_scatter_packets(const Links&, const void*, void*, int64_t, DType, Reduction, const Launch&) { refuse(); }
void all_gather_packets(const Links&, const void*, void*, int64_t, const Launch&) { refuse(); }
void broadcast_packets(const Links&, void*, int64_t, int, const Launch&) { refuse(); }
void all_reduce_one_shot(const Links&, const void*, void*, int64_t, DType, Reduction, const Launch&) { refuse(); }
void all_reduce(const Links&, const void*, void*, int64_t, DType, Reduction, const Launch&) { refuse(); }
void reduce_scatter(const Links&, const void*, void*, int64_t, DType, Reduction, const Launch&) { refuse(); }
void all_gather(const Links&, const void*, void*, int64_t, const Launch&) { refuse(); }
void broadcast(const Links&, void*, int64_t, int, const Launch&) { refuse(); }
void all_to_all(const Links&, const void*, void*, const Ranges&, int64_t, const Launch&) { refuse(); }
bool reduces(DType, Op) { return false; }

}  // namespace hfreduce::gpu

#endif
