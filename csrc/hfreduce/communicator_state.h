// The members of a communicator, for communicator.cpp and enqueue.cpp.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "bootstrap/mesh.h"
#include "bootstrap/roster.h"
#include "collectives/host/shm_group.h"
#include "collectives/interhost/hierarchy.h"
#include "communicator.h"
#include "diagnostics/monitor.h"
#include "diagnostics/recorder.h"
#include "transport/messages.h"
#include "transport/socket.h"

namespace hfreduce {

struct Communicator::State {
  State(Store& store, const Config& given);
  ~State() { shutdown(""); }

  Roster meet(Store& store, Deadline deadline);
  std::vector<Row> agree(Store& store, Deadline deadline);
  // New memory of each rank of this host. `index` differs in every call.
  std::vector<Segment> share(size_t bytes, int index, Deadline deadline);
  std::vector<Socket> liveness(Deadline deadline);
  void shutdown(const std::string& why);

  // Every operation begins here: checks that it may run, and numbers it.
  template <class Counter>
  Call begun(Call call, Counter& counter) {
    check_owner();
    health.check();
    call.sequence = ++counter;
    operations.fetch_add(1, std::memory_order_relaxed);
    return call;
  }
  milliseconds patience(milliseconds timeout) const { return timeout < milliseconds(0) ? config.timeout : timeout; }
  Fault overdue(const Call& call, const std::vector<int>& missing, milliseconds timeout);
  Watch::Report report(milliseconds timeout);  // for operations past their deadline
  void check_owner() const;
  void check_root(const char* what, int rank) const;
  void check_op(DType dtype, Reduction reduction) const;

  Config config;
  Health health;
  Recorder recorder;
  Mesh mesh;
  Roster roster;
  std::optional<Plan> plan;
  std::optional<ShmGroup> shm;
  std::unique_ptr<Monitor> monitor;
  std::optional<interhost::Hierarchy> hierarchy;  // if there are several hosts
  std::optional<Messages> messages;
  std::mutex collectives, ending;
  std::vector<std::atomic<uint64_t>> sent, received;  // message counts, by peer rank; used by any thread
  std::atomic<uint64_t> any{0};
  uint64_t sequence = 0;
  int shared = 0;
  std::mutex hooking;
  std::function<void()> hook;  // see Communicator::on_failure
  std::atomic<uint64_t> operations{0};
  bool ended = false;
  std::atomic<bool> shut_down{false};
  const int owner = forks();  // a forked child has none of the threads and must not touch anything
};

// An operation from call to end: it is numbered and recorded, its path is chosen, and its waits use `watch`. If the
// body throws, the caller calls `failed` in the handler.
class Communicator::OperationScope {
 public:
  // A collective: runs after earlier ones. The ranks of the host compare their calls at its first step.
  OperationScope(State& s, const Call& call, int64_t bytes_in, int64_t bytes_out, milliseconds timeout)
      : OperationScope(s, std::unique_lock(s.collectives), call, s.sequence, bytes_in, bytes_out, timeout) {
    s.shm->begin(watch.call);
  }
  // A message, numbered by `counter`.
  OperationScope(State& s, const Call& call, std::atomic<uint64_t>& counter, int64_t bytes_in, int64_t bytes_out,
                 milliseconds timeout)
      : OperationScope(s, std::unique_lock<std::mutex>(), call, counter, bytes_in, bytes_out, timeout) {}
  ~OperationScope() {
    if (open_) state_.recorder.ended(record_, true);
  }
  OperationScope(const OperationScope&) = delete;

  // Makes the current exception the communicator's fault, unless there already is one, and throws the fault.
  [[noreturn]] void failed();
  // Transfers the duty to end the operation to the caller.
  Enqueued leave() {
    open_ = false;
    return {watch.call, record_, timeout_, watch.deadline};
  }

 private:
  template <class Counter>
  OperationScope(State& s, std::unique_lock<std::mutex> turn, const Call& call, Counter& counter, int64_t bytes_in,
                 int64_t bytes_out, milliseconds timeout)
      : state_(s),
        turn_(std::move(turn)),
        timeout_(s.patience(timeout)),
        report_(s.report(timeout_)),
        watch(s.health, Clock::now() + timeout_, s.begun(call, counter), report_),
        choice(s.plan->choose(watch.call, s.config.size)),
        record_(s.recorder.begun(watch.call, bytes_in, bytes_out)) {}

  State& state_;
  std::unique_lock<std::mutex> turn_;
  const milliseconds timeout_;
  const Watch::Report report_;

 public:
  const Watch watch;
  const Choice choice;

 private:
  const uint64_t record_;
  bool open_ = true;
};

}  // namespace hfreduce
