#include "transport/stream.h"

#include <sched.h>

#include <algorithm>

namespace hfreduce {

namespace {

constexpr int kLooks = 20, kYields = 40;  // before sleeping
constexpr milliseconds kGlance{1};        // the longest sleep if nothing can end it early

}  // namespace

void Backoff::Wanted::add(const Stream& stream, int rank) {
  ranks_.push_back(rank);
  if (!stream.descriptors(fds_)) silent_ = &stream;
}

void Backoff::Wanted::add(int rank) { ranks_.push_back(rank), unseen_ = true; }

void Backoff::rest(const std::function<void(Wanted&)>& wanted, milliseconds longest) {
  if (++idle_ <= kLooks) return;
  if (idle_ <= kLooks + kYields) {
    sched_yield();
    return;
  }
  Wanted all;
  wanted(all);
  watch_.check(all.ranks_);
  if (all.silent_ && all.ranks_.size() == 1) return all.silent_->sleep(longest);
  if (all.silent_ || all.unseen_) longest = std::min(longest, kGlance);
  ::poll(all.fds_.data(), all.fds_.size(), static_cast<int>(longest.count()));  // EINTR: the caller's loop tries again
}

}  // namespace hfreduce
