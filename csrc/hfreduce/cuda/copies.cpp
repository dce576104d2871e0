// The steps of chunk k on each rank, with n ranks, b bytes of each:
//
//   filler   wait until all peers have taken chunk k - depth; copy into the ring; tell all peers that it is filled
//   a lane   for each peer: wait until its chunk is filled; copy from its ring into `out`; tell it that it is taken
//
// Bytes: (n - 1) b over the link, each way. In this rank's memory b read and written to fill the ring (and again to put
// the own block into `out`, if it is not there), (n - 1) b read by peers, (n - 1) b written. One hop.
//
// To fill the ring is a copy within the device, which CUDA gives to multiprocessors before 13.1 (Driver::copy_within):
// 1 / n of the output. The rest is never theirs.
//
// Chunks are counted from operation to operation, modulo 2^32; chunk k is in slot k % depth, and lane k % kLanes reads
// it: while one lane is between two copies the other one uses the link. A rank's streams wait for flags of its own
// alone, one for each peer, which that peer's streams write. So whoever lets go raises what is its own, and sends
// nobody else's streams on to what has not come. Its filler then fills slots that a peer has not read: which is why it
// waits before until all have taken what they will be given, or have let go themselves.
//
// What is given to the device for chunk k waits for nothing that any rank gives to its device after chunk k: so streams
// may share a queue of the hardware, and none waits for what is behind itself.
#include "cuda/copies.h"

#include <algorithm>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>

#include "cuda/assisted_ring.h"
#include "cuda/peers.h"

namespace hfreduce::gpu {

namespace {

constexpr int kLanes = 2;
constexpr milliseconds kPause{1};
constexpr milliseconds kSoon{20}, kLeave{5000};  // in the destructor, until what waits is let go of, and given up
constexpr uint32_t kForGood = 1u << 30;

// What one peer's streams tell a rank: the chunks that they have filled, and, by lane, those of the rank that they have
// taken.
struct Told {
  alignas(64) Flag filled;
  struct Lane {
    alignas(64) Flag taken;
  } lanes[kLanes];
};
struct Head {
  Told by[kMaxRanks];
  alignas(64) Flag gone;
};

Copies::Options settled(Copies::Options options) {
  if (options.size < 1 || options.size > kMaxRanks || options.rank < 0 || options.rank >= options.size)
    throw std::invalid_argument("copies are among up to " + std::to_string(kMaxRanks) + " ranks; got rank " +
                                std::to_string(options.rank) + " of " + std::to_string(options.size));
  options.least = std::clamp<int64_t>(options.least, kLine, options.chunk);
  int depth = kLanes;
  while (depth < options.depth) depth *= 2;
  options.depth = depth;
  return options;
}

}  // namespace

struct Copies::State {
  State(Driver& driver, std::vector<Segment> segments, const Options& options);
  ~State();

  Head& head(int r) const { return *reinterpret_cast<Head*>(segments[r].data()); }
  Head& mine() const { return head(options.rank); }
  int peer(int i) const { return (options.rank + i) % options.size; }  // i: from 1; all ranks' i-th are different ones
  char* slot(int r, uint32_t k) const { return rings[r] + k % static_cast<uint32_t>(options.depth) * options.chunk; }

  void fill(uint32_t k, const void* in, int64_t bytes);
  void take(uint32_t k, void* out, int64_t step, int64_t bytes);
  void wait(const Flag& flag, uint32_t value, Stream stream);
  void write(Flag& flag, uint32_t value, Stream stream);
  bool all_taken() const;
  void let_go();
  bool end_by(Deadline deadline);

  Driver& driver;
  const Options options;
  std::vector<Segment> segments;
  std::vector<char*> rings;  // by rank
  size_t pinned = 0;
  struct Own {
    Stream stream;
    Event end;
  };
  std::vector<Own> streams;  // the lanes, and the filler behind them
  Event begun = nullptr;
  std::atomic<uint32_t> next;  // chunk
  std::atomic<bool> gone{false};
  std::mutex going;
};

Copies::State::State(Driver& driver, std::vector<Segment> given, const Options& wanted)
    : driver(driver), options(settled(wanted)), segments(std::move(given)), rings(options.size), next(options.first) {}

Copies::State::~State() {
  if (!end_by(Clock::now() + kLeave)) {
    // A device may still work here: the memory stays until this process ends.
    static_cast<void>(new std::vector<Segment>(std::move(segments)));
    return;
  }
  for (int r = 0; r < options.size; ++r)
    if (rings[r] && r != options.rank) driver.close(rings[r]);
  if (rings[options.rank]) driver.release(rings[options.rank]);
  for (size_t i = 0; i < pinned; ++i) driver.unpin(segments[i].data());
  for (const Own& own : streams) driver.destroy_event(own.end), driver.destroy(own.stream);
  if (begun) driver.destroy_event(begun);
}

bool Copies::State::end_by(Deadline deadline) {
  const Deadline soon = Clock::now() + kSoon;
  const auto rests = [this](const Own& own) { return driver.reached(own.end); };
  try {
    for (const Own& own : streams) driver.record(own.end, own.stream);
    while (!std::all_of(streams.begin(), streams.end(), rests)) {
      if (Clock::now() > deadline) return false;
      if (Clock::now() > soon) let_go();
      std::this_thread::sleep_for(kPause);
    }
    return true;
  } catch (const std::exception&) {  // a device that has failed
    return false;
  }
}

// Whether the peers that have not let go have taken all that this rank will fill.
bool Copies::State::all_taken() const {
  const uint32_t end = next;
  for (int i = 1; i < options.size; ++i) {
    if (head(peer(i)).gone.load(std::memory_order_acquire)) continue;
    for (uint32_t k = end - kLanes; k != end; ++k)
      if (!passed(mine().by[peer(i)].lanes[k % kLanes].taken.load(std::memory_order_acquire), k + 1)) return false;
  }
  return true;
}

void Copies::State::let_go() {
  std::lock_guard lock(going);
  if (!gone) {
    mine().gone.store(1, std::memory_order_release);
    const Deadline deadline = Clock::now() + options.grace;
    while (!all_taken() && Clock::now() < deadline) std::this_thread::sleep_for(kPause);
    gone = true;
  }
  const uint32_t beyond = next.load() + kForGood;
  for (Told& told : mine().by) {
    raise(told.filled, beyond);
    for (auto& lane : told.lanes) raise(lane.taken, beyond);
  }
}

// A stream that waits for what is there already would do so a microsecond or more.
void Copies::State::wait(const Flag& flag, uint32_t value, Stream stream) {
  if (!gone && !passed(flag.load(std::memory_order_acquire), value))
    driver.wait(reinterpret_cast<const uint32_t*>(&flag), value, stream);
}

void Copies::State::write(Flag& flag, uint32_t value, Stream stream) {
  driver.write(reinterpret_cast<uint32_t*>(&flag), value, stream);
}

void Copies::State::fill(uint32_t k, const void* in, int64_t bytes) {
  const Stream filler = streams.back().stream;
  for (int i = 1; i < options.size; ++i)
    wait(mine().by[peer(i)].lanes[k % kLanes].taken, k + 1 - options.depth, filler);
  driver.copy_within(slot(options.rank, k), in, bytes, filler);
  for (int i = 1; i < options.size; ++i) write(head(peer(i)).by[options.rank].filled, k + 1, filler);
}

void Copies::State::take(uint32_t k, void* out, int64_t step, int64_t bytes) {
  const Stream lane = streams[k % kLanes].stream;
  for (int i = 1; i < options.size; ++i) {
    const int from = peer(i);
    wait(mine().by[from].filled, k + 1, lane);
    driver.copy(at(out, from * step), slot(from, k), bytes, lane);
    write(head(from).by[options.rank].lanes[k % kLanes].taken, k + 1, lane);
  }
}

size_t Copies::segment_bytes() { return 4096; }
static_assert(sizeof(Head) <= 4096);

Copies::Copies(Driver& driver, std::vector<Segment> segments, const Options& options)
    : state_(std::make_unique<State>(driver, std::move(segments), options)) {
  State& s = *state_;
  for (Told& told : s.mine().by) {
    told.filled = s.options.first;
    for (auto& lane : told.lanes) lane.taken = s.options.first;
  }
  for (; s.pinned < s.segments.size(); ++s.pinned)
    driver.pin(s.segments[s.pinned].data(), s.segments[s.pinned].bytes());
  s.rings[s.options.rank] = static_cast<char*>(driver.allocate(s.options.chunk * s.options.depth));
  s.begun = driver.event();
  for (int i = 0; i <= kLanes; ++i) {
    const Stream stream = driver.stream(true);
    s.streams.push_back({stream, driver.event()});
  }
}

Copies::~Copies() = default;

Handle Copies::handle() const { return state_->driver.handle(state_->rings[state_->options.rank]); }

void Copies::open(const std::vector<Handle>& of) {
  State& s = *state_;
  for (int r = 0; r < s.options.size; ++r)
    if (r != s.options.rank) s.rings[r] = static_cast<char*>(s.driver.open(of[r]));
}

void Copies::let_go() { state_->let_go(); }

void Copies::all_gather(const void* in, void* out, int64_t bytes, Stream stream) {
  State& s = *state_;
  char* const mine = at(out, s.options.rank * bytes);
  s.driver.record(s.begun, stream);
  for (const auto& own : s.streams) s.driver.wait_event(s.begun, own.stream);
  for (int64_t begin = 0, count; begin < bytes; begin += count, ++s.next) {
    count = std::min(std::clamp(begin, s.options.least, s.options.chunk), bytes - begin);
    s.fill(s.next, at(in, begin), count);
    s.take(s.next, at(out, begin), bytes, count);
  }
  if (mine != in) s.driver.copy_within(mine, in, bytes, s.streams.back().stream);
  for (const auto& own : s.streams) {
    s.driver.record(own.end, own.stream);
    s.driver.wait_event(own.end, stream);
  }
}

}  // namespace hfreduce::gpu
