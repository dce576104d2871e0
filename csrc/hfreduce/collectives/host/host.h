// Collectives among the ranks of one host: their steps and bytes are told where they are. Counts are of elements, ranks
// are local. `in` and `out` may be the same memory (all_reduce), or `in` the right part of `out` (all_gather).
#pragma once

#include "collectives/host/shm_group.h"

namespace hfreduce::host {

// reductions.cpp. one_shot: everybody adds up everything. two_shot: each rank adds up its slice, then all read all
// slices, or only the root, where that is a rank: reduce.
void all_reduce_one_shot(ShmGroup&, const void* in, void* out, int64_t count, DType, Reduction, int64_t chunk,
                         const Watch&);
void all_reduce_two_shot(ShmGroup&, const void* in, void* out, int64_t count, DType, Reduction, int64_t chunk,
                         const Watch&, int root = -1);
// Block b of `in` (size() blocks of `count` elements) is added up into `out` of rank b. `stride`: elements from one
// block to the next. divisor: of avg, the ranks of all hosts.
void reduce_scatter(ShmGroup&, const void* in, int64_t stride, void* out, int64_t count, DType, Reduction,
                    int64_t divisor, const Watch&);

// moves.cpp. all_gather: `in` of rank b becomes block b of `out`, blocks `stride` bytes apart, of `bytes` each.
void all_gather(ShmGroup&, const void* in, void* out, int64_t stride, int64_t bytes, const Watch&);
void broadcast(ShmGroup&, void* data, int64_t bytes, int root, const Watch&);
void gather(ShmGroup&, const void* in, void* out, int64_t bytes, int root, const Watch&);
void scatter(ShmGroup&, const void* in, void* out, int64_t bytes, int root, const Watch&);
// Byte ranges of each peer: [offsets[i], offsets[i] + sizes[i]).
void all_to_all(ShmGroup&, const void* in, const int64_t* in_offsets, const int64_t* in_sizes, void* out,
                const int64_t* out_offsets, const int64_t* out_sizes, const Watch&);

}  // namespace hfreduce::host
