// The collectives of several hosts, composed of those inside a host (host.h) and those of a rail (rail.h).
//
// An all-reduce is cut into chunks, and a chunk into a slice for each rail. Inside each host a chunk is
// reduce-scattered to the rails, each rail all-reduces its slice between the hosts, and the slices are gathered inside
// each host. While chunk c is added up inside the host, chunks c-1 and c-2 travel, and chunk c-3 has travelled and is
// gathered (stages.h). With L ranks on each of H hosts and N bytes, each rank sends and receives what the algorithm
// between hosts does for N / L: in total as much as one rank per host would, but over L connections and from L cores.
// Reduce-scatter and all-gather are the two halves. Broadcast and reduce use the same stages in one direction.
//
// If hosts have different numbers of ranks, ranks beyond the smallest host's number have no slice, and only take part
// inside their host. Then, and if the ranks of a host are not consecutive, reduce-scatter and all-gather are built from
// all-reduce, at twice the bytes. gather, scatter and all-to-all use shared memory inside a host, and otherwise go
// directly from rank to rank.
#include "collectives/interhost/hierarchy.h"

#include <algorithm>
#include <cstring>

#include "collectives/host/host.h"
#include "collectives/host/slots.h"
#include "collectives/interhost/stages.h"

namespace hfreduce::interhost {

namespace {

// The most that any message uses. All operations use the same connections, so ranks that called different ones notice.
int streams(const Plan& plan) {
  int most = 1;
  for (const Row& row : plan.rows())
    most = std::max(most, plan.choose(row.kind, std::min(row.max_bytes, int64_t{1} << 40)).streams);
  return most;
}

}  // namespace

Hierarchy::Hierarchy(const Roster& roster, Mesh& mesh, ShmGroup& shm, Health& health, const Plan& plan)
    : roster_(roster),
      shm_(shm),
      layout_(roster),
      carriers_{HostStreams(roster, mesh, 2, streams(plan)), HostStreams(roster, mesh, 3, streams(plan))},
      stages_(roster, mesh, health, layout_, streams(plan)) {}

namespace {

// Inside a host an average is only summed; the last step between hosts divides.
Reduction undivided(Reduction reduction) {
  return {reduction.op == Op::avg ? Op::sum : reduction.op, reduction.factor};
}

}  // namespace

void Hierarchy::reserve(int64_t bytes, int64_t pad_bytes) {
  slice_bytes_ = (bytes + kLine - 1) / kLine * kLine;
  const int64_t needed = Stages::kUnderWay * slice_bytes_ + pad_bytes;
  if (needed > reserved_) memory_.reset(new char[needed]);
  reserved_ = std::max(needed, reserved_);
}

void Hierarchy::sum_inside(const void* chunk, void* slice, int64_t count, DType dtype, Reduction reduction,
                           const Watch& watch) {
  if (shm_.size() == layout_.rails)
    return host::reduce_scatter(shm_, chunk, count, slice, count, dtype, reduction, 1, watch);
  for (int r = 0; r < layout_.rails; ++r)
    host::all_reduce_two_shot(shm_, at(chunk, r * count * size_of(dtype)), slice, count, dtype, reduction,
                              shm_.slot_bytes(), watch, r);
}

void Hierarchy::share_inside(const void* slice, void* chunk, int64_t bytes, const Watch& watch) {
  if (shm_.size() == layout_.rails) return host::all_gather(shm_, slice, chunk, bytes, bytes, watch);
  for (int r = 0; r < layout_.rails; ++r) {
    if (r == layout_.local) copy(at(chunk, r * bytes), slice, bytes);
    host::broadcast(shm_, at(chunk, r * bytes), bytes, r, watch);
  }
}

void Hierarchy::sum(const void* in, void* out, int64_t count, DType dtype, Reduction reduction, const Choice& choice,
                    int root, const Watch& watch) {
  const int64_t size = size_of(dtype);
  const Cut cut(count, size, layout_.rails);
  const Sum sum{dtype, reduction.op, roster_.size()};
  const Rail rail = stages_.rail(watch);
  const bool here = root < 0 || host_of(root) == layout_.host, wanted = root < 0 || root == roster_.rank;
  const bool all = root < 0 || choice.between == Between::direct;
  reserve(cut.slice * size, cut.slice * cut.parts * size);
  stages_.run(
      cut.chunks, watch,
      [&](int64_t c) {
        const Chunk chunk(cut, c);
        const void* from = at(in, chunk.first * size);
        if (!chunk.whole) {
          copy(pad(), from, chunk.count * size);
          std::memset(pad() + chunk.count * size, 0, (chunk.slice * cut.parts - chunk.count) * size);
          from = pad();
        }
        sum_inside(from, slices(c), chunk.slice, dtype, undivided(reduction), watch);
      },
      [&](int64_t c, const Rail& rail) {
        const Chunk chunk(cut, c);
        if (all) return interhost::all_reduce(choice.between, rail, slices(c), chunk.slice, sum);
        tree_reduce(rail, slices(c), chunk.slice, sum, place_of(root));
      },
      [&](int64_t c) {
        const Chunk chunk(cut, c);
        if (!here) return;
        const bool direct = chunk.whole && wanted;
        share_inside(slices(c), direct ? at(out, chunk.first * size) : pad(), chunk.slice * size, watch);
        if (wanted && !direct) copy(at(out, chunk.first * size), pad(), chunk.count * size);
      });
}

// One rank per host: nothing to add up inside the hosts and nothing to overlap. `out` itself travels.
void Hierarchy::sum_alone(const void* in, void* out, int64_t count, DType dtype, Reduction reduction,
                          const Choice& choice, const Watch& watch) {
  const int64_t size = size_of(dtype);
  if (reduction.op == Op::premul_sum)
    hfreduce::reduce(out, &in, &reduction.factor, 1, count, dtype, Op::premul_sum, 1);
  else
    copy(out, in, count * size);
  interhost::all_reduce(choice.between, stages_.rail(watch), out, count, {dtype, reduction.op, roster_.size()});
}

void Hierarchy::all_reduce(const void* in, void* out, int64_t count, DType dtype, Reduction reduction,
                           const Choice& choice, const Watch& watch) {
  if (alone()) return sum_alone(in, out, count, dtype, reduction, choice, watch);
  sum(in, out, count, dtype, reduction, choice, -1, watch);
}

void Hierarchy::reduce(const void* in, void* out, int64_t count, DType dtype, Reduction reduction, int root,
                       const Choice& choice, const Watch& watch) {
  sum(in, out, count, dtype, reduction, choice, root, watch);
}

void Hierarchy::reduce_scatter(const void* in, void* out, int64_t count, DType dtype, Reduction reduction,
                               const Choice& choice, const Watch& watch) {
  const int64_t size = size_of(dtype), all = roster_.size() * count;
  if (!layout_.regular) {
    const std::unique_ptr<char[]> sums(new char[all * size]);
    sum(in, sums.get(), all, dtype, reduction, choice, -1, watch);
    return copy(out, sums.get() + roster_.rank * count * size, count * size);
  }
  // A slice: the same elements of the blocks of all ranks of this rail.
  const Cut cut(count, size * layout_.hosts, 1);
  const Sum sum{dtype, reduction.op, roster_.size()};
  const Rail rail = stages_.rail(watch);
  reserve(cut.slice * layout_.hosts * size, 0);
  stages_.run(
      cut.chunks, watch,
      [&](int64_t c) {
        const Chunk chunk(cut, c);
        for (int h = 0; h < layout_.hosts; ++h)
          host::reduce_scatter(shm_, at(in, (h * layout_.rails * count + chunk.first) * size), count,
                               slices(c) + h * chunk.count * size, chunk.count, dtype, undivided(reduction), 1, watch);
      },
      [&](int64_t c, const Rail& rail) {
        interhost::all_reduce(choice.between, rail, slices(c), Chunk(cut, c).count * layout_.hosts, sum, Part::scatter);
      },
      [&](int64_t c) {
        const Chunk chunk(cut, c);
        copy(at(out, chunk.first * size), slices(c) + layout_.host * chunk.count * size, chunk.count * size);
      });
}

void Hierarchy::all_gather(const void* in, void* out, int64_t bytes, const Choice& choice, const Watch& watch) {
  const int64_t all = roster_.size() * bytes, mine = roster_.rank * bytes;
  const Sum none{DType::u8, Op::bor, 1};
  if (!layout_.regular) {  // all-reduce of zeros, except for this rank's block
    copy(at(out, mine), in, bytes);
    if (bytes) std::memset(out, 0, mine);
    if (bytes) std::memset(at(out, mine + bytes), 0, all - mine - bytes);
    return sum(out, out, all, DType::u8, {Op::bor}, choice, -1, watch);
  }
  const Rail rail = stages_.rail(watch);
  if (alone()) {
    copy(at(out, mine), in, bytes);
    return interhost::all_reduce(choice.between, rail, out, all, none, Part::gather);
  }
  const Cut cut(bytes, layout_.hosts, 1);
  reserve(cut.slice * layout_.hosts, 0);
  stages_.run(
      cut.chunks, watch,
      [&](int64_t c) {
        const Chunk chunk(cut, c);
        copy(slices(c) + layout_.host * chunk.count, at(in, chunk.first), chunk.count);
      },
      [&](int64_t c, const Rail& rail) {
        interhost::all_reduce(choice.between, rail, slices(c), Chunk(cut, c).count * layout_.hosts, none, Part::gather);
      },
      [&](int64_t c) {
        const Chunk chunk(cut, c);
        for (int h = 0; h < layout_.hosts; ++h)
          host::all_gather(shm_, slices(c) + h * chunk.count, at(out, h * layout_.rails * bytes + chunk.first), bytes,
                           chunk.count, watch);
      });
}

void Hierarchy::broadcast(void* data, int64_t bytes, int root, const Watch& watch) {
  const Rail rail = stages_.rail(watch);
  const int host = host_of(root);
  if (alone()) return tree_broadcast(rail, data, bytes, place_of(root));
  const bool source = host == layout_.host;
  const Cut cut(bytes, 1, layout_.rails);
  reserve(cut.slice, cut.slice * cut.parts);
  stages_.run(
      cut.chunks, watch,
      [&](int64_t c) {
        const Chunk chunk(cut, c);
        if (!source) return;
        host::broadcast(shm_, at(data, chunk.first), chunk.count, local_of(root), watch);
        if (!chunk.whole) copy(pad(), at(data, chunk.first), chunk.count);
      },
      [&](int64_t c, const Rail& rail) {
        const Chunk chunk(cut, c);
        char* const from = (chunk.whole ? at(data, chunk.first) : pad()) + layout_.local * chunk.slice;
        tree_broadcast(rail, source ? from : slices(c), chunk.slice, place_of(root));
      },
      [&](int64_t c) {
        const Chunk chunk(cut, c);
        if (source) return;
        share_inside(slices(c), chunk.whole ? at(data, chunk.first) : pad(), chunk.slice, watch);
        if (!chunk.whole) copy(at(data, chunk.first), pad(), chunk.count);
      });
}

void Hierarchy::gather(const void* in, void* out, int64_t bytes, int root, const Watch& watch) {
  const Rail rail = stages_.rail(watch);
  if (host_of(root) != layout_.host) {
    meet(watch);
    return exchange(rail, {{root, const_cast<void*>(in), bytes}}, {});
  }
  const std::vector<int>& near = roster_.local();
  std::unique_ptr<char[]> blocks;
  if (root == roster_.rank) blocks.reset(new char[bytes * near.size()]);
  host::gather(shm_, in, blocks.get(), bytes, local_of(root), watch);
  if (root != roster_.rank) return;
  for (size_t i = 0; i < near.size(); ++i) copy(at(out, near[i] * bytes), blocks.get() + i * bytes, bytes);
  std::vector<Transfer> transfers;
  for (const Peer& peer : roster_.peers)
    if (peer.host != layout_.host) transfers.push_back({peer.rank, at(out, peer.rank * bytes), bytes});
  exchange(rail, {}, transfers);
}

void Hierarchy::scatter(const void* in, void* out, int64_t bytes, int root, const Watch& watch) {
  const Rail rail = stages_.rail(watch);
  if (host_of(root) != layout_.host) {
    meet(watch);
    return exchange(rail, {}, {{root, out, bytes}});
  }
  const std::vector<int>& near = roster_.local();
  std::unique_ptr<char[]> blocks;
  if (root == roster_.rank) {
    std::vector<Transfer> transfers;
    for (const Peer& peer : roster_.peers)
      if (peer.host != layout_.host)
        transfers.push_back({peer.rank, const_cast<char*>(at(in, peer.rank * bytes)), bytes});
    exchange(rail, transfers, {});
    blocks.reset(new char[bytes * near.size()]);
    for (size_t i = 0; i < near.size(); ++i) copy(blocks.get() + i * bytes, at(in, near[i] * bytes), bytes);
  }
  host::scatter(shm_, blocks.get(), out, bytes, local_of(root), watch);
}

void Hierarchy::all_to_all(const void* in, const int64_t* in_offsets, const int64_t* in_sizes, void* out,
                           const int64_t* out_offsets, const int64_t* out_sizes, const Watch& watch) {
  std::vector<int64_t> near[4];
  for (int rank : roster_.local()) {
    near[0].push_back(in_offsets[rank]);
    near[1].push_back(in_sizes[rank]);
    near[2].push_back(out_offsets[rank]);
    near[3].push_back(out_sizes[rank]);
  }
  host::all_to_all(shm_, in, near[0].data(), near[1].data(), out, near[2].data(), near[3].data(), watch);
  std::vector<Transfer> transfers, expected;
  for (int i = 1; i < layout_.hosts; ++i) {  // ranks begin with different peers, to spread the load
    const std::vector<int>& ranks = roster_.hosts[roster_.order[(roster_.place() + i) % layout_.hosts]];
    for (size_t j = 0; j < ranks.size(); ++j) {
      const int rank = ranks[(layout_.local + j) % ranks.size()];
      transfers.push_back({rank, const_cast<char*>(at(in, in_offsets[rank])), in_sizes[rank]});
      expected.push_back({rank, at(out, out_offsets[rank]), out_sizes[rank]});
    }
  }
  exchange(stages_.rail(watch), transfers, expected);
}

void Hierarchy::carry(int lane, void* data, int64_t count, const Choice& choice, const Watch& watch) {
  const Call& call = watch.call;
  const Rail rail{carriers_[lane], watch, layout_.rail, roster_.place(), roster_.order};
  const Sum sum{call.dtype, call.op, roster_.size()};
  if (call.kind == Kind::all_reduce) return interhost::all_reduce(choice.between, rail, data, count, sum);
  if (call.kind == Kind::reduce_scatter)
    return interhost::all_reduce(choice.between, rail, data, count, sum, Part::scatter);
  if (call.kind == Kind::all_gather)
    return interhost::all_reduce(choice.between, rail, data, count, {DType::u8, Op::bor, 1}, Part::gather);
  tree_broadcast(rail, data, count, place_of(call.root));
}

// All ranks of this host arrive, then each rail waits for all hosts. If some ranks have no rail, the ranks of this host
// then wait for each other again.
void Hierarchy::barrier(const Watch& watch) {
  meet(watch);
  char nothing = 0;
  if (!layout_.rail.empty()) tree_all_reduce(stages_.rail(watch), &nothing, 1, {DType::u8, Op::bor, 1});
  if (shm_.size() > layout_.rails) meet(watch);
}

}  // namespace hfreduce::interhost
