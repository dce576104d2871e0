#include "cuda/p2p/peers.h"

#include <cstdlib>
#include <new>
#include <stdexcept>
#include <string>
#include <utility>

namespace hfreduce::gpu {

namespace {
constexpr size_t kLine = 128, kPage = 4096;
constexpr size_t kSteps = 2 * kMaxBlocks * sizeof(uint32_t);
static_assert(kMaxRanks * sizeof(uint64_t) <= kLine && sizeof(Board) <= kPage);

constexpr int region_bytes(int payload) { return kLine + 2 * payload; }
constexpr size_t flags_bytes(int blocks) { return blocks * kLine; }
size_t packets_bytes(int size, int payload) { return 2 * static_cast<size_t>(size) * region_bytes(payload); }
size_t slots_bytes(int size, int blocks, int slot) { return 2 * static_cast<size_t>(blocks) * size * (slot + kLine); }
size_t shared_bytes(int size, int blocks, int slot, int payload) {
  return flags_bytes(blocks) + packets_bytes(size, payload) + slots_bytes(size, blocks, slot);
}
}  // namespace

size_t Peers::bytes(int size) { return shared_bytes(size, kMaxBlocks, kSlot, kPackets) + kSteps; }
size_t Peers::mapped_bytes(int size) {
  return (shared_bytes(size, kMappedBlocks, kMappedSlot, kMapped) + kPage - 1) / kPage * kPage;
}

// Common to both kinds. The other constructors delegate to this one, so that the destructor runs if they throw.
Peers::Peers(Driver& driver, int rank, int size, milliseconds limit) : driver_(driver), opened_(kMaxRanks) {
  if (size < 2 || size > kMaxRanks || rank < 0 || rank >= size)
    throw std::invalid_argument("peers are 2 to " + std::to_string(kMaxRanks) + " ranks; got rank " +
                                std::to_string(rank) + " of " + std::to_string(size));
  links_.rank = rank, links_.size = size;
  links_.limit_ns = std::chrono::nanoseconds(limit).count();
  // On a page of its own, because it is pinned.
  void* board = std::aligned_alloc(kPage, kPage);
  if (board == nullptr) throw std::bad_alloc();
  try {
    driver.pin(board, kPage);
  } catch (...) {
    std::free(board);
    throw;
  }
  links_.board = new (board) Board{};
}

Peers::Peers(Driver& driver, int rank, int size, const Exchange& exchange, milliseconds limit)
    : Peers(driver, rank, size, limit) {
  links_.blocks = kMaxBlocks, links_.slot = kSlot, links_.region = region_bytes(kPackets);
  mine_ = driver.allocate(bytes(size));
  const std::vector<Handle> handles = exchange(driver.handle(mine_));
  if (handles.size() != static_cast<size_t>(size)) throw std::logic_error("as many handles as ranks are needed");
  for (int i = 0; i < size; ++i) place(i, static_cast<char*>(i == rank ? mine_ : opened_[i] = driver.open(handles[i])));
  links_.steps = reinterpret_cast<uint32_t*>(static_cast<char*>(mine_) + bytes(size) - kSteps);
}

// The step counters are in device memory here, too.
Peers::Peers(Driver& driver, int rank, std::vector<Segment> segments, milliseconds limit)
    : Peers(driver, rank, static_cast<int>(segments.size()), limit) {
  segments_ = std::move(segments);
  links_.blocks = kMappedBlocks, links_.slot = kMappedSlot, links_.region = region_bytes(kMapped);
  mine_ = driver.allocate(kSteps);
  links_.steps = static_cast<uint32_t*>(mine_);
  for (; pinned_ < segments_.size(); ++pinned_) {
    const Segment& segment = segments_[pinned_];
    driver.pin(segment.data(), segment.bytes());
    place(static_cast<int>(pinned_), segment.data());
  }
}

// The layout of a rank's memory.
void Peers::place(int of, char* memory) {
  links_.flags[of] = reinterpret_cast<uint64_t*>(memory);
  links_.packets[of] = memory + flags_bytes(links_.blocks);
  links_.slots[of] = links_.packets[of] + 2 * links_.size * static_cast<size_t>(links_.region);
}

Peers::~Peers() { free(); }

void Peers::close() {
  for (void*& memory : opened_)
    if (memory) driver_.close(std::exchange(memory, nullptr));
}

void Peers::free() {
  close();
  if (mine_) driver_.release(mine_);
  while (pinned_) driver_.unpin(segments_[--pinned_].data());
  if (links_.board == nullptr) return;
  driver_.unpin(links_.board);
  std::free(links_.board);
}

}  // namespace hfreduce::gpu
