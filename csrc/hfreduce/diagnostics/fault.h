// Faults: errors with messages that tell the user who failed, in what, and where.
#pragma once

#include <atomic>
#include <condition_variable>
#include <functional>
#include <map>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "types.h"

namespace hfreduce {

// The communicator can no longer be used. The message names global ranks, hosts and operations.
class Fault : public std::runtime_error {
 public:
  enum class Cause { died, timeout, mismatch, aborted, left, broken };  // broken: a connection failed, the peer lives

  Fault(Cause cause, std::vector<int> ranks, const std::string& message)
      : std::runtime_error(message), cause(cause), ranks(std::move(ranks)) {}

  Cause cause;
  std::vector<int> ranks;  // group ranks at fault
};

// A receive whose message has not come is given up, because this rank leaves the group. It fails that operation alone.
class Dropped : public Fault {
 public:
  Dropped(int rank, const std::string& name)
      : Fault(Cause::aborted, {rank}, "recv: " + name + " has shut down the group before a message came.") {}
};

// Whether a communicator still works; shared by all its threads. The first fault is kept, later ones are dropped.
class Health {
 public:
  bool failed() const { return failed_.load(std::memory_order_acquire); }

  // Makes all later checks throw this fault. Returns whether it was the first. If so, `on_failure` has run: it wakes
  // sleepers, and tells the peers unless the fault came from one of them.
  //
  // Every operation catches its Fault, calls `fail`, and then `check`, which throws the fault that was kept. A broken
  // connection (Fault::broken) is often the first sign of a death elsewhere: `fail` waits up to 0.5 s for the monitor
  // or a peer to explain it, and records it only if none does. Streams just throw.
  bool fail(const Fault& fault, bool from_peer = false);

  // Throws the fault, if any.
  void check() const;

  // A peer has said goodbye. That is no fault by itself, but an operation that still needs the peer fails with `fault`.
  void left(int rank, const Fault& fault);

  // The fault for ranks that are waited for in vain, because all of them have left. They must have left some time ago:
  // what a peer sent before its goodbye may still be in flight.
  std::optional<Fault> all_left(const std::vector<int>& ranks) const;

  std::function<void(const Fault&, bool from_peer)> on_failure;
  std::atomic<bool> dropping{false};  // whether receives throw Dropped, see Communicator::drop_receives

 private:
  struct Leaver {
    Fault fault;
    Clock::time_point since;
  };

  bool record(const Fault& fault, bool from_peer);
  void wait_for_explanation(const std::vector<int>& ranks);

  std::atomic<bool> failed_{false}, leavers_exist_{false};
  mutable std::mutex mutex_;
  std::condition_variable recorded_;
  std::vector<Fault> fault_;  // empty, or one
  std::map<int, Leaver> leavers_;
};

// The deadline and health of one operation. Every wait checks it from time to time.
class Watch {
 public:
  using Report = std::function<Fault(const Call&, const std::vector<int>& missing)>;

  // report: makes the fault of a timeout, for which it asks the peers where they are.
  Watch(Health& health, Deadline deadline, const Call& call, const Report& report)
      : health(health), deadline(deadline), call(call), report_(report) {}

  // Throws if the communicator has failed, or if `missing` (group ranks that are waited for) have all left, or if the
  // deadline has passed. `missing` may name too many ranks, not too few. Costs two loads and a clock read.
  void check(const std::vector<int>& missing) const;

  Health& health;
  const Deadline deadline;
  const Call call;

 private:
  const Report& report_;
};

std::string told(const Call& call);  // "all_reduce number 7 of 1024 float32, sum"

// calls[i] is the call of rank ranks[i], named names[i]. At fault are the ranks outside the largest group that agrees
// (among equally large ones, the one with the lowest rank). Equal arguments give equal messages.
Fault mismatch(const std::vector<int>& ranks, const std::vector<std::string>& names, const std::vector<Call>& calls);

}  // namespace hfreduce
