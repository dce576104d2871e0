#include "diagnostics/fault.h"

namespace hfreduce {

namespace {

constexpr milliseconds kExplanation{2000};  // how long a broken connection waits for an explanation
constexpr milliseconds kLook{20};           // how often it looks for one
constexpr milliseconds kOnTheWay{200};      // after this, data sent before a goodbye has been read

}  // namespace

bool Health::fail(const Fault& fault, bool from_peer) {
  if (dynamic_cast<const Dropped*>(&fault)) return false;
  if (fault.cause == Fault::Cause::broken && !from_peer) {
    wait_for_explanation(fault.ranks);
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

void Health::wait_for_explanation(const std::vector<int>& ranks) {
  for (const auto deadline = Clock::now() + kExplanation; Clock::now() < deadline && !all_left(ranks);) {
    std::unique_lock lock(mutex_);
    if (recorded_.wait_for(lock, kLook, [&] { return !fault_.empty(); })) return;
  }
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
  // Another thread's or a peer's fault may have come first: all ranks report the same one.
  health.check();
}

std::string told(const Call& call) {
  std::string text = std::string(name(call.kind)) + " number " + std::to_string(call.sequence);
  if (call.kind == Kind::barrier) return text;
  text += " of " + std::to_string(call.count) + " " + name(call.dtype);
  if (call.kind == Kind::all_reduce || call.kind == Kind::reduce || call.kind == Kind::reduce_scatter)
    text += std::string(", ") + name(call.op);
  if (call.root >= 0) text += ", root " + std::to_string(call.root);
  return text;
}

Fault mismatch(const std::vector<int>& ranks, const std::vector<std::string>& names, const std::vector<Call>& calls) {
  std::vector<std::vector<size_t>> groups;  // of ranks that agree
  for (size_t i = 0; i < calls.size(); ++i) {
    size_t g = 0;
    while (g < groups.size() && !same(calls[groups[g][0]], calls[i])) ++g;
    if (g == groups.size()) groups.emplace_back();
    groups[g].push_back(i);
  }
  size_t right = 0;
  for (size_t g = 1; g < groups.size(); ++g)
    if (groups[g].size() > groups[right].size()) right = g;
  std::string message = "ranks called different collectives:";
  std::vector<int> culprits;
  for (size_t g = 0; g < groups.size(); ++g) {
    message += "\n  ";
    for (size_t i : groups[g]) {
      message += names[i] + (i == groups[g].back() ? ": " : ", ");
      if (g != right) culprits.push_back(ranks[i]);
    }
    message += told(calls[groups[g][0]]);
  }
  message +=
      "\nEvery rank must call the same collectives, with the same dtype and number of elements, in the same order.";
  return Fault(Fault::Cause::mismatch, culprits, message);
}

}  // namespace hfreduce
