// The defaults, for 1 to 8 ranks on each of 1 to 1024 hosts, and the choice of a row.
//
// Inside a host, one-shot has half the steps of two-shot, but each of n ranks reads n messages. It is faster while
// steps cost more than bytes, and always for two ranks. Chunks are sized so that a rank's slots, its input and its
// output fit in an L2 cache.
//
// Between h hosts, each algorithm sends about 2 N bytes per host for an all-reduce of N. `direct` has 2 steps but a
// connection to every host: for few hosts. `ring` has 2 (h - 1) steps of N / h bytes and saturates every link: for
// steps large enough to amortize their latency. `tree` has about 2 log2(h) steps and sends h / (h - 1) times the bytes
// of the others.
#include "plan.h"

#include <algorithm>
#include <limits>
#include <stdexcept>

namespace hfreduce {

namespace {

constexpr int64_t kOneShot = 256 << 10;       // bytes that a rank reads from slots at most, for three or more ranks
constexpr int64_t kOneShotChunk = 64 << 10;   // bytes
constexpr int64_t kTwoShotChunk = 256 << 10;  // bytes
constexpr int kFewHosts = 8;                  // up to which every host connects to every other
// Limits of the ring for all_reduce: message bytes per host from which chunks (an eighth of a message,
// interhost/stages.h) are large enough, and number of hosts.
constexpr int64_t kRingSlice = 512 << 10;
constexpr int kRingHosts = 64;
constexpr int64_t kOneStream = 1 << 20;  // message bytes that one connection carries fast enough
constexpr int kStreams = 2, kMaxStreams = 64;
constexpr int64_t kAnyBytes = std::numeric_limits<int64_t>::max();
constexpr Kind kLastKind = Kind::recv;

Between between(Kind kind, int64_t bytes, int hosts) {
  if (kind == Kind::reduce || kind == Kind::broadcast || kind == Kind::barrier) return Between::tree;
  const bool ordered = kind == Kind::all_reduce || kind == Kind::reduce_scatter || kind == Kind::all_gather;
  if (hosts <= kFewHosts || !ordered) return Between::direct;
  const bool long_steps = hosts <= kRingHosts && bytes > kRingSlice * hosts;
  return kind == Kind::all_reduce && !long_steps ? Between::tree : Between::ring;
}

int64_t one_shot_bytes(int ranks) { return ranks <= 2 ? kAnyBytes : kOneShot / ranks; }

// `between` must be equal on all hosts, so it must not depend on the ranks or cores of this host.
Choice choice(Kind kind, int64_t bytes, const Shape& shape, size_t slot_bytes) {
  Choice chosen;
  chosen.inside =
      kind == Kind::all_reduce && bytes <= one_shot_bytes(shape.local_size) ? Inside::one_shot : Inside::two_shot;
  chosen.between = between(kind, bytes, shape.hosts);
  chosen.chunk = std::min<int64_t>(chosen.inside == Inside::one_shot ? kOneShotChunk : kTwoShotChunk, slot_bytes);
  chosen.streams = bytes <= kOneStream ? 1 : kStreams;
  return chosen;
}

bool equal(const Choice& a, const Choice& b) {
  return a.inside == b.inside && a.between == b.between && a.chunk == b.chunk && a.streams == b.streams;
}

// One row for each range of sizes with the same choice.
void add_defaults(std::vector<Row>& rows, Kind kind, const Shape& shape, size_t slot_bytes) {
  std::vector<int64_t> ends = {one_shot_bytes(shape.local_size), kOneStream, kRingSlice * shape.hosts, kAnyBytes};
  std::sort(ends.begin(), ends.end());
  const size_t before = rows.size();
  for (int64_t end : ends) {
    const Row row{kind, end, choice(kind, end, shape, slot_bytes)};
    if (rows.size() > before && equal(rows.back().choice, row.choice)) rows.pop_back();
    rows.push_back(row);
  }
}

void check(const Row& row, size_t slot_bytes) {
  const Choice& c = row.choice;
  const auto refuse = [&](const std::string& what) {
    throw std::invalid_argument("hfreduce: a row of the plan, for " +
                                (row.kind <= kLastKind ? std::string(name(row.kind)) : "no known kind") + " up to " +
                                std::to_string(row.max_bytes) + " bytes, " + what +
                                "; measure anew with python -m hfreduce.tune, or remove it");
  };
  if (row.kind > kLastKind || row.max_bytes < 0) refuse("is none: its kind must be known, its size not negative");
  if (c.inside > Inside::two_shot || c.between > Between::tree) refuse("names an algorithm that there is not");
  if (c.chunk < 64 || c.chunk > static_cast<int64_t>(slot_bytes))
    refuse("has a chunk of " + std::to_string(c.chunk) + " bytes; a slot has " + std::to_string(slot_bytes) +
           ", and a chunk 64 or more of them");
  if (c.streams < 1 || c.streams > kMaxStreams)
    refuse("has " + std::to_string(c.streams) + " streams; there may be 1 to " + std::to_string(kMaxStreams));
}

}  // namespace

Plan::Plan(const Shape& shape, size_t slot_bytes, std::vector<Row> rows) : rows_(std::move(rows)) {
  for (const Row& row : rows_) check(row, slot_bytes);
  for (int kind = 0; kind <= static_cast<int>(kLastKind); ++kind)
    add_defaults(rows_, static_cast<Kind>(kind), shape, slot_bytes);
}

Choice Plan::choose(Kind kind, int64_t bytes) const {
  const auto fits = [&](const Row& row) { return row.kind == kind && bytes <= row.max_bytes; };
  return std::find_if(rows_.begin(), rows_.end(), fits)->choice;  // the defaults cover every size
}

Choice Plan::choose(const Call& call, int ranks) const {
  const bool blocks = call.kind == Kind::reduce_scatter || call.kind == Kind::all_gather;
  Choice choice = choose(call.kind, call.count * size_of(call.dtype) * (blocks ? ranks : 1));
  const bool small = call.dtype == DType::e4m3 || call.dtype == DType::e5m2;
  if (small && call.kind != Kind::all_gather) choice.between = Between::direct;
  return choice;
}

std::vector<Row> rows_of(const std::vector<RowTuple>& tuples) {
  // A value that does not fit into a byte must not wrap to a valid one.
  const auto byte = [](int number) { return static_cast<uint8_t>(number < 0 || number > 255 ? 255 : number); };
  std::vector<Row> rows;
  for (const auto& [kind, max_bytes, inside, between, chunk, streams] : tuples)
    rows.push_back({static_cast<Kind>(byte(kind)),
                    max_bytes,
                    {static_cast<Inside>(byte(inside)), static_cast<Between>(byte(between)), chunk, streams}});
  return rows;
}

const char* name(Inside inside) { return inside == Inside::one_shot ? "one_shot" : "two_shot"; }

const char* name(Between between) {
  return between == Between::direct ? "direct" : between == Between::ring ? "ring" : "tree";
}

}  // namespace hfreduce
