// What the collectives of one host share: cutting messages into pieces that fit into slots.
#pragma once

#include <algorithm>
#include <cstring>
#include <vector>

#include "collectives/reduce.h"
#include "collectives/host/shm_group.h"

namespace hfreduce {

constexpr int64_t kLine = 64;

// Elements [first, last) of slice i of n, in whole cache lines but for the end, so that no two ranks write one line.
struct Slice {
  Slice(int64_t count, int64_t size, int i, int n) {
    const int64_t line = std::max<int64_t>(1, kLine / size), lines = (count + line - 1) / line;
    first = std::min(count, lines * i / n * line);
    last = std::min(count, lines * (i + 1) / n * line);
  }
  int64_t count() const { return last - first; }
  int64_t first, last;
};

// The elements of `size` bytes that fit into 1/n of `bytes`, in whole cache lines; at least a line.
inline int64_t piece(size_t bytes, int n, int64_t size) {
  return std::max<int64_t>(1, static_cast<int64_t>(bytes) / n / kLine) * kLine / size;
}

// f(first, count) for one chunk of a message after the other, of what fits into a slot; an empty message has one.
template <class F>
void for_chunks(const ShmGroup& shm, int64_t count, int64_t size, int64_t chunk, F f) {
  const int64_t most = piece(std::min<int64_t>(chunk, shm.slot_bytes()), 1, size);
  int64_t done = 0;
  do {
    const int64_t now = std::min(most, count - done);
    f(done, now);
    done += now;
  } while (done < count);
}

// All ranks' inputs of a reduction: their slots at this byte, and their factors.
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

// As memcpy, which does not take a null pointer without bytes, nor memory that is there already.
inline void copy(void* to, const void* from, int64_t bytes) {
  if (bytes > 0 && to != from) std::memcpy(to, from, bytes);
}

}  // namespace hfreduce
