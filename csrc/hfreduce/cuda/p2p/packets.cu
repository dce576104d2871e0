// Small messages, in packets of eight bytes: four of payload and the number of the operation, stored at once. So
// whoever sees the number has the payload. No other flag is needed, and nothing waits for stores to arrive. A message
// takes one trip over the link; in host memory, one trip to write and one to poll.
//
// A region is what one rank writes at another in one operation: a header of four packets (fingerprint, unused, the
// factor of premul_sum in two), then the packets of the payload. Each writer has two, by the parity of the operation's
// number. They may be rewritten two operations later: a rank that writes for operation c + 2 has finished c + 1, in
// which its block 0 has seen every peer's header of c + 1. A peer sends that when its operation c is over, and with it
// all reading of its own regions, since operations follow each other in a stream.
//
// Each block counts the number for itself in device memory; block 0 also for blocks that are not launched. So all have
// the same number, no block waits for another, and a graph can replay the kernel. An element belongs to the block of
// the same number on all ranks, which sends before it waits: blocks may run in any order.
//
// With n ranks and N bytes each: one-shot all-reduce and all-gather send 2 (n-1) N over the link (half of it numbers);
// as much is written to each rank's memory and read. Broadcast sends this on the root only. Two-shot all-reduce (each
// rank adds up 1/n and sends the sum to all) sends 4 (n-1)/n N in two trips; reduce-scatter half of it.
#include "cuda/p2p/steps.cuh"

namespace hfreduce::gpu {

namespace {
struct Job {
  const char* in;
  char* out;
  int64_t bytes;
  DType dtype;
  Op op;
  double factor;
};
constexpr int kPayload = 8;  // payload bytes in 16 bytes that are stored at once

__host__ __device__ __forceinline__ int payloads(int64_t bytes) { return int((bytes + kPayload - 1) / kPayload); }
__host__ __device__ __forceinline__ int most_bytes(const Links& links) { return (links.region - kHeader) / 2; }

// The i-th 8 bytes of a message, padded at its end.
__device__ __noinline__ Words<2> payload_slow(const char* from, int bytes) {
  Words<2> x{};
  copy_some(reinterpret_cast<char*>(&x), from, bytes);
  return x;
}
__device__ __noinline__ void deliver_slow(char* to, Words<2> x, int bytes) {
  copy_some(to, reinterpret_cast<const char*>(&x), bytes);
}
__device__ __forceinline__ bool plain(const void* p, int bytes) {
  return bytes == kPayload && reinterpret_cast<uintptr_t>(p) % kPayload == 0;
}
__device__ __forceinline__ Words<2> payload(const char* in, int i, int64_t all) {
  const char* from = in + int64_t(i) * kPayload;
  const int bytes = within(all, int64_t(i) * kPayload, kPayload);
  return plain(from, bytes) ? load_pair(from) : payload_slow(from, bytes);
}
__device__ __forceinline__ void deliver(char* out, int i, int64_t all, const Words<2>& x) {
  char* to = out + int64_t(i) * kPayload;
  const int bytes = within(all, int64_t(i) * kPayload, kPayload);
  return plain(to, bytes) ? store_pair(to, x) : deliver_slow(to, x, bytes);
}

__device__ __forceinline__ Packets pack(uint32_t first, uint32_t second, uint32_t number) {
  const uint64_t flag = uint64_t(number) << 32;
  return {flag | first, flag | second};
}
__device__ __forceinline__ bool arrived(const Packets& x, uint32_t number) {
  return uint32_t(x.first >> 32) == number && uint32_t(x.second >> 32) == number;
}

// Reports a peer that is not in this operation but in another one: of packets, or of steps, whose flags block 0 raises.
// A peer's later flags come after its packets. All peers are checked: the one that is waited for may itself have
// stopped because of another one.
__device__ __noinline__ void look_around(const Links& links, uint32_t number, uint32_t fingerprint) {
  for (int peer = 0; peer < links.size; ++peer) {
    if (peer == links.rank) continue;
    const uint64_t flag = see_flag(links.flags[links.rank] + peer);
    const uint64_t header = see_flag(reinterpret_cast<uint64_t*>(region(links, links.rank, number, peer)));
    const bool here = uint32_t(header >> 32) == number;
    if (here && uint32_t(header) != fingerprint) say_differs(links, peer, uint32_t(header));
    if (!here && !reached(links.steps[0], uint32_t(flag >> 32))) say_differs(links, peer, uint32_t(flag));
  }
}

// One operation, from the view of a thread.
class Post {
 public:
  __device__ __forceinline__ Post(const Links& links, uint32_t fingerprint)
      : links_(links), fingerprint_(fingerprint), number_(following(links.steps[kMaxBlocks + blockIdx.x])) {}

  __device__ __forceinline__ void send(int peer, int i, const Words<2>& x) const {
    char* to = region(links_, peer, number_, links_.rank) + kHeader + i * int(sizeof(Packets));
    send_packets(to, pack(x.words[0], x.words[1], number_));
  }
  __device__ __forceinline__ void send_to_all(int i, const Words<2>& x) const {
    for (int k = 1; k < links_.size; ++k) send((links_.rank + k) % links_.size, i, x);
  }

  __device__ __forceinline__ const char* place(int writer, int i) const {
    return region(links_, links_.rank, number_, writer) + kHeader + i * int(sizeof(Packets));
  }
  // x: from a first poll. Returns whether the packets have arrived.
  __device__ __forceinline__ bool receive(int writer, const char* place, Packets x, Words<2>& to) const {
    if (!arrived(x, number_)) {
      Patience patience(links_, writer);
      do {
        if (!patience.more([&] { look_around(links_, number_, fingerprint_); })) return false;
        x = see_packets(place);
      } while (!arrived(x, number_));
    }
    to = {{uint32_t(x.first), uint32_t(x.second)}};
    return true;
  }

  __device__ __forceinline__ bool receive(int writer, int i, Words<2>& to) const {
    return receive(writer, place(writer, i), see_packets(place(writer, i)), to);
  }

  // 8 bytes of each rank; this rank's are `own`. Polls all before it waits for any. Returns whether all have arrived.
  template <int kRanks>
  __device__ __forceinline__ bool receive_all(int i, const Words<2>& own, Words<2> (&x)[kRanks]) const {
    Packets seen[kRanks];
#pragma unroll
    for (int r = 0; r < kRanks; ++r)
      if ((kRanks == 2 || r < links_.size) && r != links_.rank) seen[r] = see_packets(place(r, i));
#pragma unroll
    for (int r = 0; r < kRanks; ++r) {
      if (kRanks > 2 && r >= links_.size) break;
      if (r == links_.rank)
        x[r] = own;
      else if (!receive(r, place(r, i), seen[r], x[r]))
        return false;
    }
    return true;
  }

  // Done by block 0, one thread per peer.
  __device__ __forceinline__ void send_header(double factor) const {
    const int peer = threadIdx.x;
    if (blockIdx.x || peer >= links_.size || peer == links_.rank) return;
    char* to = region(links_, peer, number_, links_.rank);
    uint64_t bits;
    memcpy(&bits, &factor, 8);
    send_packets(to, pack(fingerprint_, 0, number_));
    send_packets(to + sizeof(Packets), pack(uint32_t(bits), uint32_t(bits >> 32), number_));
  }
  __device__ __forceinline__ bool receive_factors(Rule& rule, double own) const {
    if (rule.op != Op::premul_sum) return true;
#pragma unroll
    for (int r = 0; r < kMaxRanks; ++r) {
      if (r >= links_.size) break;
      const char* from = region(links_, links_.rank, number_, r) + sizeof(Packets);
      Words<2> bits;
      if (r == links_.rank)
        rule.factors[r] = own;
      else if (receive(r, from, see_packets(from), bits))
        memcpy(&rule.factors[r], &bits, 8);
      else
        return false;
    }
    return true;
  }

  // The end: checks that every peer was in this operation and made the same call.
  __device__ __forceinline__ void finish() const {
    if (blockIdx.x) {
      if (threadIdx.x == 0) links_.steps[kMaxBlocks + blockIdx.x] = number_;
      return;
    }
    const int peer = threadIdx.x;
    if (peer < links_.size && peer != links_.rank) {
      const char* from = region(links_, links_.rank, number_, peer);
      Words<2> header;
      if (!receive(peer, from, see_packets(from), header)) return;
      if (header.words[0] != fingerprint_) say_differs(links_, peer, header.words[0]);
    }
    // Those of block 0 and of all blocks that are not launched.
    for (int b = threadIdx.x; b < kMaxBlocks; b += blockDim.x)
      if (b == 0 || b >= int(gridDim.x)) links_.steps[kMaxBlocks + b] = number_;
  }

 private:
  const Links& links_;
  const uint32_t fingerprint_, number_;
};

// What is done with all ranks' payloads: sum or concatenation.
template <class A>
struct Summed {
  static constexpr int kRanks = A::kRanks;
  static __device__ __forceinline__ void put(const Job& job, const Rule& rule, int i, const Words<2> (&x)[kRanks]) {
    deliver(job.out, i, job.bytes, A::of(x, rule));
  }
};
template <int kMost>
struct Gathered {
  static constexpr int kRanks = kMost;
  static __device__ __forceinline__ void put(const Job& job, const Rule& rule, int i, const Words<2> (&x)[kRanks]) {
#pragma unroll
    for (int r = 0; r < kRanks; ++r)
      if (r < rule.ranks) deliver(job.out + r * job.bytes, i, job.bytes, x[r]);
  }
};

// __syncthreads in the kernels: all threads must have read the number before it is overwritten.

template <class To>
__global__ void __launch_bounds__(kMaxThreads, 1)
    one_shot(const __grid_constant__ Links links, const __grid_constant__ Job job, uint32_t fingerprint) {
  const int all = payloads(job.bytes), stride = gridDim.x * blockDim.x;
  const int first = blockIdx.x * blockDim.x + threadIdx.x;
  Rule rule{job.dtype, job.op, links.size, {}};
  // Loaded before the number, so that both loads are in flight together.
  Words<2> own = first < all ? payload(job.in, first, job.bytes) : Words<2>{};
  const Post post(links, fingerprint);
  if (first < all) post.send_to_all(first, own);
  post.send_header(job.factor);
  for (int i = first + stride; i < all; i += stride) post.send_to_all(i, payload(job.in, i, job.bytes));
  __syncthreads();
  if (!post.receive_factors(rule, job.factor)) return;
  for (int i = first; i < all; i += stride) {
    if (i != first) own = payload(job.in, i, job.bytes);
    Words<2> x[To::kRanks];
    if (!post.receive_all(i, own, x)) return;
    To::put(job, rule, i, x);
  }
  post.finish();
}

// Slices consist of whole payloads. Sums are in the second half of a region.
template <class A>
__global__ void __launch_bounds__(kMaxThreads, 1)
    two_trips(const __grid_constant__ Links links, const __grid_constant__ Job job, int slice, uint32_t fingerprint) {
  const Post post(links, fingerprint);
  const int sums = payloads(most_bytes(links)) / 2;
  const int all = payloads(job.bytes), stride = gridDim.x * blockDim.x;
  const int first = blockIdx.x * blockDim.x + threadIdx.x;
  const int me = links.rank, peers = links.size - 1;
  Rule rule{job.dtype, job.op, links.size, {}};
  const auto has = [&](int rank, int i) { return rank * slice + i < all; };
  post.send_header(job.factor);
  for (int i = first; i < slice; i += stride)
    for (int k = 1; k <= peers; ++k) {
      const int peer = (me + k) % links.size;
      if (has(peer, i)) post.send(peer, i, payload(job.in, peer * slice + i, job.bytes));
    }
  __syncthreads();
  if (!post.receive_factors(rule, job.factor)) return;
  for (int i = first; i < slice && has(me, i); i += stride) {
    Words<2> x[A::kRanks];
    if (!post.receive_all(i, payload(job.in, me * slice + i, job.bytes), x)) return;
    const Words<2> sum = A::of(x, rule);
    post.send_to_all(sums + i, sum);
    deliver(job.out, me * slice + i, job.bytes, sum);
  }
  for (int i = first; i < slice; i += stride)
    for (int k = 1; k <= peers; ++k) {
      const int peer = (me + k) % links.size;
      if (!has(peer, i)) continue;
      Words<2> sum;
      if (!post.receive(peer, sums + i, sum)) return;
      deliver(job.out, peer * slice + i, job.bytes, sum);
    }
  post.finish();
}

// Blocks of job.bytes.
template <class A>
__global__ void __launch_bounds__(kMaxThreads, 1)
    scatter(const __grid_constant__ Links links, const __grid_constant__ Job job, uint32_t fingerprint) {
  const Post post(links, fingerprint);
  const int all = payloads(job.bytes), stride = gridDim.x * blockDim.x;
  const int first = blockIdx.x * blockDim.x + threadIdx.x;
  Rule rule{job.dtype, job.op, links.size, {}};
  for (int i = first; i < all; i += stride)
    for (int k = 1; k < links.size; ++k) {
      const int peer = (links.rank + k) % links.size;
      post.send(peer, i, payload(job.in + peer * job.bytes, i, job.bytes));
    }
  post.send_header(job.factor);
  __syncthreads();
  if (!post.receive_factors(rule, job.factor)) return;
  for (int i = first; i < all; i += stride) {
    Words<2> x[A::kRanks];
    if (!post.receive_all(i, payload(job.in + links.rank * job.bytes, i, job.bytes), x)) return;
    deliver(job.out, i, job.bytes, A::of(x, rule));
  }
  post.finish();
}

__global__ void __launch_bounds__(kMaxThreads, 1)
    from_root(const __grid_constant__ Links links, char* data, int64_t bytes, int root, uint32_t fingerprint) {
  const Post post(links, fingerprint);
  const int all = payloads(bytes), stride = gridDim.x * blockDim.x;
  const int first = blockIdx.x * blockDim.x + threadIdx.x;
  if (links.rank == root)
    for (int i = first; i < all; i += stride) post.send_to_all(i, payload(data, i, bytes));
  post.send_header(1);
  __syncthreads();
  if (links.rank != root)
    for (int i = first; i < all; i += stride) {
      Words<2> x;
      if (!post.receive(root, i, x)) return;
      deliver(data, i, bytes, x);
    }
  post.finish();
}

void check(int64_t bytes, int64_t most) {
  if (bytes > most)
    throw std::invalid_argument("packets take up to " + std::to_string(most) + " bytes; got " + std::to_string(bytes));
}
Job job_of(const void* in, void* out, int64_t count, DType dtype, Reduction reduction) {
  return {static_cast<const char*>(in),
          static_cast<char*>(out),
          count * size_of(dtype),
          dtype,
          reduction.op,
          reduction.factor};
}
}  // namespace

void all_reduce_packets(const Links& links, const void* in, void* out, int64_t count, DType dtype, Reduction reduction,
                        const Launch& launch) {
  const Job job = job_of(in, out, count, dtype, reduction);
  check(job.bytes, most_bytes(links));
  if (job.bytes == 0) return;
  with_arithmetic(dtype, reduction.op, links.size, [&](auto arithmetic) {
    using A = decltype(arithmetic);
    launch_kernel(launch, one_shot<Summed<A>>, links, job, launch.fingerprint);
  });
}

void all_reduce_packets_two_shot(const Links& links, const void* in, void* out, int64_t count, DType dtype,
                                 Reduction reduction, const Launch& launch) {
  const Job job = job_of(in, out, count, dtype, reduction);
  check(job.bytes, int64_t(links.size) * (most_bytes(links) / 2));
  if (job.bytes == 0) return;
  const int slice = (payloads(job.bytes) + links.size - 1) / links.size;
  with_arithmetic(dtype, reduction.op, links.size, [&](auto arithmetic) {
    using A = decltype(arithmetic);
    launch_kernel(launch, two_trips<A>, links, job, slice, launch.fingerprint);
  });
}

void reduce_scatter_packets(const Links& links, const void* in, void* out, int64_t count, DType dtype,
                            Reduction reduction, const Launch& launch) {
  const Job job = job_of(in, out, count, dtype, reduction);
  check(job.bytes, most_bytes(links));
  if (job.bytes == 0) return;
  with_arithmetic(dtype, reduction.op, links.size, [&](auto arithmetic) {
    using A = decltype(arithmetic);
    launch_kernel(launch, scatter<A>, links, job, launch.fingerprint);
  });
}

void all_gather_packets(const Links& links, const void* in, void* out, int64_t bytes, const Launch& launch) {
  const Job job = job_of(in, out, bytes, DType::u8, {});
  check(job.bytes, most_bytes(links));
  if (job.bytes == 0) return;
  const auto kernel = links.size == 2 ? one_shot<Gathered<2>> : one_shot<Gathered<kMaxRanks>>;
  launch_kernel(launch, kernel, links, job, launch.fingerprint);
}

void broadcast_packets(const Links& links, void* data, int64_t bytes, int root, const Launch& launch) {
  check(bytes, most_bytes(links));
  if (bytes == 0) return;
  launch_kernel(launch, from_root, links, static_cast<char*>(data), bytes, root, launch.fingerprint);
}

}  // namespace hfreduce::gpu
