// All-reduce in two shots, which follow each other in one stream of steps. A chunk is a slice for each rank. In step k
// a block sends every peer its slice of chunk k (first half of the slot); it adds up its own slice of chunk k, once all
// have come, and sends the sum to all with step k + 1 (second half of the slot); so what it reads in step k are also
// the sums of chunk k - 1.
//
// With n ranks and N bytes, each rank sends 2 (n-1)/n N over the link and receives as much, in ceil(N / (blocks x n x
// slot / 2)) + 1 steps: one for the last sums. In its memory: (n-1)/n N read to be sent; 2 (n-1)/n N written by peers;
// N read and N/n written to add up; (n-1)/n N read and written to take the sums over.
#include "cuda/p2p/steps.cuh"

namespace hfreduce::gpu {

namespace {
struct Job {
  const char* in;
  char* out;
  int64_t bytes;
  int slice, half;
  DType dtype;
  Op op;
  double factor;
};

template <class A>
__global__ void __launch_bounds__(kMaxThreads, 1)
    two_shot(const __grid_constant__ Links links, const __grid_constant__ Job job, uint32_t fingerprint) {
  Block block(links, fingerprint);
  Rule rule{job.dtype, job.op, links.size, {}};
  const int peers = links.size - 1;
  const int64_t chunk = int64_t(links.size) * job.slice;
  const int chunks = rounds(job.bytes, chunk);
  const auto begin = [&](int k, int rank) {
    return (int64_t(k) * gridDim.x + blockIdx.x) * chunk + int64_t(rank) * job.slice;
  };
  const auto scatter = [&](int k) {
    if (k == 0) block.push_factor(rule, job.factor);
    if (k == chunks) return;
    copy_parts(peers, job.slice, [&](int i) {
      const int peer = block.peer(i);
      const int64_t first = begin(k, peer);
      return Part{job.in + first, block.theirs(peer), within(job.bytes, first, job.slice)};
    });
  };
  const auto add_up = [&](int k) {
    if (k == 0) block.read_factors(rule, job.factor);
    const int64_t first = begin(k, links.rank);
    const Terms terms{job.in + first, job.out + first, within(job.bytes, first, job.slice), job.half};
    reduce_slots<A>(block, terms, rule);
  };
  const auto take_over = [&](int k) {
    copy_parts(peers, job.slice, [&](int i) {
      const int peer = block.peer(i);
      const int64_t first = begin(k, peer);
      return Part{block.mine(peer) + job.half, job.out + first, within(job.bytes, first, job.slice)};
    });
  };
  block.run(chunks == 0 ? 0 : chunks + 1, scatter, [&](int k) {
    if (k < chunks) add_up(k);
    if (k > 0) take_over(k - 1);
  });
}
}  // namespace

void all_reduce(const Links& links, const void* in, void* out, int64_t count, DType dtype, Reduction reduction,
                const Launch& launch) {
  if (links.size == 2) return all_reduce_one_shot(links, in, out, count, dtype, reduction, launch);
  const int64_t bytes = count * size_of(dtype);
  if (bytes == 0) return;
  const int half = launch.slot / 2;
  const Job job{static_cast<const char*>(in),
                static_cast<char*>(out),
                bytes,
                piece(bytes, links.size, launch.blocks, half),
                half,
                dtype,
                reduction.op,
                reduction.factor};
  with_arithmetic(dtype, reduction.op, links.size, [&](auto arithmetic) {
    using A = decltype(arithmetic);
    launch_kernel(launch, two_shot<A>, links, job, launch.fingerprint);
  });
}

}  // namespace hfreduce::gpu
