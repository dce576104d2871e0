// The steps of chunk k on each rank, for n ranks and b bytes per rank:
//
//   give   for each peer: wait until it has taken chunk k - depth; copy into its ring; signal that chunk k is there
//   take   for each peer: wait until its chunk is there; copy from this rank's ring into `out`; signal that
//
// Bytes: (n - 1) b over the link in each direction, one hop. In memory: (n - 1) b read to be sent; (n - 1) b written by
// peers, read and written to be taken; b read and written for the own block, if it is not yet in `out`.
//
// Data is written to peers, not read from them: on one stream, copy engines read at a third of the rate
// (docs/notes/hfreduce_gpu.md). Taking is a copy within the device. CUDA before 13.1 does these on multiprocessors
// (Driver::copy_within), but only for as long as device memory takes, not for as long as the link does.
//
// Chunks are numbered across operations, modulo 2^32. Chunk k is in slot k % depth and lane k % kLanes. Each lane has
// its own streams: while one is between copies, the other uses the link. A rank's streams wait only for the rank's own
// flags, which streams of a peer's lane write. So a rank that lets go raises only its own flags: other ranks' streams
// never read data that has not arrived. But its own streams then overwrite slots that a peer has not taken, so it first
// waits until all peers have taken what they will be given, or have let go.
//
// The work for chunk k never waits for work that any rank enqueues after its chunk k. So streams may share a hardware
// queue without waiting for work behind them.
#include "cuda/p2p/copies.h"

#include <algorithm>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>

#include "collectives/host/slots.h"
#include "cuda/p2p/peers.h"

namespace hfreduce::gpu {

namespace {

constexpr int kLanes = 2;
constexpr milliseconds kPause{1};
constexpr milliseconds kSoon{20}, kLeave{5000};  // in the destructor: until streams are released; until it gives up
constexpr uint32_t kForGood = 1u << 30;

// What one peer's streams signal to a rank, by lane: the chunks that they have given to it and taken from it.
struct LaneFlags {
  alignas(64) Flag given;
  alignas(64) Flag taken;
};
struct Head {
  LaneFlags by[kMaxRanks][kLanes];
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
  int peer(int i) const { return (options.rank + i) % options.size; }  // i: from 1; different peers on all ranks
  // In rank r's ring for rank `from`.
  char* slot(int r, int from, uint32_t k) const {
    const int64_t ring = (from - r + options.size) % options.size - 1;
    return rings[r] + (ring * options.depth + k % static_cast<uint32_t>(options.depth)) * options.chunk;
  }

  void give(uint32_t k, const void* in, int64_t bytes);
  void take(uint32_t k, void* out, int64_t step, int64_t bytes);
  void wait(const Flag& flag, uint32_t value, Stream stream) {
    if (!gone) gpu::wait(driver, flag, value, stream);
  }
  void write(Flag& flag, uint32_t value, Stream stream) { gpu::write(driver, flag, value, stream); }
  bool all_taken() const;
  void let_go();
  bool end_by(Deadline deadline);

  Driver& driver;
  const Options options;
  std::vector<Segment> segments;
  std::vector<char*> rings;  // by rank: the first of its rings
  size_t pinned = 0;
  struct Own {
    Stream stream;
    Event end;
  };
  std::vector<Own> streams;  // giving, by lane; taking, by lane; one for the own block
  Event begun = nullptr;
  std::atomic<uint32_t> next;  // chunk
  std::atomic<bool> gone{false};
  std::mutex going;
};

Copies::State::State(Driver& driver, std::vector<Segment> given, const Options& wanted)
    : driver(driver), options(settled(wanted)), segments(std::move(given)), rings(options.size), next(options.first) {}

Copies::State::~State() {
  if (!end_by(Clock::now() + kLeave)) {
    // A device may still use it: leaks the memory.
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
  } catch (const std::exception&) {  // the device has failed
    return false;
  }
}

// Whether the peers that have not let go have taken all that this rank will give them.
bool Copies::State::all_taken() const {
  const uint32_t end = next;
  for (int i = 1; i < options.size; ++i) {
    if (head(peer(i)).gone.load(std::memory_order_acquire)) continue;
    for (uint32_t k = end - kLanes; k != end; ++k)
      if (!passed(mine().by[peer(i)][k % kLanes].taken.load(std::memory_order_acquire), k + 1)) return false;
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
  for (auto& lanes : mine().by)
    for (LaneFlags& told : lanes) raise(told.given, beyond), raise(told.taken, beyond);
}

void Copies::State::give(uint32_t k, const void* in, int64_t bytes) {
  const uint32_t lane = k % kLanes;
  const Stream stream = streams[lane].stream;
  for (int i = 1; i < options.size; ++i) {
    const int to = peer(i);
    wait(mine().by[to][lane].taken, k + 1 - options.depth, stream);
    driver.copy(slot(to, options.rank, k), in, bytes, stream);
    write(head(to).by[options.rank][lane].given, k + 1, stream);
  }
}

void Copies::State::take(uint32_t k, void* out, int64_t step, int64_t bytes) {
  const uint32_t lane = k % kLanes;
  const Stream stream = streams[kLanes + lane].stream;
  for (int i = options.size - 1; i > 0; --i) {  // beginning with the peer that gives to this rank first
    const int from = peer(i);
    wait(mine().by[from][lane].given, k + 1, stream);
    driver.copy_within(at(out, from * step), slot(options.rank, from, k), bytes, stream);
    write(head(from).by[options.rank][lane].taken, k + 1, stream);
  }
}

size_t Copies::segment_bytes() { return 4096; }
static_assert(sizeof(Head) <= 4096);

Copies::Copies(Driver& driver, std::vector<Segment> segments, const Options& options)
    : state_(std::make_unique<State>(driver, std::move(segments), options)) {
  State& s = *state_;
  for (auto& lanes : s.mine().by)
    for (LaneFlags& told : lanes) told.given = told.taken = s.options.first;
  for (; s.pinned < s.segments.size(); ++s.pinned)
    driver.pin(s.segments[s.pinned].data(), s.segments[s.pinned].bytes());
  s.rings[s.options.rank] =
      static_cast<char*>(driver.allocate((s.options.size - 1) * s.options.depth * s.options.chunk));
  s.begun = driver.event();
  for (int i = 0; i <= 2 * kLanes; ++i) {
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
  if (mine != in) s.driver.copy_within(mine, in, bytes, s.streams.back().stream);
  for (int64_t begin = 0, count; begin < bytes; begin += count, ++s.next) {
    count = std::min(std::clamp(begin, s.options.least, s.options.chunk), bytes - begin);
    s.give(s.next, at(in, begin), count);
    s.take(s.next, at(out, begin), bytes, count);
  }
  for (const auto& own : s.streams) {
    s.driver.record(own.end, own.stream);
    s.driver.wait_event(own.end, stream);
  }
}

}  // namespace hfreduce::gpu
