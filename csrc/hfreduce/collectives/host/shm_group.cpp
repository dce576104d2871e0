#include "collectives/host/shm_group.h"

#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <climits>
#include <cstddef>
#include <cstring>
#include <ctime>
#include <iterator>
#include <stdexcept>

namespace hfreduce {

namespace {

// Sleeps while the word has this value, for at most 20 ms: so a fault without a wake-up is noticed, too.
void sleep_while(std::atomic<uint32_t>& word, uint32_t value) {
  const timespec patience{0, 20'000'000};
  syscall(SYS_futex, &word, FUTEX_WAIT, value, &patience, nullptr, 0);
}

void wake_all(std::atomic<uint32_t>& word) { syscall(SYS_futex, &word, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0); }

// Steps wrap around. Two ranks are never more than one step apart.
bool reached(uint32_t there, uint32_t wanted) { return static_cast<int32_t>(there - wanted) >= 0; }

}  // namespace

size_t ShmGroup::segment_bytes(int local_size, size_t slot_bytes) {
  return kHeader + 2 * slot_bytes + local_size * kPipe;
}

void ShmGroup::check_slots(int local_size, size_t slot_bytes) {
  // One cache line per rank or more: collectives divide slots into one part per rank, in whole lines.
  constexpr size_t line = 64, least = 4096, most = size_t{1} << 30;
  const size_t needed = std::max(least, local_size * line);
  if (slot_bytes % line || slot_bytes < needed || slot_bytes > most)
    throw std::invalid_argument("hfreduce: slot_bytes must be a multiple of " + std::to_string(line) + " from " +
                                std::to_string(needed) + " to " + std::to_string(most) + " where a host has " +
                                std::to_string(local_size) + " of the ranks, got " + std::to_string(slot_bytes));
}

ShmGroup::ShmGroup(std::vector<Segment> segments, int local_rank, std::vector<int> ranks,
                   std::vector<std::string> names, size_t slot_bytes, int cores)
    : segments_(std::move(segments)),
      ranks_(std::move(ranks)),
      names_(std::move(names)),
      rank_(local_rank),
      slot_bytes_(slot_bytes) {
  static_assert(sizeof(Header) <= kHeader && std::atomic<uint32_t>::is_always_lock_free);
  // With more ranks than cores, spinning would take the core that another rank needs: yield instead.
  spins_ = size() <= cores ? 200 : 0;
}

void ShmGroup::begin(const Call& call) {
  header(rank_).calls[++calls_ % 2] = call;
  first_ = true;
}

const Call& ShmGroup::call(int local_rank) const { return header(local_rank).calls[calls_ % 2]; }

Call ShmGroup::last(int rank) const {
  const auto local = std::find(ranks_.begin(), ranks_.end(), rank);
  if (local == ranks_.end()) return Call();
  const int there = static_cast<int>(local - ranks_.begin());
  const Call* calls = header(there).calls;
  const Call& begun = calls[calls[0].sequence < calls[1].sequence];
  const auto enqueued = noted(there, newest(there));
  return enqueued && enqueued->sequence > begun.sequence ? *enqueued : begun;
}

// Word by word, the sequence number last: a reader that finds it unchanged after reading has a consistent call.
void ShmGroup::note(const Call& call) {
  uint64_t words[sizeof(Call) / sizeof(uint64_t)];
  std::memcpy(words, &call, sizeof(call));
  static_assert(offsetof(Call, sequence) == 0 && sizeof(words) == sizeof(Call));
  auto& place = header(rank_).enqueued[call.sequence % kEnqueued];
  place[0].store(0, std::memory_order_relaxed);
  for (size_t i = 1; i < std::size(words); ++i) place[i].store(words[i], std::memory_order_release);
  place[0].store(words[0], std::memory_order_release);
  header(rank_).newest.store(call.sequence, std::memory_order_release);
}

std::optional<Call> ShmGroup::noted(int local_rank, uint64_t sequence) const {
  uint64_t words[sizeof(Call) / sizeof(uint64_t)];
  const auto& place = header(local_rank).enqueued[sequence % kEnqueued];
  if (!sequence || place[0].load(std::memory_order_acquire) != sequence) return std::nullopt;
  for (size_t i = std::size(words); i-- > 0;) words[i] = place[i].load(std::memory_order_acquire);
  if (words[0] != sequence) return std::nullopt;
  Call call;
  std::memcpy(&call, words, sizeof(call));
  return call;
}

uint64_t ShmGroup::newest(int local_rank) const { return header(local_rank).newest.load(std::memory_order_acquire); }

bool ShmGroup::all_quiet() const {
  for (int i = 0; i < size(); ++i)
    if (!header(i).quiet.load(std::memory_order_acquire)) return false;
  return true;
}

char* ShmGroup::slot(int local_rank) const {
  return segments_[local_rank].data() + kHeader + (step_ % 2 ? slot_bytes_ : 0);
}

char* ShmGroup::pipe(int from, int to) const { return segments_[to].data() + kHeader + 2 * slot_bytes_ + from * kPipe; }

void ShmGroup::arrive(const Watch& watch) {
  Header& mine = header(rank_);
  // Sequentially consistent with the sleeper's increment: either it sees this step, or this rank sees the sleeper.
  mine.step.store(step_, std::memory_order_seq_cst);
  if (mine.sleepers.load(std::memory_order_seq_cst)) wake_all(mine.step);
  for (int i = 1; i < size(); ++i) wait_for((rank_ + i) % size(), step_, watch);
  if (first_) compare();
  first_ = false;
}

void ShmGroup::wait_for(int local_rank, uint32_t step, const Watch& watch) {
  Header& peer = header(local_rank);
  const auto there = [&] { return reached(peer.step.load(std::memory_order_acquire), step); };
  for (int i = 0; i < spins_; ++i) {
    if (there()) return;
    pause();
  }
  for (int i = 0; i < 100; ++i) {
    if (there()) return;
    sched_yield();
  }
  while (!there()) {
    watch.check(missing(step));
    peer.sleepers.fetch_add(1, std::memory_order_seq_cst);
    const uint32_t now = peer.step.load(std::memory_order_seq_cst);
    if (!reached(now, step)) sleep_while(peer.step, now);
    peer.sleepers.fetch_sub(1, std::memory_order_relaxed);
  }
}

std::vector<int> ShmGroup::missing(uint32_t step) const {
  std::vector<int> ranks;
  for (int i = 0; i < size(); ++i)
    if (!reached(header(i).step.load(std::memory_order_acquire), step)) ranks.push_back(ranks_[i]);
  return ranks;
}

void ShmGroup::compare() const {
  bool agreed = true;
  for (int i = 1; i < size(); ++i) agreed = agreed && same(call(i), call(0));
  if (agreed) return;
  std::vector<Call> calls;
  for (int i = 0; i < size(); ++i) calls.push_back(call(i));
  throw mismatch(ranks_, names_, calls);
}

void ShmGroup::wake() {
  for (int i = 0; i < size(); ++i) wake_all(header(i).step);
}

}  // namespace hfreduce
