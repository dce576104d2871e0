// Parts of the norms' backward kernels: the team of threads of a row, the ring of incoming rows, and parameters in
// shared memory.
//
// A row belongs to a team of 32, 128 or 256 threads, or to a cluster of up to eight blocks. A block has 256 threads:
// eight teams, two or one. Blocks are persistent and process many rows. Every thread copies its own 16-byte vectors of
// coming rows into its own slots of a ring in shared memory (cp.async). So loads continue during reductions, and the
// ring needs no barrier: no other thread reads these slots.
//
// Units: a vector is 16 bytes of a row, N elements. A row has `vectors` of them; a block of a cluster has a slice.
#pragma once
#include "norm_row.cuh"

namespace hfnn {

constexpr int kThreads = 256;   // per block
constexpr int kVectors = 4;     // of a row, per thread
constexpr int kResident = 2;    // blocks per multiprocessor, for the register limit
constexpr int kMaxCluster = 8;  // larger clusters are not portable

// Bytes for the partial sums of a block's teams, double-buffered, so that one barrier per reduction suffices.
template <bool kCluster>
constexpr int kScratchBytes = 2 * sizeof(float2) * (kThreads / 32) * (kCluster ? kMaxCluster : 1);

__device__ inline void cluster_sync() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}

// The threads of one row. Sums go over the lanes, then over the warps of all blocks, in a fixed order. Every thread
// gets the same bits.
template <int kTeam, bool kCluster>
struct Team {
  static constexpr int kWarps = kTeam / 32;
  // Partial sums per lane when those of all warps are combined, and how many lanes hold different ones.
  static constexpr int kHeld = kCluster ? ceil_div(kWarps * kMaxCluster, 32) : 1;
  static constexpr int kApart = kCluster ? 32 : kWarps;

  int first, count;  // this block's vectors of the row
  unsigned scratch;  // address of the next set of partial sums

  // `shared` is aligned to its size.
  __device__ Team(int64_t vectors, void* shared) {
    const int slice = (vectors + ranks() - 1) / ranks();
    first = slice * rank();
    count = min(int64_t(slice), vectors - first);
    scratch = static_cast<unsigned>(__cvta_generic_to_shared(shared)) + index() * 2 * kSet;
  }

  // Indices in the warp, the team and the block. Recomputed, because backward has no registers to spare.
  __device__ static int lane() { return threadIdx.x % 32; }
  __device__ static int warp() { return threadIdx.x % kTeam / 32; }
  __device__ static int index() { return threadIdx.x / kTeam; }
  __device__ static int thread() { return threadIdx.x % kTeam; }
  // The block's index in its cluster.
  __device__ static int rank() {
#if __CUDA_ARCH__ >= 900
    if constexpr (kCluster) return __clusterRelativeBlockRank();
#endif
    return 0;
  }
  __device__ static int ranks() {
#if __CUDA_ARCH__ >= 900
    if constexpr (kCluster) return __clusterSizeInBlocks();
#endif
    return 1;
  }
  __device__ int unit(int v) const { return v * kTeam + thread(); }  // the v-th vector of this thread, in the slice
  __device__ bool leads() const { return rank() == 0 && thread() == 0; }

  // `mine` is the same in all lanes of a warp. `all` holds each warp's value once, spread over kApart lanes.
  __device__ void exchange(float2 mine, float2 (&all)[kHeld]) {
    if constexpr (kCluster) {
      if (lane() < ranks()) write(scratch + (rank() * kWarps + warp()) * 8, lane(), mine);
      cluster_sync();
#pragma unroll
      for (int h = 0; h < kHeld; ++h)
        all[h] = lane() + 32 * h < ranks() * kWarps ? read(scratch + (lane() + 32 * h) * 8) : float2{0, 0};
    } else {
      if (lane() == 0) write(scratch + warp() * 8, mine);
      asm volatile("bar.sync %0, %1;" ::"r"(index() + 1), "n"(kTeam) : "memory");
      all[0] = read(scratch + lane() % kWarps * 8);
    }
    // Switches to the other set: a warp that is ahead must not overwrite what another still reads.
    scratch ^= kSet;
  }

  __device__ float2 sum(float2 v) {
    v = {lanes_sum<32>(v.x), lanes_sum<32>(v.y)};
    if constexpr (kWarps > 1) {
      float2 all[kHeld];
      exchange(v, all);
      v = all[0];
      if constexpr (kHeld > 1) v = {v.x + all[1].x, v.y + all[1].y};
      v = {lanes_sum<kApart>(v.x), lanes_sum<kApart>(v.y)};
    }
    return v;
  }

  __device__ float sum(float v) {
    v = lanes_sum<32>(v);
    if constexpr (kWarps > 1) {
      float2 all[kHeld];
      exchange({v, 0}, all);
      v = all[0].x;
      if constexpr (kHeld > 1) v += all[1].x;
      v = lanes_sum<kApart>(v);
    }
    return v;
  }

 private:
  static constexpr unsigned kSet = sizeof(float2) * kWarps * (kCluster ? kMaxCluster : 1);

  __device__ static float2 read(unsigned at) {
    float2 v;
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(v.x), "=f"(v.y) : "r"(at) : "memory");
    return v;
  }
  __device__ static void write(unsigned at, float2 v) {
    asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(at), "f"(v.x), "f"(v.y) : "memory");
  }
  // Writes to the same address in another block of the cluster.
  __device__ static void write(unsigned at, unsigned rank, float2 v) {
#if __CUDA_ARCH__ >= 900
    asm volatile(
        "{\n.reg .b32 there;\nmapa.shared::cluster.u32 there, %0, %1;\n"
        "st.shared::cluster.v2.f32 [there], {%2, %3};\n}" ::"r"(at),
        "r"(rank), "f"(v.x), "f"(v.y)
        : "memory");
#endif
  }
};

// A thread's slots for the next `stages` rows of kTensors tensors.
template <int kTensors>
struct Ring {
  static constexpr int kMinStages = 2, kMaxStages = 4;  // supported by wait()
  unsigned slots;                                       // an address in shared memory
  int stages, stage = 0;

  __device__ Ring(void* shared, int stages)
      : slots(static_cast<unsigned>(__cvta_generic_to_shared(shared)) + 16 * threadIdx.x), stages(stages) {}
  __device__ unsigned slot(int tensor, int v) const {
    return slots + ((stage * kTensors + tensor) * kVectors + v) * (kThreads * 16);
  }
  // Starts the copy of a vector into the current stage.
  __device__ void fetch(int tensor, int v, const void* from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(slot(tensor, v)), "l"(from) : "memory");
  }
  // Commits the fetches of a stage, even if there are none, and goes to the next stage.
  __device__ void commit() {
    asm volatile("cp.async.commit_group;" ::: "memory");
    stage = stage + 1 == stages ? 0 : stage + 1;
  }
  // Waits for the current stage, the oldest of `stages`.
  __device__ void wait() {
    if (stages == 2)
      asm volatile("cp.async.wait_group 1;" ::: "memory");
    else if (stages == 3)
      asm volatile("cp.async.wait_group 2;" ::: "memory");
    else
      asm volatile("cp.async.wait_group 3;" ::: "memory");
  }
  // Volatile, so that a vector that is read twice does not stay in registers in between.
  template <int N, class T>
  __device__ void read(int tensor, int v, float (&x)[N]) const {
    uint4 raw;
    asm volatile("ld.volatile.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(raw.x), "=r"(raw.y), "=r"(raw.z), "=r"(raw.w)
                 : "r"(slot(tensor, v))
                 : "memory");
    load<N>(reinterpret_cast<const T*>(&raw), x);
  }
};

// A slice of a parameter, as float32 in shared memory. Planes of float4: neighbouring lanes read neighbouring 16 bytes.
template <int kTeam, int N>
struct Slice {
  static constexpr int kUnits = kTeam * kVectors, kPlanes = N / 4, kBytes = kUnits * N * 4;
  float4* planes;

  template <class T>
  __device__ void fill(const Parameter& from, int first, int count) {
#pragma unroll 8
    for (int e = threadIdx.x; e < kUnits * N; e += kThreads) {
      const int unit = e / N, i = e % N;
      float value[1] = {0};
      if (unit < count) from.read<T>(int64_t(first) * N + e, value);
      reinterpret_cast<float*>(planes + i / 4 * kUnits + unit)[i % 4] = value[0];
    }
  }
  __device__ Slice(void* shared, const Parameter& from, int first, int count) : planes(static_cast<float4*>(shared)) {
    if (from.dtype == Dtype::bfloat16)
      fill<__nv_bfloat16>(from, first, count);
    else if (from.dtype == Dtype::float16)
      fill<__half>(from, first, count);
    else
      fill<float>(from, first, count);
  }
  __device__ void read(int unit, float (&w)[N]) const {
#pragma unroll
    for (int p = 0; p < kPlanes; ++p) *reinterpret_cast<float4*>(w + 4 * p) = planes[p * kUnits + unit];
  }
};

}  // namespace hfnn
