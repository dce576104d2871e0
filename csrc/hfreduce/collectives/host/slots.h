// What the collectives of one host share: cutting messages into pieces that fit into slots.
#pragma once

#include <algorithm>
#include <cstring>
#include <vector>

#include "collectives/host/shm_group.h"
#include "collectives/reduce.h"

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

// The same of a slot's part that one step fills.
inline int64_t chunk_of(const ShmGroup& shm, int64_t chunk, int64_t size) {
  return piece(std::min<int64_t>(chunk, shm.slot_bytes()), 1, size);
}

// Steps for the bytes of a block, of which 1/n of a slot holds a piece; at least one. In each write(done, now), to
// one's own slot, and when all have, read(done, now).
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
