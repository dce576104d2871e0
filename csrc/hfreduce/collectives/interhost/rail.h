// Collectives between hosts: among the ranks of one rail, one on each host, over byte streams. One algorithm a file,
// its steps and bytes told there. All work in place, on memory that is theirs to overwrite.
//
// Everything a rank sends another in one operation is one message: a header with its call, which the receiver compares
// with its own, and bytes. The algorithms are loops that move what can be moved on all their streams, and rest when
// nothing can.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "bootstrap/mesh.h"
#include "plan.h"
#include "transport/stream.h"
#include "types.h"

namespace hfreduce::interhost {

// How the ranks lie on the hosts.
struct HostLayout {
  explicit HostLayout(const Roster& roster);

  int hosts, host;        // how many, and this rank's
  int size;               // ranks of this host
  int rails;              // as many as the smallest host has ranks
  int largest;            // ranks of the largest host
  int local;              // this rank among those of its host, and its rail where it is below `rails`
  bool regular;           // hosts have equally many ranks, host h those from h * rails on
  std::vector<int> rail;  // the ranks of this rank's rail, by host; empty when it has none
};

// TCP streams to the ranks of other hosts, made by whoever sends when first asked for, and kept; of so many connections
// side by side.
class HostStreams {
 public:
  // lane: two of different lanes between the same ranks, for two threads, share no connections.
  HostStreams(const Roster& roster, Mesh& mesh, int lane, int connections)
      : roster_(roster), mesh_(mesh), lane_(lane), connections_(connections) {}
  // channel: 0 or 1, for two flows of one operation between the same ranks that must not mix. What is sent first is on
  // channel 0 whatever the operation, so that ranks which called different ones find out.
  Outgoing& to(int rank, int channel, const Watch& watch);
  // nullptr while that rank has not dialed.
  Incoming* from(int rank, int channel, const Watch& watch);
  const Roster& roster() const { return roster_; }

 private:
  int index(int channel, int connection) const { return (lane_ * 2 + channel) * connections_ + connection; }

  using Key = std::pair<int, int>;  // rank, channel
  const Roster& roster_;
  Mesh& mesh_;
  const int lane_, connections_;
  std::map<Key, std::unique_ptr<Outgoing>> outgoing_;
  std::map<Key, std::unique_ptr<Incoming>> incoming_;
};

// One operation on one rail.
struct Rail {
  HostStreams& streams;
  const Watch& watch;
  std::vector<int> ranks;  // group ranks, by host
  int index;               // of this rank among them

  int size() const { return static_cast<int>(ranks.size()); }
};

// How partial results are added up on their way; the last one, which adds the last of all inputs, also divides.
struct Sum {
  DType dtype;
  Op op;
  int64_t divisor;  // of avg: all ranks of all hosts

  Op partial() const { return op == Op::avg || op == Op::premul_sum ? Op::sum : op; }
  Op last() const { return op == Op::premul_sum ? Op::sum : op; }
};

struct Header {
  Call call;
  int64_t bytes;  // that follow
};
static_assert(sizeof(Header) == sizeof(Call) + 8);

// A message to a rank: takes its bytes in order, as far as the stream does. The header leaves at once, for the receiver
// may wait for it while this rank waits for another.
class Sender {
 public:
  Sender(const Rail& rail, int rank, int channel, int64_t bytes);
  int64_t write(const void* data, int64_t bytes);  // says how many; 0 too while the header has not left
  bool begun();                                    // whether the header has left
  void want(Backoff::Wanted& wanted) const;

 private:
  Outgoing& stream_;
  Header header_;
  int rank_;
  size_t sent_ = 0;  // of the header
};

// A message from a rank. Throws Fault::mismatch that names both when its call is another, or its bytes are.
class Receiver {
 public:
  Receiver(const Rail& rail, int rank, int channel, int64_t bytes)
      : rail_(rail), rank_(rank), channel_(channel), bytes_(bytes) {}
  int64_t read(void* data, int64_t bytes);
  bool begun();  // whether the header has come
  void want(Backoff::Wanted& wanted) const;

 private:
  void compare() const;

  const Rail& rail_;
  const int rank_, channel_;
  const int64_t bytes_;
  Incoming* stream_ = nullptr;  // until the rank has dialed
  Header header_;
  size_t got_ = 0;
};

// Elements [count * i / n, count * (i + 1) / n) are slice i.
inline int64_t slice_begin(int64_t count, int i, int n) { return count / n * i + count % n * i / n; }

constexpr int64_t kPiece = 128 << 10;  // bytes added up at a time, so that they are in a cache when they are

// Halves of an all-reduce: every rank has its own slice of the sum; every rank has all slices.
enum class Part : uint8_t { scatter, gather, both };

// By the algorithm that the plan chose. There is no tree for a half: it goes directly.
void all_reduce(Between how, const Rail& rail, void* data, int64_t count, const Sum& sum, Part part = Part::both);

void ring(const Rail& rail, void* data, int64_t count, const Sum& sum, Part part);
void direct(const Rail& rail, void* data, int64_t count, const Sum& sum, Part part);

// tree.cpp: sums go up to a root, and results come down from it.
void tree_all_reduce(const Rail& rail, void* data, int64_t count, const Sum& sum);
void tree_reduce(const Rail& rail, void* data, int64_t count, const Sum& sum, int root);  // root: index in the rail
void tree_broadcast(const Rail& rail, void* data, int64_t bytes, int root);

// Any messages between any ranks of different hosts, all at the same time, each straight to its receiver.
struct Transfer {
  int rank;  // in the group
  void* data;
  int64_t bytes;
};
void exchange(const Rail& rail, const std::vector<Transfer>& out, const std::vector<Transfer>& in);

}  // namespace hfreduce::interhost
