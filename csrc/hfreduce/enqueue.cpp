// Enqueued collectives: numbering, comparison between ranks, faults.
//
// Their calls are in shared memory, next to those of the host collectives. A rank that enqueues compares its call with
// the calls that others have enqueued under the same number. If two ranks differ, the later one notices, unless the
// other is more than ShmGroup::kEnqueued calls ahead.
#include <algorithm>
#include <thread>

#include "collectives/interhost/rail.h"
#include "communicator_state.h"

namespace hfreduce {

namespace {

// Names all ranks of the host that have enqueued under this number, this rank included.
Fault differing(const Roster& roster, const ShmGroup& shm, const Call& call, int unknown) {
  std::vector<int> ranks;
  std::vector<std::string> names;
  std::vector<Call> calls;
  for (int i = 0; i < shm.size(); ++i) {
    const auto theirs = shm.noted(i, call.sequence);
    if (!theirs) continue;
    ranks.push_back(shm.ranks()[i]), names.push_back(shm.name(i)), calls.push_back(*theirs);
  }
  const bool told = std::any_of(calls.begin(), calls.end(), [&](const Call& other) { return !same(other, call); });
  if (told) return mismatch(ranks, names, calls);
  return Fault(Fault::Cause::mismatch, {unknown},
               "ranks called different collectives: " + roster.me().name() + " " + hfreduce::told(call) + ", " +
                   roster.peers[unknown].name() +
                   " something else.\nEvery rank must call the same collectives, with the same dtype and number of "
                   "elements, in the same order.");
}

}  // namespace

Fault Communicator::State::overdue(const Call& call, const std::vector<int>& missing, milliseconds timeout) {
  return timed_out(roster, call, missing, monitor->ask(milliseconds(1000)), timeout);
}

Watch::Report Communicator::State::report(milliseconds timeout) {
  return [this, timeout](const Call& call, const std::vector<int>& missing) { return overdue(call, missing, timeout); };
}

Enqueued Communicator::enqueue(Call call, int64_t bytes_in, int64_t bytes_out, milliseconds timeout) {
  State& s = *state_;
  std::lock_guard lock(s.collectives);
  call = s.begun(call, s.sequence);
  timeout = s.patience(timeout);
  s.shm->note(call);
  for (int i = 0; i < s.shm->size(); ++i) {
    const auto theirs = s.shm->noted(i, call.sequence);
    if (theirs && !same(*theirs, call)) s.health.fail(differing(s.roster, *s.shm, call, s.shm->ranks()[i]));
  }
  s.health.check();
  return {call, s.recorder.begun(call, bytes_in, bytes_out), timeout, Clock::now() + timeout};
}

void Communicator::ended(const Enqueued& enqueued, bool well) { state_->recorder.ended(enqueued.record, well); }

// Missing are the ranks that have not enqueued the call; if all have, all other ranks are.
void Communicator::overdue(const Enqueued& enqueued) {
  State& s = *state_;
  std::vector<int> missing, others;
  for (int i = 0; i < s.shm->size(); ++i)
    if (s.shm->newest(i) < enqueued.call.sequence) missing.push_back(s.shm->ranks()[i]);
  for (int rank = 0; rank < size(); ++rank)
    if (rank != s.roster.rank) others.push_back(rank);
  s.health.fail(s.overdue(enqueued.call, missing.empty() ? others : missing, enqueued.timeout));
}

void Communicator::look(const Enqueued& enqueued) {
  State& s = *state_;
  const Watch::Report report = s.report(enqueued.timeout);
  try {
    Watch(s.health, enqueued.deadline, enqueued.call, report).check({enqueued.call.root});
  } catch (const Fault&) {  // it is stored in the communicator
  }
}

void Communicator::differs(const Enqueued& enqueued, int rank) {
  state_->health.fail(differing(state_->roster, *state_->shm, enqueued.call, rank));
}

void Communicator::broke(const Enqueued& enqueued, const std::string& what) {
  state_->health.fail(Fault(Fault::Cause::aborted, {rank()},
                            state_->roster.me().name() + " failed in " + hfreduce::told(enqueued.call) + ": " + what));
}

void Communicator::carry(const Enqueued& enqueued, int lane, void* data, int64_t count) {
  State& s = *state_;
  const Watch::Report report = s.report(enqueued.timeout);
  s.hierarchy->carry(lane, data, count, s.plan->choose(enqueued.call, size()),
                     Watch(s.health, enqueued.deadline, enqueued.call, report));
}

void Communicator::broke(const Enqueued& enqueued, std::exception_ptr error) {
  try {
    std::rethrow_exception(std::move(error));
  } catch (const Fault& fault) {
    state_->health.fail(fault);
  } catch (const std::exception& other) {
    broke(enqueued, other.what());
  }
}

bool Communicator::quiet(milliseconds patience) {
  State& s = *state_;
  s.shm->be_quiet();
  const Deadline deadline = Clock::now() + patience;
  while (!s.shm->all_quiet()) {
    if (s.health.failed() || Clock::now() >= deadline) return false;
    std::this_thread::sleep_for(milliseconds(1));
  }
  return true;
}

std::vector<Segment> Communicator::share(size_t bytes, milliseconds timeout) {
  State& s = *state_;
  std::lock_guard lock(s.collectives);
  s.health.check();
  try {
    return s.share(bytes, s.shared++, Clock::now() + s.patience(timeout));
  } catch (const Fault& fault) {
    s.health.fail(fault);
    s.health.check();
    throw;
  }
}

void Communicator::on_failure(std::function<void()> hook) {
  State& s = *state_;
  std::lock_guard lock(s.hooking);
  s.hook = std::move(hook);
  if (s.hook && s.health.failed()) s.hook();
}

interhost::HostLayout Communicator::layout() const { return interhost::HostLayout(state_->roster); }
bool Communicator::one_host() const { return state_->roster.one_host(); }
int Communicator::cores() const { return state_->roster.cores; }
bool Communicator::was_shut_down() const { return state_->shut_down; }
void Communicator::check() const { state_->health.check(); }

void Communicator::drop_receives() { state_->health.dropping = true; }

}  // namespace hfreduce
