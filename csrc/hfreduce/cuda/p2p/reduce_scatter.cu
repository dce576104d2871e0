// Reduce-scatter, and the one-shot all-reduce, which is the same with one block for all. In each round a block pushes
// the next piece of every peer's block into that peer's slots, and adds up what has come for its own block.
//
// With n ranks and blocks of b bytes, each rank sends (n-1) b over the link and receives as much, in ceil(b / (blocks x
// slot)) steps. In its memory: (n-1) b read to be sent, (n-1) b written by peers, n b read and b written to add up.
// One-shot: b is the whole message; of two ranks it is as much over the link as the two-shot, in half the steps.
#include "cuda/p2p/steps.cuh"
#include "collectives/reduce.h"

namespace hfreduce::gpu {

namespace {
struct Job {
  const char* in;
  int64_t stride;  // from block to block of `in`, in bytes
  char* out;
  int64_t bytes;  // of a block
  int piece;
  DType dtype;
  Op op;
  double factor;
};

template <class A>
__global__ void __launch_bounds__(kMaxThreads, 1)
    scatter_sums(const __grid_constant__ Links links, const __grid_constant__ Job job, uint32_t fingerprint) {
  Block block(links, fingerprint);
  Rule rule{job.dtype, job.op, links.size, {}};
  const auto begin = [&](int k) { return (int64_t(k) * gridDim.x + blockIdx.x) * job.piece; };
  const auto push = [&](int k) {
    if (k == 0) block.push_factor(rule, job.factor);
    const int64_t first = begin(k);
    const int bytes = within(job.bytes, first, job.piece);
    if (job.stride == 0) return spread(block, job.in + first, bytes, nullptr);
    copy_parts(links.size - 1, bytes, [&](int i) {
      const int peer = block.peer(i);
      return Part{job.in + peer * job.stride + first, block.theirs(peer), bytes};
    });
  };
  const auto read = [&](int k) {
    if (k == 0) block.read_factors(rule, job.factor);
    const int64_t first = begin(k);
    const Terms terms{job.in + links.rank * job.stride + first, job.out + first, within(job.bytes, first, job.piece),
                      -1};
    reduce_slots<A>(block, terms, rule);
  };
  block.run(rounds(job.bytes, job.piece), push, read);
}

void start(const Links& links, Job job, const Launch& launch) {
  if (job.bytes == 0) return;
  job.piece = piece(job.bytes, 1, launch.blocks, launch.slot);
  with_arithmetic(job.dtype, job.op, links.size, [&](auto arithmetic) {
    using A = decltype(arithmetic);
    launch_kernel(launch, scatter_sums<A>, links, job, launch.fingerprint);
  });
}
}  // namespace

void reduce_scatter(const Links& links, const void* in, void* out, int64_t count, DType dtype, Reduction reduction,
                    const Launch& launch) {
  const int64_t bytes = count * size_of(dtype);
  start(links,
        {static_cast<const char*>(in), bytes, static_cast<char*>(out), bytes, 0, dtype, reduction.op, reduction.factor},
        launch);
}

void all_reduce_one_shot(const Links& links, const void* in, void* out, int64_t count, DType dtype, Reduction reduction,
                         const Launch& launch) {
  const int64_t bytes = count * size_of(dtype);
  start(links,
        {static_cast<const char*>(in), 0, static_cast<char*>(out), bytes, 0, dtype, reduction.op, reduction.factor},
        launch);
}

bool reduces(DType dtype, Op op) { return supported(dtype, op); }

}  // namespace hfreduce::gpu
