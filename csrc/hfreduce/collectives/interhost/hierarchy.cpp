// The collectives of several hosts, from those inside a host (host.h) and those of a rail (rail.h).
//
// An all-reduce is cut into chunks, a chunk into a slice for each rail. Inside each host a chunk is reduce-scattered to
// the rails, each rail all-reduces its slice between the hosts, and the slices are gathered inside each host. While
// chunk c is added up inside the host, chunks c-1 and c-2 travel, and chunk c-3 has travelled and is gathered
// (stages.h). With L ranks on each of H hosts and N bytes, each rank sends and receives what the algorithm between
// hosts does for N / L: all together as much as one rank a host would, but over L connections and from L cores.
// Reduce-scatter and all-gather are its halves, broadcast and reduce go the same way down and up.
//
// Where hosts have unequally many ranks, those beyond the smallest host's have no slice, and only take part inside.
// There, and where the ranks of a host do not follow one another, reduce-scatter and all-gather are made from
// all-reduce, at twice the bytes. gather, scatter and all-to-all go inside a host by shared memory, and else straight
// from rank to rank.
#include "collectives/interhost/hierarchy.h"

#include <algorithm>
#include <cstring>

#include "collectives/host/host.h"
#include "collectives/host/slots.h"
#include "collectives/interhost/stages.h"

namespace hfreduce::interhost {

namespace {

// As many as any message wants: all go over the same ones, so that ranks which called different things meet there.
int streams(const Plan& plan) {
  int most = 1;
  for (const Row& row : plan.rows())
    most = std::max(most, plan.choose(row.kind, std::min(row.max_bytes, int64_t{1} << 40)).streams);
  return most;
}

}  // namespace

struct Hierarchy::State {
  State(const Roster& roster, Mesh& mesh, ShmGroup& shm, Health& health, const Plan& plan)
      : roster(roster),
        shm(shm),
        layout(roster),
        carriers{HostStreams(roster, mesh, 2, streams(plan)), HostStreams(roster, mesh, 3, streams(plan))},
        stages(roster, mesh, health, layout, streams(plan)) {}

  bool alone() const { return layout.largest == 1; }  // every rank is alone on its host
  int host_of(int rank) const { return roster.peers[rank].host; }
  int local_of(int rank) const { return roster.peers[rank].local_rank; }

  // Memory for the slices that are under way, and for a chunk that is padded.
  void reserve(int64_t slice_bytes, int64_t pad_bytes);
  char* slices(int64_t chunk) { return memory.get() + chunk % Stages::kUnderWay * slice_bytes; }
  char* pad() { return memory.get() + Stages::kUnderWay * slice_bytes; }

  // The ranks of this host wait for one another: each collective has one step of theirs or more, which compares it.
  void meet(const Watch& watch) {
    shm.arrive(watch);
    shm.next();
  }
  // The sum of the chunk inside this host, slice i in `slice` of rail i.
  void sum_inside(const void* chunk, void* slice, int64_t count, DType dtype, Reduction reduction, const Watch& watch);
  // Slices of the rails, of so many bytes, to all ranks of this host.
  void share_inside(const void* slice, void* chunk, int64_t bytes, const Watch& watch);
  // Adds up over both levels; where `root` is a rank, only the ranks of its host get the sum.
  void sum(const void* in, void* out, int64_t count, DType dtype, Reduction reduction, const Choice& choice, int root,
           const Watch& watch);
  void sum_alone(const void* in, void* out, int64_t count, DType dtype, Reduction reduction, const Choice& choice,
                 const Watch& watch);

  const Roster& roster;
  ShmGroup& shm;
  const HostLayout layout;
  std::unique_ptr<char[]> memory;
  int64_t reserved = 0, slice_bytes = 0;
  HostStreams carriers[2];
  Stages stages;  // last: its threads end before all that they use
};

Hierarchy::Hierarchy(const Roster& roster, Mesh& mesh, ShmGroup& shm, Health& health, const Plan& plan)
    : state_(std::make_unique<State>(roster, mesh, shm, health, plan)) {}
Hierarchy::~Hierarchy() = default;

namespace {

// Inside a host the sum of an average is not divided yet.
Reduction undivided(Reduction reduction) {
  return {reduction.op == Op::avg ? Op::sum : reduction.op, reduction.factor};
}

}  // namespace

void Hierarchy::State::reserve(int64_t bytes, int64_t pad_bytes) {
  slice_bytes = (bytes + kLine - 1) / kLine * kLine;
  const int64_t needed = Stages::kUnderWay * slice_bytes + pad_bytes;
  if (needed > reserved) memory.reset(new char[needed]);
  reserved = std::max(needed, reserved);
}

void Hierarchy::State::sum_inside(const void* chunk, void* slice, int64_t count, DType dtype, Reduction reduction,
                                  const Watch& watch) {
  if (shm.size() == layout.rails)
    return host::reduce_scatter(shm, chunk, count, slice, count, dtype, reduction, 1, watch);
  for (int r = 0; r < layout.rails; ++r)
    host::all_reduce_two_shot(shm, at(chunk, r * count * size_of(dtype)), slice, count, dtype, reduction,
                              shm.slot_bytes(), watch, r);
}

void Hierarchy::State::share_inside(const void* slice, void* chunk, int64_t bytes, const Watch& watch) {
  if (shm.size() == layout.rails) return host::all_gather(shm, slice, chunk, bytes, bytes, watch);
  for (int r = 0; r < layout.rails; ++r) {
    if (r == layout.local) copy(at(chunk, r * bytes), slice, bytes);
    host::broadcast(shm, at(chunk, r * bytes), bytes, r, watch);
  }
}

void Hierarchy::State::sum(const void* in, void* out, int64_t count, DType dtype, Reduction reduction,
                           const Choice& choice, int root, const Watch& watch) {
  const int64_t size = size_of(dtype);
  const Cut cut(count, size, layout.rails);
  const Sum sum{dtype, reduction.op, roster.size()};
  const Rail rail = stages.rail(watch);
  const bool here = root < 0 || host_of(root) == layout.host, wanted = root < 0 || root == roster.rank;
  const bool all = root < 0 || choice.between == Between::direct;
  reserve(cut.slice * size, cut.slice * cut.parts * size);
  stages.run(
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
        tree_reduce(rail, slices(c), chunk.slice, sum, host_of(root));
      },
      [&](int64_t c) {
        const Chunk chunk(cut, c);
        if (!here) return;
        const bool direct = chunk.whole && wanted;
        share_inside(slices(c), direct ? at(out, chunk.first * size) : pad(), chunk.slice * size, watch);
        if (wanted && !direct) copy(at(out, chunk.first * size), pad(), chunk.count * size);
      });
}

// Nothing to add up inside the hosts, nor to overlap: the output itself travels.
void Hierarchy::State::sum_alone(const void* in, void* out, int64_t count, DType dtype, Reduction reduction,
                                 const Choice& choice, const Watch& watch) {
  const int64_t size = size_of(dtype);
  if (reduction.op == Op::premul_sum)
    hfreduce::reduce(out, &in, &reduction.factor, 1, count, dtype, Op::premul_sum, 1);
  else
    copy(out, in, count * size);
  interhost::all_reduce(choice.between, stages.rail(watch), out, count, {dtype, reduction.op, roster.size()});
}

void Hierarchy::all_reduce(const void* in, void* out, int64_t count, DType dtype, Reduction reduction,
                           const Choice& choice, const Watch& watch) {
  State& s = *state_;
  if (s.alone()) return s.sum_alone(in, out, count, dtype, reduction, choice, watch);
  s.sum(in, out, count, dtype, reduction, choice, -1, watch);
}

void Hierarchy::reduce(const void* in, void* out, int64_t count, DType dtype, Reduction reduction, int root,
                       const Choice& choice, const Watch& watch) {
  state_->sum(in, out, count, dtype, reduction, choice, root, watch);
}

void Hierarchy::reduce_scatter(const void* in, void* out, int64_t count, DType dtype, Reduction reduction,
                               const Choice& choice, const Watch& watch) {
  State& s = *state_;
  const int64_t size = size_of(dtype), all = s.roster.size() * count;
  const HostLayout& layout = s.layout;
  if (!layout.regular) {
    const std::unique_ptr<char[]> sums(new char[all * size]);
    s.sum(in, sums.get(), all, dtype, reduction, choice, -1, watch);
    return copy(out, sums.get() + s.roster.rank * count * size, count * size);
  }
  // A slice: the same elements of the blocks of all ranks of this rail.
  const Cut cut(count, size * layout.hosts, 1);
  const Sum sum{dtype, reduction.op, s.roster.size()};
  const Rail rail = s.stages.rail(watch);
  s.reserve(cut.slice * layout.hosts * size, 0);
  s.stages.run(
      cut.chunks, watch,
      [&](int64_t c) {
        const Chunk chunk(cut, c);
        for (int h = 0; h < layout.hosts; ++h)
          host::reduce_scatter(s.shm, at(in, (h * layout.rails * count + chunk.first) * size), count,
                               s.slices(c) + h * chunk.count * size, chunk.count, dtype, undivided(reduction), 1,
                               watch);
      },
      [&](int64_t c, const Rail& rail) {
        interhost::all_reduce(choice.between, rail, s.slices(c), Chunk(cut, c).count * layout.hosts, sum,
                              Part::scatter);
      },
      [&](int64_t c) {
        const Chunk chunk(cut, c);
        copy(at(out, chunk.first * size), s.slices(c) + layout.host * chunk.count * size, chunk.count * size);
      });
}

void Hierarchy::all_gather(const void* in, void* out, int64_t bytes, const Choice& choice, const Watch& watch) {
  State& s = *state_;
  const HostLayout& layout = s.layout;
  const int64_t all = s.roster.size() * bytes, mine = s.roster.rank * bytes;
  const Sum none{DType::u8, Op::bor, 1};
  if (!layout.regular) {  // adds nothing to everything
    copy(at(out, mine), in, bytes);
    if (bytes) std::memset(out, 0, mine);
    if (bytes) std::memset(at(out, mine + bytes), 0, all - mine - bytes);
    return s.sum(out, out, all, DType::u8, {Op::bor}, choice, -1, watch);
  }
  const Rail rail = s.stages.rail(watch);
  if (s.alone()) {
    copy(at(out, mine), in, bytes);
    return interhost::all_reduce(choice.between, rail, out, all, none, Part::gather);
  }
  const Cut cut(bytes, layout.hosts, 1);
  s.reserve(cut.slice * layout.hosts, 0);
  s.stages.run(
      cut.chunks, watch,
      [&](int64_t c) {
        const Chunk chunk(cut, c);
        copy(s.slices(c) + layout.host * chunk.count, at(in, chunk.first), chunk.count);
      },
      [&](int64_t c, const Rail& rail) {
        interhost::all_reduce(choice.between, rail, s.slices(c), Chunk(cut, c).count * layout.hosts, none,
                              Part::gather);
      },
      [&](int64_t c) {
        const Chunk chunk(cut, c);
        for (int h = 0; h < layout.hosts; ++h)
          host::all_gather(s.shm, s.slices(c) + h * chunk.count, at(out, h * layout.rails * bytes + chunk.first), bytes,
                           chunk.count, watch);
      });
}

void Hierarchy::broadcast(void* data, int64_t bytes, int root, const Watch& watch) {
  State& s = *state_;
  const Rail rail = s.stages.rail(watch);
  const int host = s.host_of(root);
  if (s.alone()) return tree_broadcast(rail, data, bytes, host);
  const bool source = host == s.layout.host;
  const Cut cut(bytes, 1, s.layout.rails);
  s.reserve(cut.slice, cut.slice * cut.parts);
  s.stages.run(
      cut.chunks, watch,
      [&](int64_t c) {
        const Chunk chunk(cut, c);
        if (!source) return;
        host::broadcast(s.shm, at(data, chunk.first), chunk.count, s.local_of(root), watch);
        if (!chunk.whole) copy(s.pad(), at(data, chunk.first), chunk.count);
      },
      [&](int64_t c, const Rail& rail) {
        const Chunk chunk(cut, c);
        char* const from = (chunk.whole ? at(data, chunk.first) : s.pad()) + s.layout.local * chunk.slice;
        tree_broadcast(rail, source ? from : s.slices(c), chunk.slice, host);
      },
      [&](int64_t c) {
        const Chunk chunk(cut, c);
        if (source) return;
        s.share_inside(s.slices(c), chunk.whole ? at(data, chunk.first) : s.pad(), chunk.slice, watch);
        if (!chunk.whole) copy(at(data, chunk.first), s.pad(), chunk.count);
      });
}

void Hierarchy::gather(const void* in, void* out, int64_t bytes, int root, const Watch& watch) {
  State& s = *state_;
  const Rail rail = s.stages.rail(watch);
  if (s.host_of(root) != s.layout.host) {
    s.meet(watch);
    return exchange(rail, {{root, const_cast<void*>(in), bytes}}, {});
  }
  const std::vector<int>& near = s.roster.local();
  std::unique_ptr<char[]> blocks;
  if (root == s.roster.rank) blocks.reset(new char[bytes * near.size()]);
  host::gather(s.shm, in, blocks.get(), bytes, s.local_of(root), watch);
  if (root != s.roster.rank) return;
  for (size_t i = 0; i < near.size(); ++i) copy(at(out, near[i] * bytes), blocks.get() + i * bytes, bytes);
  std::vector<Transfer> transfers;
  for (const Peer& peer : s.roster.peers)
    if (peer.host != s.layout.host) transfers.push_back({peer.rank, at(out, peer.rank * bytes), bytes});
  exchange(rail, {}, transfers);
}

void Hierarchy::scatter(const void* in, void* out, int64_t bytes, int root, const Watch& watch) {
  State& s = *state_;
  const Rail rail = s.stages.rail(watch);
  if (s.host_of(root) != s.layout.host) {
    s.meet(watch);
    return exchange(rail, {}, {{root, out, bytes}});
  }
  const std::vector<int>& near = s.roster.local();
  std::unique_ptr<char[]> blocks;
  if (root == s.roster.rank) {
    std::vector<Transfer> transfers;
    for (const Peer& peer : s.roster.peers)
      if (peer.host != s.layout.host)
        transfers.push_back({peer.rank, const_cast<char*>(at(in, peer.rank * bytes)), bytes});
    exchange(rail, transfers, {});
    blocks.reset(new char[bytes * near.size()]);
    for (size_t i = 0; i < near.size(); ++i) copy(blocks.get() + i * bytes, at(in, near[i] * bytes), bytes);
  }
  host::scatter(s.shm, blocks.get(), out, bytes, s.local_of(root), watch);
}

void Hierarchy::all_to_all(const void* in, const int64_t* in_offsets, const int64_t* in_sizes, void* out,
                           const int64_t* out_offsets, const int64_t* out_sizes, const Watch& watch) {
  State& s = *state_;
  std::vector<int64_t> near[4];
  for (int rank : s.roster.local()) {
    near[0].push_back(in_offsets[rank]);
    near[1].push_back(in_sizes[rank]);
    near[2].push_back(out_offsets[rank]);
    near[3].push_back(out_sizes[rank]);
  }
  host::all_to_all(s.shm, in, near[0].data(), near[1].data(), out, near[2].data(), near[3].data(), watch);
  std::vector<Transfer> transfers, expected;
  for (int i = 1; i < s.roster.size(); ++i) {  // not all begin with the same rank
    const int rank = (s.roster.rank + i) % s.roster.size();
    if (s.host_of(rank) == s.layout.host) continue;
    transfers.push_back({rank, const_cast<char*>(at(in, in_offsets[rank])), in_sizes[rank]});
    expected.push_back({rank, at(out, out_offsets[rank]), out_sizes[rank]});
  }
  exchange(s.stages.rail(watch), transfers, expected);
}

void Hierarchy::carry(int lane, void* data, int64_t count, const Choice& choice, const Watch& watch) {
  State& s = *state_;
  const Call& call = watch.call;
  const Rail rail{s.carriers[lane], watch, s.layout.rail, s.layout.host};
  const Sum sum{call.dtype, call.op, s.roster.size()};
  if (call.kind == Kind::all_reduce) return interhost::all_reduce(choice.between, rail, data, count, sum);
  if (call.kind == Kind::reduce_scatter)
    return interhost::all_reduce(choice.between, rail, data, count, sum, Part::scatter);
  if (call.kind == Kind::all_gather)
    return interhost::all_reduce(choice.between, rail, data, count, {DType::u8, Op::bor, 1}, Part::gather);
  tree_broadcast(rail, data, count, s.host_of(call.root));
}

// All ranks of this host arrive, then each rail waits for all hosts; where ranks have no rail, they wait for those
// here.
void Hierarchy::barrier(const Watch& watch) {
  State& s = *state_;
  s.meet(watch);
  char nothing = 0;
  if (!s.layout.rail.empty()) tree_all_reduce(s.stages.rail(watch), &nothing, 1, {DType::u8, Op::bor, 1});
  if (s.shm.size() > s.layout.rails) s.meet(watch);
}

}  // namespace hfreduce::interhost
