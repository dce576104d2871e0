// What goes wrong, said so that a person can act on it: who, what, where.
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

// The communicator is of no more use. The message names global ranks, hosts and operations.
class Fault : public std::runtime_error {
 public:
  enum class Cause { died, timeout, mismatch, aborted, left, broken };  // broken: a connection failed, the peer lives

  Fault(Cause cause, std::vector<int> ranks, const std::string& message)
      : std::runtime_error(message), cause(cause), ranks(std::move(ranks)) {}

  Cause cause;
  std::vector<int> ranks;  // group ranks of the culprits
};

// Whether a communicator still works; shared by all its threads. The first fault stays, later ones are dropped.
class Health {
 public:
  bool failed() const { return failed_.load(std::memory_order_acquire); }

  // Makes every later check throw this fault. Returns whether it was the first; then `on_failure` has run: it wakes
  // whoever sleeps, and tells the peers unless the fault came from one of them.
  //
  // Whoever calls an operation catches its Fault, calls `fail` and then `check`, which throws the fault that stayed.
  // A connection that broke (Fault::broken) is often only how a death elsewhere shows first: `fail` waits up to half a
  // second for the monitor, or a peer, to explain it, and records it only when nobody does. Streams just throw.
  bool fail(const Fault& fault, bool from_peer = false);

  // Throws the fault, if there is one.
  void check() const;

  // A peer has said goodbye, which is no fault by itself: it becomes this one for an operation that still needs the
  // peer.
  void left(int rank, const Fault& fault);

  // The fault of ranks that are waited for in vain, because all of them have left: some time ago, for what a peer sent
  // before its goodbye may still be on its way to the reader.
  std::optional<Fault> all_left(const std::vector<int>& ranks) const;

  std::function<void(const Fault&, bool from_peer)> on_failure;

 private:
  struct Leaver {
    Fault fault;
    Clock::time_point since;
  };

  bool record(const Fault& fault, bool from_peer);
  void wait_for_explanation();

  std::atomic<bool> failed_{false}, leavers_exist_{false};
  mutable std::mutex mutex_;
  std::condition_variable recorded_;
  std::vector<Fault> fault_;  // none or one
  std::map<int, Leaver> leavers_;
};

// One operation's patience: what every wait asks now and then.
class Watch {
 public:
  using Report = std::function<Fault(const Call&, const std::vector<int>& missing)>;

  // report makes the fault of a timeout: it asks the peers where they stand.
  Watch(Health& health, Deadline deadline, const Call& call, const Report& report)
      : health(health), deadline(deadline), call(call), report_(report) {}

  // Throws when the communicator has failed, or the deadline has passed while the ranks `missing` were waited for
  // (group ranks), or all of them have left. `missing` may name too many, not too few. Costs two loads and a clock.
  void check(const std::vector<int>& missing) const;

  Health& health;
  const Deadline deadline;
  const Call call;

 private:
  const Report& report_;
};

std::string told(const Call& call);  // "all_reduce number 7 of 1024 float32, sum"

// calls[i] is what rank ranks[i], called names[i], asked for. The culprits are the ranks outside the largest group that
// agrees (the one with the lowest rank among equally large ones). The same message wherever the same is given.
Fault mismatch(const std::vector<int>& ranks, const std::vector<std::string>& names, const std::vector<Call>& calls);

}  // namespace hfreduce
