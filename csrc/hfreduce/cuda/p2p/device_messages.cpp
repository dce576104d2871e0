// The steps of chunk k, of N bytes: N over the link, and N read and written in the receiver's memory (by
// multiprocessors in CUDA before 13.1: Driver::copy_within).
//
//   sender's host       wait until drained has reached k + 1 - depth; enqueue; raise enqueued
//   sender's stream     copy into slot k % depth; write filled
//   receiver's host     wait until enqueued has reached k + 1; enqueue
//   receiver's stream   wait filled; copy out of the slot; write drained
//
// Chunks are numbered across messages, modulo 2^32. A stream waits only for work that was already enqueued on its
// peer's device. Otherwise two ranks that send to each other could deadlock: streams may share a hardware queue, so
// what one waits for may be queued behind another waiting stream, on either side. So a message larger than the ring
// occupies a host thread on both sides, up to a ring's depth ahead of the devices.
#include "cuda/p2p/device_messages.h"

#include <algorithm>
#include <stdexcept>
#include <thread>

#include "cuda/in_flight.h"

namespace hfreduce::gpu {

namespace {

constexpr uint32_t kForGood = 1u << 30;
constexpr int kSpins = 100;  // before a waiting host sleeps between polls
constexpr std::chrono::microseconds kNap{20};

// Of one pair, in the receiver's segment.
struct Head {
  alignas(64) Flag filled;    // set by the sender's stream
  alignas(64) Flag drained;   // set by the receiver's stream
  alignas(64) Flag enqueued;  // set by the sender's host
  alignas(64) Flag wish;      // set by the sender's host: 1 if it would send this way
  alignas(64) Flag offer;     // set by the receiver's host: an Offer
  Handle ring;
};
enum Offer : uint32_t { kNone, kMade, kRefused };

void await(const Flag& flag, uint32_t value, int peer, const Watch& watch) {
  for (int i = 0; !passed(flag.load(std::memory_order_acquire), value); ++i) {
    watch.check({peer});
    i < kSpins ? std::this_thread::yield() : std::this_thread::sleep_for(kNap);
  }
}

}  // namespace

struct DeviceMessages::State {
  // This rank's side of a pair.
  struct Pair {
    Head* head;
    std::atomic<char*> ring{nullptr};
    Flag next{0};  // the next chunk to enqueue
    bool refused = false;
  };

  State(Communicator& communicator, Driver& driver, std::shared_ptr<const std::vector<Segment>> segments,
        const Options& options);
  ~State();

  char* slot(const Pair& pair, uint32_t k) const {
    return pair.ring.load(std::memory_order_acquire) + k % static_cast<uint32_t>(options.depth) * options.chunk;
  }
  // Calls each(k, byte, bytes) for every chunk of a message; k: number of the first one.
  template <class Each>
  void cut(int64_t bytes, uint32_t k, Each each) const {
    for (int64_t byte = 0; byte < bytes; byte += options.chunk, ++k)
      each(k, byte, std::min(options.chunk, bytes - byte));
  }
  uint32_t chunks(int64_t bytes) const { return static_cast<uint32_t>((bytes + options.chunk - 1) / options.chunk); }
  void wait(const Flag& flag, uint32_t value, Stream stream) { gpu::wait(driver, flag, value, stream); }
  void write(Flag& flag, uint32_t value, Stream stream) { gpu::write(driver, flag, value, stream); }
  // Calls `work`, which enqueues a message on `stream`. The stream is watched even if `work` fails.
  template <class Work>
  void enqueue(const Enqueued& enqueued, Stream stream, Work work) {
    try {
      work();
    } catch (...) {
      in_flight->add(enqueued, stream, false);
      throw;
    }
    in_flight->add(enqueued, stream, false);
  }
  void refuse(int from, int to, const char* why);
  void look(const Enqueued& oldest);

  Communicator& communicator;
  Driver& driver;
  const std::shared_ptr<const std::vector<Segment>> segments;
  const Options options;
  std::vector<Pair> to, from;  // by the peer's rank
  size_t pinned = 0;
  mutable std::mutex mutex;  // guards the creation of rings, and the following
  std::string why_not;
  std::unique_ptr<InFlight> in_flight;
};

DeviceMessages::State::State(Communicator& communicator, Driver& driver,
                             std::shared_ptr<const std::vector<Segment>> given, const Options& options)
    : communicator(communicator),
      driver(driver),
      segments(std::move(given)),
      options(options),
      to(segments->size()),
      from(segments->size()) {
  const auto head = [&](size_t from, size_t to) {
    return reinterpret_cast<Head*>((*segments)[to].data() + from * sizeof(Head));
  };
  const auto me = static_cast<size_t>(communicator.rank());
  for (size_t i = 0; i < segments->size(); ++i) to[i].head = head(me, i), from[i].head = head(i, me);
  in_flight = std::make_unique<InFlight>(communicator, driver, [this](const Enqueued& oldest) { look(oldest); });
}

DeviceMessages::State::~State() {
  in_flight.reset();
  for (const Pair& pair : to)
    if (pair.ring) driver.close(pair.ring);
  for (const Pair& pair : from)
    if (pair.ring) driver.release(pair.ring);
  for (size_t i = 0; i < pinned; ++i) driver.unpin((*segments)[i].data());
}

void DeviceMessages::State::refuse(int from, int to, const char* why) {
  if (why_not.empty())
    why_not = "from rank " + std::to_string(from) + " to rank " + std::to_string(to) + ": " + std::string(why);
}

// Checks only receives that still wait for their sender: all else is this device's own work, and the peer may have
// left. After a failure, releases waiting streams, every time: a sender's stream that still runs may lower the flag.
void DeviceMessages::State::look(const Enqueued& oldest) {
  if (!communicator.failed()) {
    const Pair* const pair = oldest.call.kind == Kind::recv ? &from[oldest.call.root] : nullptr;
    if (pair && !passed(pair->head->filled.load(std::memory_order_acquire), pair->next)) communicator.look(oldest);
    return;
  }
  for (Pair& pair : from)
    if (pair.ring) raise(pair.head->filled, pair.next + kForGood);
}

size_t DeviceMessages::segment_bytes(int size) {
  constexpr size_t kPage = 4096;
  return (size * sizeof(Head) + kPage - 1) / kPage * kPage;
}

DeviceMessages::DeviceMessages(Communicator& communicator, Driver& driver,
                               std::shared_ptr<const std::vector<Segment>> segments, const Options& options)
    : state_(std::make_unique<State>(communicator, driver, std::move(segments), options)) {
  State& s = *state_;
  for (; s.pinned < s.segments->size(); ++s.pinned) {
    const Segment& segment = (*s.segments)[s.pinned];
    driver.pin(segment.data(), segment.bytes());
  }
}

DeviceMessages::~DeviceMessages() = default;

bool DeviceMessages::sends(int to, int tag) {
  State& s = *state_;
  State::Pair& pair = s.to[to];
  if (tag != 0 || to == s.communicator.rank() || pair.refused) return false;
  if (pair.ring) return true;
  const uint32_t offer = pair.head->offer.load(std::memory_order_acquire);
  if (offer == kNone) pair.head->wish.store(1, std::memory_order_release);
  if (offer != kMade) return false;
  try {
    pair.ring = static_cast<char*>(s.driver.open(pair.head->ring));
  } catch (const std::exception& error) {
    std::lock_guard lock(s.mutex);
    pair.refused = true;
    s.refuse(s.communicator.rank(), to, error.what());
    return false;
  }
  pair.next = pair.head->enqueued.load(std::memory_order_acquire);
  return true;
}

void DeviceMessages::send(const void* data, int64_t count, DType dtype, int to, Stream stream, milliseconds timeout) {
  State& s = *state_;
  State::Pair& pair = s.to[to];
  const int64_t bytes = count * size_of(dtype);
  const uint32_t first = pair.next;
  pair.next += s.chunks(bytes);
  const auto work = [&](const Enqueued& enqueued, const Watch& watch) {
    s.enqueue(enqueued, stream, [&] {
      s.wait(pair.head->filled, first, stream);  // earlier messages that other streams send
      s.cut(bytes, first, [&](uint32_t k, int64_t byte, int64_t bytes) {
        await(pair.head->drained, k + 1 - s.options.depth, to, watch);
        s.driver.copy(s.slot(pair, k), static_cast<const char*>(data) + byte, bytes, stream);
        s.write(pair.head->filled, k + 1, stream);
        pair.head->enqueued.store(k + 1, std::memory_order_release);
      });
    });
  };
  s.communicator.announce(1 + static_cast<uint64_t>(first), count, dtype, to, 0, work, timeout);
}

void DeviceMessages::take(void* data, const Received& message, const Watch& watch, Stream stream) {
  State& s = *state_;
  State::Pair& pair = s.from[message.from];
  const int64_t bytes = message.enqueued.call.count * size_of(message.enqueued.call.dtype);
  const auto first = static_cast<uint32_t>(message.ticket - 1);
  s.enqueue(message.enqueued, stream, [&] {
    await(pair.next, first, message.from, watch);  // another thread may be at the previous message
    s.wait(pair.head->drained, first, stream);
    s.cut(bytes, first, [&](uint32_t k, int64_t byte, int64_t bytes) {
      await(pair.head->enqueued, k + 1, message.from, watch);
      s.wait(pair.head->filled, k + 1, stream);
      s.driver.copy_within(static_cast<char*>(data) + byte, s.slot(pair, k), bytes, stream);
      s.write(pair.head->drained, k + 1, stream);
    });
    pair.next.store(first + s.chunks(bytes), std::memory_order_release);
  });
}

void DeviceMessages::offer(int from) {
  State& s = *state_;
  State::Pair& pair = s.from[from];
  Head& head = *pair.head;
  if (!head.wish.load(std::memory_order_acquire) || head.offer.load(std::memory_order_acquire)) return;
  std::lock_guard lock(s.mutex);
  if (head.offer.load(std::memory_order_acquire)) return;
  try {
    pair.ring = static_cast<char*>(s.driver.allocate(s.options.depth * s.options.chunk));
    head.ring = s.driver.handle(pair.ring);
    for (Flag* flag : {&head.filled, &head.drained, &head.enqueued, &pair.next}) *flag = s.options.first;
    head.offer.store(kMade, std::memory_order_release);
  } catch (const std::exception& error) {
    s.refuse(from, s.communicator.rank(), error.what());
    head.offer.store(kRefused, std::memory_order_release);
  }
}

bool DeviceMessages::empty_by(Deadline deadline) { return state_->in_flight->empty_by(deadline); }

void DeviceMessages::quit() { state_->in_flight.reset(); }

std::string DeviceMessages::why_not() const {
  std::lock_guard lock(state_->mutex);
  return state_->why_not;
}

}  // namespace hfreduce::gpu
