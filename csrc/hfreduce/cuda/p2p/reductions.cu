// Kernels that reduce, through slots.
#include "collectives/reduce.h"
#include "cuda/p2p/steps.cuh"

namespace hfreduce::gpu {

namespace {
struct Job {
  Job(const void* in, void* out, int64_t count, DType dtype, Reduction reduction)
      : in(static_cast<const char*>(in)),
        out(static_cast<char*>(out)),
        bytes(count * size_of(dtype)),
        dtype(dtype),
        op(reduction.op),
        factor(reduction.factor) {}
  const char* in;
  char* out;
  int64_t bytes;  // of the message, or of a block
  DType dtype;
  Op op;
  double factor;
  int64_t stride = 0;  // bytes from block to block of `in`; 0: a message
  int piece = 0;       // bytes of one peer in a step: of a block, or of a slice
  int half = 0;        // byte in a slot where sums are
};
}  // namespace

// Reduce-scatter; and the one-shot all-reduce, which is the same with one block for all ranks. In each round a block
// pushes the next piece of every peer's block into that peer's slots, and adds up what has arrived for its own block.
//
// With n ranks and blocks of b bytes, each rank sends and receives (n-1) b over the link, in ceil(b / (blocks x slot))
// steps. In its memory: (n-1) b read to be sent, (n-1) b written by peers, n b read and b written to add up. One-shot:
// b is the whole message. For two ranks it sends as much over the link as the two-shot, in half the steps.
namespace {
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
      return Move{job.in + peer * job.stride + first, block.theirs(peer), bytes};
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
  Job job(in, out, count, dtype, reduction);
  job.stride = job.bytes;
  start(links, job, launch);
}

void all_reduce_one_shot(const Links& links, const void* in, void* out, int64_t count, DType dtype, Reduction reduction,
                         const Launch& launch) {
  start(links, Job(in, out, count, dtype, reduction), launch);
}

bool reduces(DType dtype, Op op) { return supported(dtype, op); }

// All-reduce in two shots, which overlap in one sequence of steps. A chunk has a slice for each rank. In step k a block
// sends every peer its slice of chunk k (first half of the slot). It adds up its own slice of chunk k when all have
// arrived, and sends the sum to all in step k + 1 (second half of the slot). So in step k it also reads the sums of
// chunk k - 1.
//
// With n ranks and N bytes, each rank sends and receives 2 (n-1)/n N over the link, in ceil(N / (blocks x n x slot /
// 2)) + 1 steps: one more for the last sums. In its memory: (n-1)/n N read to be sent; 2 (n-1)/n N written by peers; N
// read and N/n written to add up; (n-1)/n N read and written to copy the sums.
namespace {
template <class A>
__global__ void __launch_bounds__(kMaxThreads, 1)
    two_shot(const __grid_constant__ Links links, const __grid_constant__ Job job, uint32_t fingerprint) {
  Block block(links, fingerprint);
  Rule rule{job.dtype, job.op, links.size, {}};
  const int peers = links.size - 1;
  const int64_t chunk = int64_t(links.size) * job.piece;
  const int chunks = rounds(job.bytes, chunk);
  const auto begin = [&](int k, int rank) {
    return (int64_t(k) * gridDim.x + blockIdx.x) * chunk + int64_t(rank) * job.piece;
  };
  const auto scatter = [&](int k) {
    if (k == 0) block.push_factor(rule, job.factor);
    if (k == chunks) return;
    copy_parts(peers, job.piece, [&](int i) {
      const int peer = block.peer(i);
      const int64_t first = begin(k, peer);
      return Move{job.in + first, block.theirs(peer), within(job.bytes, first, job.piece)};
    });
  };
  const auto add_up = [&](int k) {
    if (k == 0) block.read_factors(rule, job.factor);
    const int64_t first = begin(k, links.rank);
    const Terms terms{job.in + first, job.out + first, within(job.bytes, first, job.piece), job.half};
    reduce_slots<A>(block, terms, rule);
  };
  const auto take_over = [&](int k) {
    copy_parts(peers, job.piece, [&](int i) {
      const int peer = block.peer(i);
      const int64_t first = begin(k, peer);
      return Move{block.mine(peer) + job.half, job.out + first, within(job.bytes, first, job.piece)};
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
  Job job(in, out, count, dtype, reduction);
  if (job.bytes == 0) return;
  job.half = launch.slot / 2;
  job.piece = piece(job.bytes, links.size, launch.blocks, job.half);
  with_arithmetic(dtype, reduction.op, links.size, [&](auto arithmetic) {
    using A = decltype(arithmetic);
    launch_kernel(launch, two_shot<A>, links, job, launch.fingerprint);
  });
}

}  // namespace hfreduce::gpu
