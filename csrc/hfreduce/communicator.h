// A group of ranks that compute together: everything else in this folder is a part of it.
#pragma once

#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "bootstrap/roster.h"
#include "diagnostics/fault.h"
#include "plan.h"
#include "transport/segment.h"
#include "types.h"

namespace hfreduce {

namespace interhost {
struct HostLayout;
}

struct Config {
  int rank = 0, size = 1;
  std::vector<int> global_ranks;       // by group rank; empty: the same
  std::string name = "default";        // of the group, for messages
  milliseconds timeout{300000};        // of connecting, and of operations that name none
  std::string host_id;                 // "" for the machine's own: two ranks share memory when it is equal
  std::string interface;               // "" for the one with a route
  size_t slot_bytes = 256 << 10;       // of shared memory, two of them a rank: they stay in a second-level cache
  std::vector<Row> plan;               // rank 0's is everybody's; empty: the defaults
  std::function<std::string()> where;  // what Python is doing: see Monitor
};

constexpr milliseconds kGroupTimeout{-1};  // of an operation: the group's, as c10d says it

// What this rank has enqueued on its device.
struct Enqueued {
  Call call;
  uint64_t record = 0;  // of the recorder
  milliseconds timeout{};
  Deadline deadline;
};

// A message that has come: its bytes do not where it has a ticket, which is not 0.
struct Received {
  int from = -1;
  uint64_t ticket = 0;
  Enqueued enqueued{};  // with a ticket: what `ended` is to be told
};

// Collectives are called by one thread at a time, in the same order by all ranks; send and recv by any thread. Each
// throws Fault; after one, all do. Memory is contiguous and on the host. A negative timeout is the group's.
class Communicator {
 public:
  Communicator(Store& store, const Config& config);  // returns when all ranks have met; the store is not used later
  ~Communicator();                                   // as shutdown()

  int rank() const;
  int size() const;

  void all_reduce(const void* in, void* out, int64_t count, DType, Reduction, milliseconds timeout = kGroupTimeout);
  void reduce(const void* in, void* out, int64_t count, DType, Reduction, int root,
              milliseconds timeout = kGroupTimeout);
  // in: size() blocks of `count` elements. out: one.
  void reduce_scatter(const void* in, void* out, int64_t count, DType, Reduction, milliseconds timeout = kGroupTimeout);
  // in: `count` elements; out: size() blocks of them.
  void all_gather(const void* in, void* out, int64_t count, DType, milliseconds timeout = kGroupTimeout);
  void broadcast(void* data, int64_t count, DType, int root, milliseconds timeout = kGroupTimeout);
  void gather(const void* in, void* out, int64_t count, DType, int root, milliseconds timeout = kGroupTimeout);
  void scatter(const void* in, void* out, int64_t count, DType, int root, milliseconds timeout = kGroupTimeout);
  // Elements for, and from, each rank: counts[i] of them at offsets[i].
  void all_to_all(const void* in, const std::vector<int64_t>& in_offsets, const std::vector<int64_t>& in_counts,
                  void* out, const std::vector<int64_t>& out_offsets, const std::vector<int64_t>& out_counts, DType,
                  milliseconds timeout = kGroupTimeout);
  void barrier(milliseconds timeout = kGroupTimeout);
  void send(const void* data, int64_t count, DType, int to, int tag, milliseconds timeout = kGroupTimeout);
  void recv(void* data, int64_t count, DType, int from, int tag, milliseconds timeout = kGroupTimeout);
  int recv_any(void* data, int64_t count, DType, int tag, milliseconds timeout = kGroupTimeout);

  // Messages whose bytes go another way: all that the sender sends here is a ticket, and `work` sees to the bytes, and
  // to the end of what it is given.
  void announce(uint64_t ticket, int64_t count, DType, int to, int tag,
                const std::function<void(const Enqueued&, const Watch&)>& work, milliseconds timeout = kGroupTimeout);
  // Takes messages that go either way; from: -1 for whoever has sent one. When it has come, `place` is asked where its
  // bytes are to go, or `take` is given its ticket, and sees to the bytes and to its end; without `take` that is a
  // fault.
  Received receive(const std::function<void*()>& place, const std::function<void(const Received&, const Watch&)>& take,
                   int64_t count, DType, int from, int tag, milliseconds timeout = kGroupTimeout);
  // Of a message that was taken and has not ended: fails the communicator when its time is over, or its sender has
  // left.
  void look(const Enqueued&);

  // For collectives that are only enqueued (cuda/accelerator.h). enqueue: called in the order of the other collectives;
  // numbers the call among them, shows it to the ranks of this host, and writes it down. Throws Fault when the
  // communicator has failed, or when a rank of this host has enqueued something else under this number.
  Enqueued enqueue(Call call, int64_t bytes_in, int64_t bytes_out, milliseconds timeout);
  void ended(const Enqueued&, bool well);
  // These fail the communicator: the deadline has passed; `rank` has called something else; something broke.
  void overdue(const Enqueued&);
  void differs(const Enqueued&, int rank);
  void broke(const Enqueued&, const std::string& what);
  // What it does between hosts: see gpu::Hosts::carry. It throws what is then for `broke`, which fails the
  // communicator.
  void carry(const Enqueued&, int lane, void* data, int64_t count);
  void broke(const Enqueued&, std::exception_ptr error);
  // Says that nothing of this rank runs on a device any more; whether all ranks of the host have said so in time.
  bool quiet(milliseconds patience);
  // New shared memory of each rank of this host, by local rank. A collective of these ranks.
  std::vector<Segment> share(size_t bytes, milliseconds timeout = kGroupTimeout);
  // Called by whichever thread notices a fault; at once where there is one. None: nullptr, and then it does not run any
  // more.
  void on_failure(std::function<void()> hook);

  bool one_host() const;
  interhost::HostLayout layout() const;
  int cores() const;  // of the host
  bool failed() const;
  bool was_shut_down() const;  // by this rank, before anything failed
  void check() const;          // throws the fault, if there is one
  void check_owner() const;    // throws in a forked child, which cannot use its parent's group
  // Every operation, present and later, of every rank, throws Fault::aborted with this reason.
  void abort(const std::string& reason);
  // Lets what was sent go out, says goodbye, joins all threads, closes everything; idempotent. Throws nothing. why: the
  // exception that has brought it about, which who still needs this rank is then told; "" for none.
  void shutdown(const std::string& why = "");

  std::string describe() const;  // hosts, ranks, interface, connections: one line
  std::string record() const;    // the flight recorder's JSON
  const Plan& plan() const;
  uint64_t operations() const;  // collectives and messages begun by this rank

 private:
  struct State;
  class OperationScope;
  std::unique_ptr<State> state_;
};

}  // namespace hfreduce
