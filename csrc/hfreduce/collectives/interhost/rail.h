// Collectives between hosts: among the ranks of one rail, one on each host, over byte streams. Each algorithm has a
// file that documents its steps and bytes. All work in place, on memory that they may overwrite.
//
// All that a rank sends another in one operation is one message: a header with its call, which the receiver compares
// with its own, and a payload. The algorithms are loops that move what they can on all their streams, and back off when
// nothing moves.
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

// How the ranks are distributed over the hosts.
struct HostLayout {
  explicit HostLayout(const Roster& roster);

  int hosts, host;        // number of hosts, and this rank's
  int size;               // number of ranks on this host
  int rails;              // number of ranks on the smallest host
  int largest;            // number of ranks on the largest host
  int local;              // this rank's index on its host; also its rail, if below `rails`
  bool regular;           // hosts have equally many ranks, and host h has those from h * rails on
  std::vector<int> rail;  // the ranks of this rank's rail, in the order of the roster; empty if it has none
};

// TCP streams to the ranks of other hosts, of `connections` parallel connections each. They are dialed by the sender on
// first use, and kept.
class HostStreams {
 public:
  // lane: streams of different lanes between the same ranks share no connections, so two threads can use them.
  HostStreams(const Roster& roster, Mesh& mesh, int lane, int connections)
      : roster_(roster), mesh_(mesh), lane_(lane), connections_(connections) {}
  // channel: 0 or 1, for two flows of one operation between the same ranks that must not mix. All operations begin on
  // channel 0, so that ranks which called different ones notice.
  Outgoing& to(int rank, int channel, const Watch& watch);
  // nullptr until that rank has dialed.
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
  std::vector<int> ranks;         // group ranks, in the order in which hosts are neighbours
  int index;                      // of this rank among them
  const std::vector<int>& hosts;  // hosts in that order: what belongs to ranks[i] is slice hosts[i] of a message

  int size() const { return static_cast<int>(ranks.size()); }
};

// How partial results are combined. The last addition, which completes the sum, also divides.
struct Sum {
  DType dtype;
  Op op;
  int64_t divisor;  // of avg: the number of ranks on all hosts

  Op partial() const { return op == Op::avg || op == Op::premul_sum ? Op::sum : op; }
  Op last() const { return op == Op::premul_sum ? Op::sum : op; }
};

struct Header {
  Call call;
  int64_t bytes;  // of the payload
};
static_assert(sizeof(Header) == sizeof(Call) + 8);

// A message to a rank, written in order, as far as the stream takes it. The header is sent at once, because the
// receiver may wait for it while this rank waits for another one.
class Sender {
 public:
  Sender(const Rail& rail, int rank, int channel, int64_t bytes);
  int64_t write(const void* data, int64_t bytes);  // returns how many; 0 also while the header is not sent
  bool begun();                                    // whether the header is sent
  void want(Backoff::Wanted& wanted) const;

 private:
  Outgoing& stream_;
  Header header_;
  int rank_;
  size_t sent_ = 0;  // bytes of the header
};

// A message from a rank. Throws Fault::mismatch, naming both, if its call or its size differs.
class Receiver {
 public:
  Receiver(const Rail& rail, int rank, int channel, int64_t bytes)
      : rail_(rail), rank_(rank), channel_(channel), bytes_(bytes) {}
  int64_t read(void* data, int64_t bytes);
  bool begun();  // whether the header has arrived
  void want(Backoff::Wanted& wanted) const;

 private:
  void compare() const;

  const Rail& rail_;
  const int rank_, channel_;
  const int64_t bytes_;
  Incoming* stream_ = nullptr;  // nullptr until the rank has dialed
  Header header_;
  size_t got_ = 0;
};

// Slice i is elements [count * i / n, count * (i + 1) / n).
inline int64_t slice_begin(int64_t count, int i, int n) { return count / n * i + count % n * i / n; }

constexpr int64_t kPiece = 128 << 10;  // bytes added up at a time, so that they are still in a cache

// The halves of an all-reduce. After scatter, every rank has its own slice of the sum; after gather, all slices.
enum class Part : uint8_t { scatter, gather, both };

// By the plan's algorithm. The tree has no halves: they use direct.
void all_reduce(Between how, const Rail& rail, void* data, int64_t count, const Sum& sum, Part part = Part::both);

void ring(const Rail& rail, void* data, int64_t count, const Sum& sum, Part part);
void direct(const Rail& rail, void* data, int64_t count, const Sum& sum, Part part);

// tree.cpp: sums go up to a root, results come down from it.
void tree_all_reduce(const Rail& rail, void* data, int64_t count, const Sum& sum);
void tree_reduce(const Rail& rail, void* data, int64_t count, const Sum& sum, int root);  // root: index in the rail
void tree_broadcast(const Rail& rail, void* data, int64_t bytes, int root);

// Messages between any ranks of different hosts, all at the same time, each directly to its receiver.
struct Transfer {
  int rank;  // in the group
  void* data;
  int64_t bytes;
};
void exchange(const Rail& rail, const std::vector<Transfer>& out, const std::vector<Transfer>& in);

}  // namespace hfreduce::interhost
