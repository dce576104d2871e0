// A communicator: the object through which a group of ranks runs collectives and messages.
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
  std::vector<int> global_ranks;       // by group rank; empty: equal to the group ranks
  std::string name = "default";        // the group's name, for messages
  milliseconds timeout{300000};        // of connecting, and of operations without a timeout of their own
  std::string host_id;                 // ranks with equal ids share memory; "": derived from the machine
  std::string interface;               // "": the one with a route to MASTER_ADDR
  size_t slot_bytes = 256 << 10;       // shared memory per slot, two slots per rank: both fit in an L2 cache
  std::vector<Row> plan;               // rank 0's plan applies to all ranks; empty: the defaults
  std::function<std::string()> where;  // where Python is: see Monitor
  SortHosts sorted;                    // of rank 0
};

constexpr milliseconds kGroupTimeout{-1};  // of an operation: the group's timeout, as in c10d

// An operation that this rank has enqueued on its device.
struct Enqueued {
  Call call;
  uint64_t record = 0;  // id in the recorder
  milliseconds timeout{};
  Deadline deadline;
};

// A received message. If `ticket` is not 0, the payload is on the sender's device and is taken by `take`.
struct Received {
  int from = -1;
  uint64_t ticket = 0;
  Enqueued enqueued{};  // if ticket is not 0: the argument for `ended`
};

// Collectives are called by one thread at a time, in the same order on all ranks; send and recv by any thread. After a
// Fault, every call throws it. Memory is contiguous and on the host. A negative timeout means the group's.
class Communicator {
 public:
  Communicator(Store& store, const Config& config);  // returns when all ranks have connected; then needs no store
  ~Communicator();                                   // calls shutdown()

  int rank() const;
  int size() const;

  void all_reduce(const void* in, void* out, int64_t count, DType, Reduction, milliseconds timeout = kGroupTimeout);
  void reduce(const void* in, void* out, int64_t count, DType, Reduction, int root,
              milliseconds timeout = kGroupTimeout);
  // in: size() blocks of `count` elements. out: one block.
  void reduce_scatter(const void* in, void* out, int64_t count, DType, Reduction, milliseconds timeout = kGroupTimeout);
  // in: `count` elements. out: size() blocks of `count` elements.
  void all_gather(const void* in, void* out, int64_t count, DType, milliseconds timeout = kGroupTimeout);
  void broadcast(void* data, int64_t count, DType, int root, milliseconds timeout = kGroupTimeout);
  void gather(const void* in, void* out, int64_t count, DType, int root, milliseconds timeout = kGroupTimeout);
  void scatter(const void* in, void* out, int64_t count, DType, int root, milliseconds timeout = kGroupTimeout);
  // To and from rank i: counts[i] elements at offsets[i].
  void all_to_all(const void* in, const std::vector<int64_t>& in_offsets, const std::vector<int64_t>& in_counts,
                  void* out, const std::vector<int64_t>& out_offsets, const std::vector<int64_t>& out_counts, DType,
                  milliseconds timeout = kGroupTimeout);
  void barrier(milliseconds timeout = kGroupTimeout);
  void send(const void* data, int64_t count, DType, int to, int tag, milliseconds timeout = kGroupTimeout);
  void recv(void* data, int64_t count, DType, int from, int tag, milliseconds timeout = kGroupTimeout);
  int recv_any(void* data, int64_t count, DType, int tag, milliseconds timeout = kGroupTimeout);

  // Sends a message whose payload stays on the device: only the ticket travels here. `work` transfers the payload and
  // calls `ended`.
  void announce(uint64_t ticket, int64_t count, DType, int to, int tag,
                const std::function<void(const Enqueued&, const Watch&)>& work, milliseconds timeout = kGroupTimeout);
  // Receives a message of either kind. from: -1 for any sender. When it has arrived, either `place` is called for the
  // destination of the payload, or `take` gets the ticket, transfers the payload and calls `ended`. A ticket without
  // `take` is a fault.
  Received receive(const std::function<void*()>& place, const std::function<void(const Received&, const Watch&)>& take,
                   int64_t count, DType, int from, int tag, milliseconds timeout = kGroupTimeout);
  // Checks a message that was taken but has not ended: fails the communicator if its deadline has passed or its sender
  // has left.
  void look(const Enqueued&);

  // For collectives that are only enqueued (cuda/accelerator.h). `enqueue` is called in the order of the other
  // collectives. It numbers the call, publishes it to the ranks of this host and records it. Throws Fault if the
  // communicator has failed, or if a rank of this host has enqueued a different call under this number.
  Enqueued enqueue(Call call, int64_t bytes_in, int64_t bytes_out, milliseconds timeout);
  void ended(const Enqueued&, bool well);
  // These fail the communicator: the deadline has passed; `rank` has called something else; an error occurred.
  void overdue(const Enqueued&);
  void differs(const Enqueued&, int rank);
  void broke(const Enqueued&, const std::string& what);
  // The part between hosts: see gpu::Hosts::carry. What it throws is passed to `broke`, which fails the communicator.
  void carry(const Enqueued&, int lane, void* data, int64_t count);
  void broke(const Enqueued&, std::exception_ptr error);
  // Announces that this rank has no work on a device any more. Returns whether all ranks of the host did so in time.
  bool quiet(milliseconds patience);
  // New shared memory of each rank of this host, by local rank. A collective of these ranks.
  std::vector<Segment> share(size_t bytes, milliseconds timeout = kGroupTimeout);
  // Called by the thread that notices a fault; at once if there already is one. nullptr removes the hook; it does not
  // run after that.
  void on_failure(std::function<void()> hook);

  bool one_host() const;
  interhost::HostLayout layout() const;
  int cores() const;  // of the host
  bool failed() const;
  bool was_shut_down() const;  // by this rank, before anything failed
  void check() const;          // throws the fault, if any
  void check_owner() const;    // throws in a forked child, which cannot use its parent's group
  // Makes all present and later operations of all ranks throw Fault::aborted with this reason.
  void abort(const std::string& reason);
  // Receives whose message has not come throw Dropped, those of the future too; the others go on.
  void drop_receives();
  // Flushes sent messages, says goodbye to the peers, joins all threads, closes everything. Idempotent. Does not throw.
  // why: the exception that caused it, for peers that still need this rank; "" for none.
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
