// What a communicator is made of; for communicator.cpp and enqueue.cpp.
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
  // New memory of each rank of this host; `index` is another one each time.
  std::vector<Segment> share(size_t bytes, int index, Deadline deadline);
  std::vector<Socket> liveness(Deadline deadline);
  void shutdown(const std::string& why);

  // Runs one operation: writes it down, gives it its watch, and turns what goes wrong into the communicator's fault.
  template <class Counter, class Body>
  void run(Call call, Counter& sequence, int64_t bytes_in, int64_t bytes_out, milliseconds timeout, Body body);
  // The same, but its end is left to the body, which is told what to end as well.
  template <class Counter, class Body>
  void start(Call call, Counter& sequence, int64_t bytes_in, int64_t bytes_out, milliseconds timeout, Body body);
  template <class Body>
  void collective(const Call& call, int64_t bytes_in, int64_t bytes_out, milliseconds timeout, Body body);
  Fault overdue(const Call& call, const std::vector<int>& missing, milliseconds timeout);
  Watch::Report report(milliseconds timeout);  // of what is overdue
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
  std::optional<interhost::Hierarchy> hierarchy;  // of several hosts
  std::optional<Messages> messages;
  std::mutex collectives, ending;
  std::vector<std::atomic<uint64_t>> sent, received;  // messages, by the other's rank; of any thread
  std::atomic<uint64_t> any{0};
  uint64_t sequence = 0;
  int shared = 0;
  std::mutex hooking;
  std::function<void()> hook;  // see Communicator::on_failure
  std::atomic<uint64_t> operations{0};
  bool ended = false;
  std::atomic<bool> shut_down{false};
  const int owner = forks();  // a child of a fork has none of the threads, and must leave all as it is
};

template <class Counter, class Body>
void Communicator::State::run(Call call, Counter& sequence, int64_t bytes_in, int64_t bytes_out, milliseconds timeout,
                              Body body) {
  start(call, sequence, bytes_in, bytes_out, timeout, [&](const Watch& watch, const Enqueued& started) {
    body(watch);
    recorder.ended(started.record, true);
  });
}

template <class Counter, class Body>
void Communicator::State::start(Call call, Counter& sequence, int64_t bytes_in, int64_t bytes_out, milliseconds timeout,
                                Body body) {
  check_owner();
  health.check();
  call.sequence = ++sequence;
  operations.fetch_add(1, std::memory_order_relaxed);
  if (timeout < milliseconds(0)) timeout = config.timeout;
  const Watch::Report report = this->report(timeout);
  const Watch watch(health, Clock::now() + timeout, call, report);
  const uint64_t id = recorder.scheduled(call, bytes_in, bytes_out);
  recorder.started(id);
  try {
    body(watch, {call, id, timeout, watch.deadline});
  } catch (const Fault& fault) {
    recorder.ended(id, false);
    health.fail(fault);
    health.check();
  } catch (const std::exception& error) {
    recorder.ended(id, false);
    health.fail(Fault(Fault::Cause::aborted, {config.rank},
                      roster.me().name() + " failed in " + told(call) + ": " + error.what()));
    health.check();
  }
}

template <class Body>
void Communicator::State::collective(const Call& call, int64_t bytes_in, int64_t bytes_out, milliseconds timeout,
                                     Body body) {
  std::lock_guard lock(collectives);
  run(call, sequence, bytes_in, bytes_out, timeout, [&](const Watch& watch) {
    shm->begin(watch.call);
    body(watch);
  });
}

}  // namespace hfreduce
