// The steps of chunk k on each rank (down: D2H, up: H2D), for n ranks on the host and an input of b bytes per rank:
//
//   caller's stream   wait freed; copy down; write arrived
//   cores, all ranks  wait until all arrived; add up a slice of b / n; when all have, raise ready
//   our stream        wait ready; copy up; write taken
//   cores             wait until all taken; raise freed
//
// With several hosts, between the second and the third step: threads of each rank exchange its slice with other hosts.
//
// Bytes of each rank over its link, for N bytes of input (all_gather: of output): all_reduce N down and N up,
// reduce_scatter N down and N / n up, all_gather N / n down and N (n - 1) / n up, broadcast N down on the root and N up
// on the others. For the memory traffic see reduce_workers.cpp; for why no chunk overtakes another, ring.h.
//
// The caller's stream itself copies down, so no event is needed before the first chunk. A message of one chunk also
// goes up on it, and needs no event at its end.
#include "cuda/staged/staged.h"

#include <unistd.h>

#include <cstring>
#include <stdexcept>
#include <string>
#include <thread>
#include <type_traits>

#include "collectives/reduce.h"
#include "cuda/staged/reduce_workers.h"
#include "cuda/staged/ring.h"

namespace hfreduce::gpu {

namespace {

constexpr milliseconds kPause{2}, kGrace{200};  // of let_go
constexpr milliseconds kLeave{5000};            // for running operations, in the destructor
constexpr uint32_t kForGood = 1u << 30;
constexpr int kTries = 5;  // of rate; the first ones include waking the threads

// The options in effect. Lines and pages divide a chunk; the depth is a power of two, so that it divides 2^32.
HostStaged::Options settled(HostStaged::Options options) {
  const int64_t page = 4096;
  // Transfers between hosts are slower than a few calls.
  if (options.hosts.count > 1)
    options.chunk = std::min<int64_t>(options.chunk, 8 << 20),
    options.least = std::min<int64_t>(options.least, 512 << 10);
  options.chunk = std::max((options.chunk + page - 1) / page * page, page);
  options.share = std::max<int64_t>(options.share, 1);
  options.least = std::min(std::max<int64_t>(options.least, kLine), options.chunk);
  int depth = 2;
  while (depth < std::min(options.depth, StagingRing::kMaxDepth)) depth *= 2;
  options.depth = depth;
  const int cores = static_cast<int>(std::thread::hardware_concurrency());
  if (options.threads < 1) options.threads = std::clamp(cores / 2 / options.size, 1, 8);
  if (options.streaming < 0) {
    // No streaming if the ring of all ranks fits in half of the last-level cache (if its size is known).
    const int64_t cache = sysconf(_SC_LEVEL3_CACHE_SIZE);
    const auto ring =
        static_cast<int64_t>(StagingRing::bytes(options.size, options.chunk, options.depth)) * options.size;
    options.streaming = ring > cache / 2;
  }
  return options;
}

void check(DType dtype, Op op) {
  if (supported(dtype, op)) return;
  throw std::invalid_argument(std::string("there is no ") + name(op) + " of " + name(dtype));
}

struct Nothing {};  // no input, or no output

}  // namespace

struct HostStaged::State {
  State(Driver& driver, std::vector<Segment> segments, const Options& options);
  State(Driver& driver, std::vector<Segment> segments, const Options& options, std::function<bool()> stopped);
  ~State();

  void meet(const std::function<bool()>& stopped);
  void let_go();
  bool ended();
  bool end_by(Deadline deadline);

  // The streams of an operation. quiet: all earlier operations have ended, so streams need no events to come after
  // them.
  struct Order {
    Stream stream, upper;  // the caller's, and the one for copies up: equal for a message of one chunk
    bool quiet;
  };
  // Runs an operation. down(part, k, stream) and up(part, k, stream) copy this rank's input and output.
  template <class Down, class Up>
  void run(Work work, Stream stream, Down down, Up up);
  Order begin(Work& work, Stream stream, bool brings, bool wants);
  template <class Down>
  void bring(const Work& work, const Span& part, uint32_t k, Stream stream, Down down);
  template <class Up>
  void take(const Work& work, const Span& part, uint32_t k, const Order& order, Up up);
  void end(const Order& order);
  bool copied(void* out, const void* in, int64_t bytes, Stream stream);
  Reduction inside(Reduction reduction) const;
  void wait(const Flag& flag, uint32_t value, Stream stream) {
    if (!gone) gpu::wait(driver, flag, value, stream);
  }
  void write(Flag& flag, uint32_t value, Stream stream) { gpu::write(driver, flag, value, stream); }
  uint32_t chunks(const Work& work) const;

  Driver& driver;
  const Options options;
  StagingRing ring;
  Stream up_stream = nullptr;
  Event down_event = nullptr, up_event = nullptr;
  Event down_last = nullptr;   // after the last copy down: one of the two
  std::atomic<uint32_t> next;  // chunk
  bool torn = false;           // an operation was only partly enqueued
  size_t pinned = 0;
  std::atomic<bool> gone{false};
  std::mutex going;
  const pid_t owner = getpid();
  std::unique_ptr<ReduceWorkers> workers;
};

HostStaged::State::State(Driver& driver, std::vector<Segment> segments, const Options& given)
    : driver(driver),
      options(settled(given)),
      ring(std::move(segments), options.rank, options.chunk, options.depth),
      next(options.first) {}

// Delegates, so that the destructor runs if this throws.
HostStaged::State::State(Driver& driver, std::vector<Segment> segments, const Options& given,
                         std::function<bool()> stopped)
    : State(driver, std::move(segments), given) {
  meet(stopped);
  for (; pinned < ring.segments.size(); ++pinned)
    driver.pin(ring.segments[pinned].data(), ring.segments[pinned].bytes());
  up_stream = driver.stream(true);
  down_event = down_last = driver.event();
  up_event = driver.event();
  const ReduceWorkers::Options threads{options.threads,       options.share,      options.least,
                                       options.streaming > 0, driver.numa_node(), options.hosts};
  workers = std::make_unique<ReduceWorkers>(ring, threads, std::move(stopped), [this] { let_go(); });
}

// Memory is placed by first touch, and pinning touches it: all ranks settle their own before any rank pins the others'.
void HostStaged::State::meet(const std::function<bool()>& stopped) {
  StagingRing::Head& head = ring.mine();
  ring.segments[options.rank].settle(driver.numa_node(), StagingRing::kHead);
  for (Flag* flag : {&head.arrived, &head.reduced, &head.taken, &head.ready, &head.freed}) *flag = options.first;
  head.settled = 1;
  while (!ring.all(&StagingRing::Head::settled, 1)) {
    if (stopped()) throw std::runtime_error("the communicator failed while ranks of this host shared their memory");
    std::this_thread::sleep_for(milliseconds(1));
  }
}

HostStaged::State::~State() {
  if (workers && !end_by(Clock::now())) let_go();
  if (workers) workers->quit();
  if (workers && !end_by(Clock::now() + kLeave)) {
    // A device may still write here: leaks the memory.
    static_cast<void>(new StagingRing(std::move(ring)));
    return;
  }
  for (size_t i = 0; i < pinned; ++i) driver.unpin(ring.segments[i].data());
  if (up_event) driver.destroy_event(up_event);
  if (down_event) driver.destroy_event(down_event);
  if (up_stream) driver.destroy(up_stream);
}

bool HostStaged::State::ended() { return !torn && driver.reached(up_event) && driver.reached(down_event); }

bool HostStaged::State::end_by(Deadline deadline) {
  try {
    while (!ended()) {
      if (torn || Clock::now() > deadline) return false;
      std::this_thread::sleep_for(milliseconds(1));
    }
    return true;
  } catch (const std::exception&) {  // the device has failed
    return false;
  }
}

// Once they see `gone`, no rank's cores raise ready or send anything to other hosts. The other ranks' streams may take
// what is ready by then, and transfers in flight may finish, before this rank's streams overwrite it.
void HostStaged::State::let_go() {
  std::lock_guard lock(going);
  if (gone) return;
  ring.mine().gone.store(1, std::memory_order_seq_cst);
  const Deadline deadline = Clock::now() + kGrace;
  do std::this_thread::sleep_for(kPause);
  while ((!ring.taken_all_ready() || ring.carrying()) && Clock::now() < deadline);
  gone = true;
  for (Flag* flag : {&ring.mine().ready, &ring.mine().freed}) raise(*flag, next.load() + kForGood);
}

uint32_t HostStaged::State::chunks(const Work& work) const {
  uint32_t n = 0;
  for (ChunkCut cut(work, options.chunk, options.least); !cut.done(); ++n) cut.next();
  return n;
}

HostStaged::State::Order HostStaged::State::begin(Work& work, Stream stream, bool brings, bool wants) {
  if (driver.capturing(stream))
    throw std::runtime_error("the CPU-assisted reduce cannot be captured into a CUDA graph");
  StagingRing::Head& head = ring.mine();
  work.first = next.load(), work.chunks = chunks(work);
  Order order{stream, work.chunks == 1 ? stream : up_stream, false};
  order.quiet = head.arrived.load(std::memory_order_acquire) == work.first &&
                head.taken.load(std::memory_order_acquire) == work.first;
  if (!work.chunks) return order;
  torn = true;
  next += work.chunks;
  ring.sweep();
  if (!order.quiet) driver.wait_event(down_last, stream);
  if (!brings) {
    write(head.arrived, work.first + work.chunks, stream);
    workers->push(work);
  }
  if (!wants) {
    if (!order.quiet) driver.wait_event(up_event, order.upper);
    write(head.taken, work.first + work.chunks, order.upper);
  }
  return order;
}

// The next operation, on any stream, copies down after down_last, and up after up_event.
void HostStaged::State::end(const Order& order) {
  const bool alone = order.upper == order.stream;
  down_last = alone ? up_event : down_event;
  if (!alone) driver.record(down_event, order.stream);
  driver.record(up_event, order.upper);
  if (!alone) driver.wait_event(up_event, order.stream);
  torn = false;
}

template <class Down>
void HostStaged::State::bring(const Work& work, const Span& part, uint32_t k, Stream stream, Down down) {
  wait(ring.mine().freed, k + 1 - options.depth, stream);
  if (work.reduction.op == Op::premul_sum) {
    uint32_t halves[2];
    std::memcpy(halves, &work.reduction.factor, sizeof(halves));
    for (int i = 0; i < 2; ++i) driver.write(&ring.mine().factors[ring.slot(k)][i], halves[i], stream);
  }
  down(part, k, stream);
  write(ring.mine().arrived, k + 1, stream);
  if (k == work.first) workers->push(work);  // they wake up during the first copy
}

template <class Up>
void HostStaged::State::take(const Work& work, const Span& part, uint32_t k, const Order& order, Up up) {
  if (k == work.first && order.upper == order.stream && !order.quiet) driver.wait_event(up_event, order.upper);
  wait(ring.mine().ready, k + 1, order.upper);
  up(part, k, order.upper);
  write(ring.mine().taken, k + 1, order.upper);
}

template <class Down, class Up>
void HostStaged::State::run(Work work, Stream stream, Down down, Up up) {
  constexpr bool kBrings = !std::is_same_v<Down, Nothing>, kWants = !std::is_same_v<Up, Nothing>;
  const Order order = begin(work, stream, kBrings, kWants);
  if (!work.chunks) return;
  uint32_t k = work.first;
  for (ChunkCut cut(work, options.chunk, options.least); !cut.done(); ++k) {
    const Span part = cut.next();
    if constexpr (kBrings) bring(work, part, k, stream, down);
    if constexpr (kWants) take(work, part, k, order, up);
  }
  end(order);
}

// A single rank needs no exchange: the output is the input.
bool HostStaged::State::copied(void* out, const void* in, int64_t bytes, Stream stream) {
  if (options.size * options.hosts.count > 1) return false;
  if (bytes && out != in) driver.copy(out, in, bytes, stream);
  return true;
}

// With several hosts an average is divided after the last addition.
Reduction HostStaged::State::inside(Reduction reduction) const {
  if (options.hosts.count > 1 && reduction.op == Op::avg) reduction.op = Op::sum;
  return reduction;
}

size_t HostStaged::segment_bytes(const Options& given) {
  const Options options = settled(given);
  return StagingRing::bytes(options.size, options.chunk, options.depth);
}

HostStaged::HostStaged(Driver& driver, std::vector<Segment> segments, const Options& options,
                       std::function<bool()> stopped)
    : state_(std::make_unique<State>(driver, std::move(segments), options, std::move(stopped))) {}

HostStaged::~HostStaged() {
  if (getpid() != state_->owner) static_cast<void>(state_.release());  // a forked child has no threads
}

// Runs chunks whose flags are set by the host instead of streams.
double HostStaged::rate() {
  State& s = *state_;
  StagingRing::Head& head = s.ring.mine();
  const int64_t bytes = std::min(s.options.least, s.options.chunk);
  double best = 0;
  for (int i = 0; i < kTries; ++i) {
    Work work{Kind::all_reduce, DType::f32, {}, bytes / size_of(DType::f32), size_of(DType::f32), 1, {}};
    work.first = s.next, work.chunks = s.chunks(work);
    const uint32_t end = s.next += work.chunks;
    const auto begun = Clock::now();
    s.workers->push(work);
    raise(head.arrived, end);
    while (!passed(head.ready.load(std::memory_order_acquire), end)) std::this_thread::yield();
    raise(head.taken, end);
    best = std::max(best, bytes / std::chrono::duration<double>(Clock::now() - begun).count());
  }
  return best;
}

void HostStaged::let_go() { state_->let_go(); }
void HostStaged::quit() { state_->workers->quit(); }

void HostStaged::all_reduce(const void* in, void* out, int64_t count, DType dtype, Reduction reduction, Stream stream,
                            const Enqueued& enqueued) {
  State& s = *state_;
  const int64_t size = size_of(dtype);
  check(dtype, reduction.op);
  if (reduction.op != Op::premul_sum && s.copied(out, in, count * size, stream)) return;
  s.run(
      {Kind::all_reduce, dtype, s.inside(reduction), count, size, 1, enqueued}, stream,
      [&](const Span& part, uint32_t k, Stream stream) {
        s.driver.copy(s.ring.input(s.ring.rank, k), at(in, part.begin * size), part.count * size, stream);
      },
      [&](const Span& part, uint32_t k, Stream stream) {
        s.driver.copy(at(out, part.begin * size), s.ring.result(k), part.count * size, stream);
      });
}

// The blocks of one host are in every Hosts::count-th row.
void HostStaged::reduce_scatter(const void* in, void* out, int64_t count, DType dtype, Reduction reduction,
                                Stream stream, const Enqueued& enqueued) {
  State& s = *state_;
  const Hosts& hosts = s.options.hosts;
  const int64_t size = size_of(dtype), local = s.ring.size;
  check(dtype, reduction.op);
  if (reduction.op != Op::premul_sum && s.copied(out, in, count * size, stream)) return;
  const int rows = s.ring.size * hosts.count, mine = s.ring.rank * hosts.count + hosts.index;
  const Work work{Kind::reduce_scatter, dtype, s.inside(reduction), count, size, rows, enqueued};
  s.run(
      work, stream,
      [&](const Span& part, uint32_t k, Stream stream) {
        char* const slot = s.ring.input(s.ring.rank, k);
        for (int64_t h = 0, step = part.step(work); h < hosts.count; ++h)
          s.driver.copy_rows(slot + h * step, hosts.count * step, at(in, (h * local * count + part.begin) * size),
                             count * size, part.count * size, local, stream);
      },
      [&](const Span& part, uint32_t k, Stream stream) {
        const char* const sums = s.ring.result(k) + mine * part.step(work);
        s.driver.copy(at(out, part.begin * size), sums, part.count * size, stream);
      });
}

// Blocks are copied down directly into the result. A rank copies up only the others' blocks.
void HostStaged::all_gather(const void* in, void* out, int64_t bytes, Stream stream, const Enqueued& enqueued) {
  State& s = *state_;
  const Hosts& hosts = s.options.hosts;
  const int64_t local = s.ring.size, rank = hosts.index * local + s.ring.rank;
  char* const mine = at(out, rank * bytes);
  if (s.copied(out, in, bytes, stream)) return;
  const Work work{Kind::all_gather, DType::u8, {}, bytes, 1, s.ring.size * hosts.count, enqueued};
  const auto row = [&](int64_t block) { return block % local * hosts.count + block / local; };
  s.run(
      work, stream,
      [&](const Span& part, uint32_t k, Stream stream) {
        s.driver.copy(s.ring.result(k) + row(rank) * part.step(work), at(in, part.begin), part.count, stream);
      },
      [&](const Span& part, uint32_t k, Stream stream) {
        const auto blocks = [&](int64_t first, int64_t end) {  // of one host
          if (first < end)
            s.driver.copy_rows(at(out, first * bytes + part.begin), bytes,
                               s.ring.result(k) + row(first) * part.step(work), hosts.count * part.step(work),
                               part.count, end - first, stream);
        };
        for (int64_t h = 0; h < hosts.count; ++h) {
          const int64_t first = h * local, end = first + local;
          if (h == hosts.index)
            blocks(first, rank), blocks(rank + 1, end);
          else
            blocks(first, end);
        }
        if (part.begin + part.count == bytes && mine != in) s.driver.copy(mine, in, bytes, stream);
      });
}

// With several hosts the root waits like the other ranks, until its host has sent everything.
void HostStaged::broadcast(void* data, int64_t bytes, bool root, Stream stream, const Enqueued& enqueued) {
  State& s = *state_;
  if (s.copied(data, data, bytes, stream)) return;
  const Work work{Kind::broadcast, DType::u8, {}, bytes, 1, 1, enqueued};
  const auto down = [&](const Span& part, uint32_t k, Stream stream) {
    if (root) s.driver.copy(s.ring.result(k), at(data, part.begin), part.count, stream);
  };
  const auto up = [&](const Span& part, uint32_t k, Stream stream) {
    if (!root) s.driver.copy(at(data, part.begin), s.ring.result(k), part.count, stream);
  };
  if (s.options.hosts.count > 1) return s.run(work, stream, down, up);
  if (root) return s.run(work, stream, down, Nothing());
  s.run(work, stream, Nothing(), up);
}

}  // namespace hfreduce::gpu
