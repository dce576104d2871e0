#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <climits>
#include <cstring>
#include <ctime>

#include "transport/stream.h"

namespace hfreduce {

namespace {

// Bytes copied before the other side sees them: a part of the buffer, so that both sides can copy at the same time.
constexpr size_t kPart = 32 << 10;

}  // namespace

PipeEnd::PipeEnd(char* memory, size_t bytes)
    : head_(*reinterpret_cast<Head*>(memory)),
      data_(memory + sizeof(Head)),
      capacity_(static_cast<uint32_t>(bytes - sizeof(Head))) {
  static_assert(std::atomic<uint32_t>::is_always_lock_free);
}

uint32_t PipeEnd::unread() const {
  // One counter is this end's own and needs no ordering. The other says how far the bytes may be accessed.
  return head_.written.bytes.load(std::memory_order_acquire) - head_.taken.bytes.load(std::memory_order_acquire);
}

void PipeEnd::move(Counter& counter, uint32_t bytes) {
  const uint32_t now = counter.bytes.load(std::memory_order_relaxed) + bytes;
  // Sequentially consistent with `sleep`: either the sleeper sees this value, or this thread sees the sleeper.
  counter.bytes.store(now, std::memory_order_seq_cst);
  if (counter.sleepers.load(std::memory_order_seq_cst))
    syscall(SYS_futex, &counter.bytes, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

void PipeEnd::sleep(Counter& counter, uint32_t seen, milliseconds longest) {
  const auto ns = std::chrono::nanoseconds(longest).count();
  const timespec patience{static_cast<time_t>(ns / 1'000'000'000), static_cast<long>(ns % 1'000'000'000)};
  counter.sleepers.fetch_add(1, std::memory_order_seq_cst);
  if (counter.bytes.load(std::memory_order_seq_cst) == seen)
    syscall(SYS_futex, &counter.bytes, FUTEX_WAIT, seen, &patience, nullptr, 0);
  counter.sleepers.fetch_sub(1, std::memory_order_relaxed);
}

size_t PipeOutgoing::write(const void* data, size_t bytes) {
  const uint32_t now = static_cast<uint32_t>(std::min({bytes, kPart, size_t{capacity_ - unread()}}));
  if (now == 0) return 0;
  const uint32_t first = std::min(now, capacity_ - position_);
  std::memcpy(data_ + position_, data, first);
  std::memcpy(data_, static_cast<const char*>(data) + first, now - first);
  position_ = (position_ + now) % capacity_;
  move(head_.written, now);
  return now;
}

void PipeOutgoing::sleep(milliseconds longest) const {
  const uint32_t taken = head_.taken.bytes.load(std::memory_order_acquire);
  if (head_.written.bytes.load(std::memory_order_relaxed) - taken == capacity_)
    PipeEnd::sleep(head_.taken, taken, longest);
}

size_t PipeIncoming::read(void* data, size_t bytes) {
  const uint32_t now = static_cast<uint32_t>(std::min({bytes, kPart, size_t{unread()}}));
  if (now == 0) return 0;
  const uint32_t first = std::min(now, capacity_ - position_);
  std::memcpy(data, data_ + position_, first);
  std::memcpy(static_cast<char*>(data) + first, data_, now - first);
  position_ = (position_ + now) % capacity_;
  move(head_.taken, now);
  return now;
}

void PipeIncoming::sleep(milliseconds longest) const {
  const uint32_t written = head_.written.bytes.load(std::memory_order_acquire);
  if (written == head_.taken.bytes.load(std::memory_order_relaxed)) PipeEnd::sleep(head_.written, written, longest);
}

}  // namespace hfreduce
