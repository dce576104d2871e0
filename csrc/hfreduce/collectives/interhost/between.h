// Collectives between hosts: among the ranks of one rail, one on each host, over byte streams. One algorithm a file,
// its steps and bytes told there. All work in place, on memory that is theirs to overwrite.
//
// Everything a rank sends another in one operation is one message: a header with its call, which the receiver compares
// with its own, and bytes. The algorithms are loops that move what can be moved on all their streams, and rest when
// nothing can.
#pragma once

#include <cstdint>
#include <vector>

#include "plan.h"
#include "transport/stream.h"
#include "types.h"

namespace hfreduce::between {

// Where streams come from: made when first asked for, and kept.
class Links {
 public:
  virtual ~Links() = default;
  // channel: 0 or 1, for two flows of one operation between the same ranks that must not mix. What is sent first is on
  // channel 0 whatever the operation, so that ranks which called different ones find out.
  virtual Outgoing& to(int rank, int channel, const Watch& watch) = 0;
  // nullptr while that rank has not dialed.
  virtual Incoming* from(int rank, int channel, const Watch& watch) = 0;
  virtual std::string name(int rank) const = 0;
  virtual int rank() const = 0;  // this one, in the group
};

// One operation on one rail.
struct Rail {
  Links& links;
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
void all_reduce(Between how, const Rail& rail, void* data, int64_t count, const Sum& sum);
void half(Between how, const Rail& rail, void* data, int64_t count, const Sum& sum, Part part);

void ring(const Rail& rail, void* data, int64_t count, const Sum& sum, Part part);
void direct(const Rail& rail, void* data, int64_t count, const Sum& sum, Part part);

// tree.cpp: sums go up to a root, and results come down from it.
void tree_all_reduce(const Rail& rail, void* data, int64_t count, const Sum& sum);
void tree_reduce(const Rail& rail, void* data, int64_t count, const Sum& sum, int root);  // root: index in the rail
void tree_broadcast(const Rail& rail, void* data, int64_t bytes, int root);

// exchange.cpp: any messages between any ranks, all at once.
struct Parcel {
  int rank;  // in the group
  void* data;
  int64_t bytes;
};
void exchange(const Rail& rail, const std::vector<Parcel>& out, const std::vector<Parcel>& in);

}  // namespace hfreduce::between
