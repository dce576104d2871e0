// Collectives among the ranks of one host; one algorithm a file, its steps and bytes told there. Counts are of
// elements, ranks are local. `in` and `out` may be the same memory (all_reduce), or `in` the right part of `out`
// (all_gather).
#pragma once

#include "collectives/host/shm_group.h"

namespace hfreduce::local {

// one_shot.cpp: everybody adds up everything.
void all_reduce_one_shot(ShmGroup&, const void* in, void* out, int64_t count, DType, Reduction, int64_t chunk,
                         const Watch&);
// two_shot.cpp: each rank adds up its slice, then all read all slices.
void all_reduce_two_shot(ShmGroup&, const void* in, void* out, int64_t count, DType, Reduction, int64_t chunk,
                         const Watch&);
// two_shot.cpp too: as all_reduce, but only the root reads.
void reduce(ShmGroup&, const void* in, void* out, int64_t count, DType, Reduction, int root, const Watch&);

// Block b of `in` (size() blocks of `count` elements) is added up into `out` of rank b. `stride`: elements from one
// block to the next. divisor: of avg, the ranks of all hosts. reduce_scatter.cpp
void reduce_scatter(ShmGroup&, const void* in, int64_t stride, void* out, int64_t count, DType, Reduction,
                    int64_t divisor, const Watch&);
// `in` of rank b becomes block b of `out`, blocks `stride` bytes apart, of `bytes` each. all_gather.cpp
void all_gather(ShmGroup&, const void* in, void* out, int64_t stride, int64_t bytes, const Watch&);

void broadcast(ShmGroup&, void* data, int64_t bytes, int root, const Watch&);               // broadcast.cpp
void gather(ShmGroup&, const void* in, void* out, int64_t bytes, int root, const Watch&);   // gather.cpp
void scatter(ShmGroup&, const void* in, void* out, int64_t bytes, int root, const Watch&);  // scatter.cpp
// Byte ranges of each peer: [offsets[i], offsets[i] + sizes[i]). all_to_all.cpp
void all_to_all(ShmGroup&, const void* in, const int64_t* in_offsets, const int64_t* in_sizes, void* out,
                const int64_t* out_offsets, const int64_t* out_sizes, const Watch&);

}  // namespace hfreduce::local
