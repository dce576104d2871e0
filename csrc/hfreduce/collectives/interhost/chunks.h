// Cutting a message of several hosts into chunks, and those into slices.
#pragma once

#include <algorithm>
#include <cstdint>

namespace hfreduce {

// Bytes of a slice: enough to be worth its latency between hosts; few enough that the stages overlap, and that what one
// leaves for the next is still in a cache.
constexpr int64_t kLeastSlice = 256 << 10, kMostSlice = 4 << 20;
constexpr int64_t kChunks = 8;  // of a message, between these limits

// A message cut into chunks of `parts` slices.
struct Cut {
  Cut(int64_t count, int64_t size, int parts) : count(count), parts(parts) {
    const int64_t bytes = std::clamp(count / parts * size / kChunks, kLeastSlice, kMostSlice);
    slice = std::min(std::max<int64_t>(1, bytes / size), (count + parts - 1) / parts);
    chunks = slice ? (count + slice * parts - 1) / (slice * parts) : 1;
  }
  int64_t count;
  int parts;
  int64_t slice, chunks;
};

struct Chunk {
  Chunk(const Cut& cut, int64_t index)
      : first(index * cut.slice * cut.parts),
        count(std::min(cut.slice * cut.parts, cut.count - first)),
        slice((count + cut.parts - 1) / cut.parts),
        whole(slice * cut.parts == count) {}
  int64_t first, count;  // elements
  int64_t slice;
  bool whole;  // whether its slices are all full; otherwise it is padded, in memory of ours
};

}  // namespace hfreduce
