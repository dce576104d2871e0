// Operations for tests of the host-staged reduction: each rank's input and expected output.
#pragma once

#include <random>
#include <vector>

#include "collectives/host/slots.h"
#include "collectives/reduce.h"
#include "communicator.h"
#include "played_hosts.h"

namespace hfreduce::gpu {

using Bytes = std::vector<char>;

// One operation, drawn equally on all ranks. Ranks are those of all hosts.
struct Call1 {
  Kind kind = Kind::all_reduce;
  DType dtype = DType::f32;
  Op op = Op::sum;
  int64_t count = 0;
  int root = 0, stream = 0;
  bool in_place = false;
  unsigned seed = 0;

  Reduction reduction(int rank) const { return {op, op == Op::premul_sum ? 0.25 * (rank + 1) : 1.0}; }
  int64_t bytes() const { return count * size_of(dtype); }
  bool sums() const { return kind == Kind::all_reduce || kind == Kind::reduce_scatter; }
  Enqueued enqueued() const {
    Enqueued enqueued;
    enqueued.call.kind = kind, enqueued.call.dtype = dtype, enqueued.call.op = op;
    enqueued.call.count = count, enqueued.call.root = root, enqueued.call.sequence = seed;
    return enqueued;
  }
};

// A rank's input: finite in every format.
inline Bytes input(const Call1& call, int rank, int size) {
  Bytes data(call.bytes() * (call.kind == Kind::reduce_scatter ? size : 1));
  std::mt19937 random(call.seed * 31 + rank);
  for (char& byte : data) byte = static_cast<char>(random() & (call.dtype == DType::boolean ? 1 : 0xbf));
  return data;
}

// Added up in each host, and then between hosts.
inline Bytes expected(const Call1& call, int rank, const World& world) {
  const int size = world.ranks();
  std::vector<Bytes> inputs, sums(world.hosts(), Bytes(call.bytes()));
  for (int r = 0; r < size; ++r) inputs.push_back(input(call, r, size));
  if (call.kind == Kind::broadcast) return inputs[call.root];
  Bytes out(call.bytes() * (call.kind == Kind::all_gather ? size : 1));
  if (call.kind == Kind::all_gather)
    for (int r = 0; r < size; ++r) copy(at(out.data(), r * call.bytes()), inputs[r].data(), call.bytes());
  if (!call.sums()) return out;
  const bool factored = call.op == Op::premul_sum, several = world.hosts() > 1;
  std::vector<const void*> parts;
  for (int h = 0; h < world.hosts(); ++h) {
    std::vector<const void*> from;
    std::vector<double> factors;
    for (int r = world.first(h); r < world.first(h + 1); ++r) {
      from.push_back(inputs[r].data() + (call.kind == Kind::reduce_scatter ? rank * call.bytes() : 0));
      factors.push_back(call.reduction(r).factor);
    }
    const Op op = several && call.op == Op::avg ? Op::sum : call.op;
    reduce(sums[h].data(), from.data(), factored ? factors.data() : nullptr, world.sizes[h], call.count, call.dtype, op,
           size);
    parts.push_back(sums[h].data());
  }
  if (!several) return sums[0];
  reduce(out.data(), parts.data(), nullptr, world.hosts(), call.count, call.dtype, factored ? Op::sum : call.op, size);
  return out;
}

}  // namespace hfreduce::gpu
