#include "diagnostics/fault.h"

#include "diagnostics/mismatch.h"

namespace hfreduce {

namespace {

constexpr milliseconds kExplanation{500};  // how long a broken connection waits for its cause
constexpr milliseconds kOnTheWay{200};     // what a peer sent before its goodbye needs no longer to be read

}  // namespace

bool Health::fail(const Fault& fault, bool from_peer) {
  if (fault.cause == Fault::Cause::broken && !from_peer) {
    wait_for_explanation();
    if (const auto left = all_left(fault.ranks))
      return record(Fault(left->cause, left->ranks, left->what() + std::string(" ") + fault.what()), false);
  }
  return record(fault, from_peer);
}

bool Health::record(const Fault& fault, bool from_peer) {
  {
    std::lock_guard lock(mutex_);
    if (!fault_.empty()) return false;
    fault_.push_back(fault);
    failed_.store(true, std::memory_order_release);
  }
  recorded_.notify_all();
  if (on_failure) on_failure(fault, from_peer);
  return true;
}

void Health::wait_for_explanation() {
  std::unique_lock lock(mutex_);
  recorded_.wait_for(lock, kExplanation, [&] { return !fault_.empty(); });
}

void Health::check() const {
  if (!failed()) return;
  std::lock_guard lock(mutex_);
  throw fault_.front();
}

void Health::left(int rank, const Fault& fault) {
  std::lock_guard lock(mutex_);
  leavers_.emplace(rank, Leaver{fault, Clock::now()});
  leavers_exist_.store(true, std::memory_order_release);
}

std::optional<Fault> Health::all_left(const std::vector<int>& ranks) const {
  if (ranks.empty() || !leavers_exist_.load(std::memory_order_acquire)) return std::nullopt;
  const auto now = Clock::now();
  std::lock_guard lock(mutex_);
  for (int rank : ranks) {
    const auto leaver = leavers_.find(rank);
    if (leaver == leavers_.end() || now - leaver->second.since < kOnTheWay) return std::nullopt;
  }
  return leavers_.at(ranks.front()).fault;
}

void Watch::check(const std::vector<int>& missing) const {
  health.check();
  if (const auto left = health.all_left(missing)) {
    health.fail(
        Fault(left->cause, missing, left->what() + std::string(" This rank waits for it in ") + told(call) + "."));
  } else if (Clock::now() >= deadline) {
    health.fail(report_(call, missing));
  }
  // Another thread's fault, or a peer's, may have come first: all ranks name the same one.
  health.check();
}

}  // namespace hfreduce
