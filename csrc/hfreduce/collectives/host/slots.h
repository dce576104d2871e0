// Shared by the collectives of one host: cutting messages into pieces that fit into slots.
#pragma once

#include <algorithm>
#include <cstring>
#include <vector>

#include "collectives/host/shm_group.h"
#include "collectives/reduce.h"

namespace hfreduce {

constexpr int64_t kLine = 64;

// Elements [first, last) of slice i of n: whole cache lines except at the end, so that no two ranks write one line.
struct Slice {
  Slice(int64_t count, int64_t size, int i, int n) {
    const int64_t line = std::max<int64_t>(1, kLine / size), lines = (count + line - 1) / line;
    first = std::min(count, lines * i / n * line);
    last = std::min(count, lines * (i + 1) / n * line);
  }
  int64_t count() const { return last - first; }
  int64_t first, last;
};

// Elements of `size` bytes that fit into 1/n of `bytes`, in whole cache lines; at least a line.
inline int64_t piece(size_t bytes, int n, int64_t size) {
  return std::max<int64_t>(1, static_cast<int64_t>(bytes) / n / kLine) * kLine / size;
}

// The same for the part of a slot that one step fills.
inline int64_t chunk_of(const ShmGroup& shm, int64_t chunk, int64_t size) {
  return piece(std::min<int64_t>(chunk, shm.slot_bytes()), 1, size);
}

// Moves a block of `bytes` in steps of up to 1/n of a slot; at least one step. Each step calls write(done, now), which
// fills the own slot, and read(done, now) when all ranks have arrived.
template <class Write, class Read>
void for_pieces(ShmGroup& shm, int n, int64_t bytes, const Watch& watch, Write write, Read read) {
  const int64_t most = piece(shm.slot_bytes(), n, 1);
  int64_t done = 0;
  do {
    const int64_t now = std::min(most, bytes - done);
    write(done, now);
    shm.arrive(watch);
    read(done, now);
    shm.next();
    done += now;
  } while (done < bytes);
}

// The inputs of a reduction from all ranks: their slots from this byte on, and their factors.
struct Inputs {
  Inputs(const ShmGroup& shm, int64_t byte, Reduction reduction) {
    for (int i = 0; i < shm.size(); ++i) memory.push_back(shm.slot(i) + byte);
    if (reduction.op == Op::premul_sum)
      for (int i = 0; i < shm.size(); ++i) factors.push_back(shm.call(i).factor);
  }
  void reduce(void* out, int64_t count, DType dtype, Op op, int64_t divisor) const {
    hfreduce::reduce(out, memory.data(), factors.empty() ? nullptr : factors.data(), static_cast<int>(memory.size()),
                     count, dtype, op, divisor);
  }
  std::vector<const void*> memory;
  std::vector<double> factors;
};

inline char* at(void* data, int64_t byte) { return static_cast<char*>(data) + byte; }
inline const char* at(const void* data, int64_t byte) { return static_cast<const char*>(data) + byte; }

// Like memcpy, but also for null pointers without bytes, and for to == from.
inline void copy(void* to, const void* from, int64_t bytes) {
  if (bytes > 0 && to != from) std::memcpy(to, from, bytes);
}

}  // namespace hfreduce
