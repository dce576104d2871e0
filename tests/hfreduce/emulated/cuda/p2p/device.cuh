// device.cuh for CPU threads: a kernel's thread is a thread, a block's barrier is a barrier, flags and packets are
// atomics of the same memory order. Included in its place, so that the kernels are compiled unchanged. ThreadSanitizer
// then checks their ordering.
#pragma once

#include <sched.h>

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <mutex>
#include <random>
#include <stdexcept>
#include <string>
#include <thread>
#include <type_traits>
#include <vector>

#define __device__
#define __host__
#define __global__ static
#define __grid_constant__
#define __forceinline__ inline
#define __noinline__
#define __launch_bounds__(...)

struct Index {
  unsigned x;
};
inline thread_local Index threadIdx, blockIdx, blockDim, gridDim;

// The barrier of a block. Returns whether any thread passed true.
class Barrier {
 public:
  explicit Barrier(int threads) : threads_(threads) {}
  bool wait(bool mine) {
    std::unique_lock lock(mutex_);
    any_ |= mine;
    if (++here_ == threads_) {
      result_ = any_, any_ = false, here_ = 0, ++round_;
      all_.notify_all();
      return result_;
    }
    all_.wait(lock, [this, round = round_] { return round_ != round; });
    return result_;
  }
  // Threads that have returned are not waited for.
  void leave() {
    std::lock_guard lock(mutex_);
    --threads_;
    if (here_ < threads_ || threads_ == 0) return;
    result_ = any_, any_ = false, here_ = 0, ++round_;
    all_.notify_all();
  }

 private:
  std::mutex mutex_;
  std::condition_variable all_;
  int threads_, here_ = 0, round_ = 0;
  bool any_ = false, result_ = false;
};
inline thread_local Barrier* barrier;
inline void __syncthreads() { barrier->wait(false); }
inline bool __syncthreads_or(bool mine) { return barrier->wait(mine); }

namespace hfreduce::gpu {

// Threads yield at random, so that blocks and ranks drift apart.
inline void stumble() {
  thread_local std::minstd_rand random(std::random_device{}());
  if (random() % 64 == 0) sched_yield();
}

// Runs `work` in stream order. Defined by the test.
void on_stream(void* stream, std::function<void()> work);

template <class Launch, class... Parameters, class... Arguments>
void launch_kernel(const Launch& launch, void (*kernel)(Parameters...), const Arguments&... arguments) {
  on_stream(launch.stream, [=] {
    std::vector<std::thread> threads;
    std::vector<std::unique_ptr<Barrier>> blocks;
    for (int b = 0; b < launch.blocks; ++b) blocks.push_back(std::make_unique<Barrier>(launch.threads));
    for (int i = 0; i < launch.blocks * launch.threads; ++i)
      threads.emplace_back([&, i] {
        const int b = i / launch.threads;
        blockIdx.x = b, threadIdx.x = i % launch.threads;
        gridDim.x = launch.blocks, blockDim.x = launch.threads;
        barrier = blocks[b].get();
        kernel(Parameters(arguments)...);
        barrier->leave();
      });
    for (std::thread& t : threads) t.join();
  });
}

struct alignas(16) Quad {
  uint32_t words[4];
};
template <int kWords>
struct Words {
  uint32_t words[kWords];
};

// Plain accesses, so that ThreadSanitizer sees them. Unaligned addresses are errors on a GPU, too.
template <class T>
T load_aligned(const void* from) {
  if (reinterpret_cast<uintptr_t>(from) % sizeof(T)) throw std::logic_error("not aligned");
  T x;
  std::memcpy(&x, from, sizeof(x));
  return x;
}
template <class T>
void store_aligned(void* to, const T& x) {
  if (reinterpret_cast<uintptr_t>(to) % sizeof(T)) throw std::logic_error("not aligned");
  stumble();
  std::memcpy(to, &x, sizeof(x));
}
inline Quad load_quad(const void* from) { return load_aligned<Quad>(from); }
inline void store_quad(void* to, const Quad& x) { store_aligned(to, x); }
inline Words<2> load_pair(const void* from) { return load_aligned<Words<2>>(from); }
inline void store_pair(void* to, const Words<2>& x) { store_aligned(to, x); }

inline void raise_flag(uint64_t* flag, uint64_t value) {
  stumble();
  __atomic_store_n(flag, value, __ATOMIC_RELEASE);
}
inline uint64_t see_flag(const uint64_t* flag) { return __atomic_load_n(flag, __ATOMIC_ACQUIRE); }

struct Packets {
  uint64_t first, second;
};
inline void send_packets(void* to, Packets x) {
  auto* words = static_cast<uint64_t*>(to);
  __atomic_store_n(words, x.first, __ATOMIC_RELAXED);
  stumble();
  __atomic_store_n(words + 1, x.second, __ATOMIC_RELAXED);
}
inline Packets see_packets(const void* from) {
  const auto* words = static_cast<const uint64_t*>(from);
  return {__atomic_load_n(words, __ATOMIC_RELAXED), __atomic_load_n(words + 1, __ATOMIC_RELAXED)};
}

inline uint32_t read_board(const uint32_t* word) { return __atomic_load_n(word, __ATOMIC_ACQUIRE); }
inline void write_board(uint32_t* word, uint32_t value) { __atomic_store_n(word, value, __ATOMIC_RELEASE); }

inline int64_t nanoseconds() { return std::chrono::steady_clock::now().time_since_epoch().count(); }
inline void relax() { sched_yield(); }
constexpr uint32_t kLooks = 128;

inline float add(float a, float b) { return a + b; }
inline double add(double a, double b) { return a + b; }
inline float multiply(float a, float b) { return a * b; }
inline double multiply(double a, double b) { return a * b; }
inline float divide(float a, float b) { return a / b; }
inline double divide(double a, double b) { return a / b; }

}  // namespace hfreduce::gpu

#include "collectives/floats.h"

namespace hfreduce::gpu {

inline void widen_f16(uint32_t word, float& low, float& high) {
  low = load(Float16{uint16_t(word)}), high = load(Float16{uint16_t(word >> 16)});
}
template <class T>
uint32_t narrow_both(float low, float high) {
  T a, b;
  store(a, low), store(b, high);
  return a.bits | uint32_t(b.bits) << 16;
}
inline uint32_t narrow_f16(float low, float high) { return narrow_both<Float16>(low, high); }
inline uint32_t narrow_bf16(float low, float high) { return narrow_both<BFloat16>(low, high); }

}  // namespace hfreduce::gpu
