// Collectives among the ranks of one host. The definitions document steps and bytes. Counts are in elements; ranks are
// local. `in` and `out` may be the same memory (all_reduce), or `in` this rank's block of `out` (all_gather).
#pragma once

#include "collectives/host/shm_group.h"

namespace hfreduce::host {

// reductions.cpp. one_shot: every rank adds up the whole message. two_shot: each rank adds up its slice, then all ranks
// read all slices (with `root` >= 0 only the root does: a reduce).
void all_reduce_one_shot(ShmGroup&, const void* in, void* out, int64_t count, DType, Reduction, int64_t chunk,
                         const Watch&);
void all_reduce_two_shot(ShmGroup&, const void* in, void* out, int64_t count, DType, Reduction, int64_t chunk,
                         const Watch&, int root = -1);
// The sum of all ranks' blocks b goes to `out` of rank b. `in` has size() blocks of `count` elements, `stride` elements
// apart. divisor: of avg, the number of ranks on all hosts.
void reduce_scatter(ShmGroup&, const void* in, int64_t stride, void* out, int64_t count, DType, Reduction,
                    int64_t divisor, const Watch&);

// moves.cpp. all_gather: `in` of rank b goes to byte b * stride of `out`. Blocks have `bytes` bytes.
void all_gather(ShmGroup&, const void* in, void* out, int64_t stride, int64_t bytes, const Watch&);
void broadcast(ShmGroup&, void* data, int64_t bytes, int root, const Watch&);
void gather(ShmGroup&, const void* in, void* out, int64_t bytes, int root, const Watch&);
void scatter(ShmGroup&, const void* in, void* out, int64_t bytes, int root, const Watch&);
// The byte range of peer i: [offsets[i], offsets[i] + sizes[i]).
void all_to_all(ShmGroup&, const void* in, const int64_t* in_offsets, const int64_t* in_sizes, void* out,
                const int64_t* out_offsets, const int64_t* out_sizes, const Watch&);

}  // namespace hfreduce::host
