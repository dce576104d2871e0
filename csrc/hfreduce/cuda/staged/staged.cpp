// The steps of chunk k on each rank, with n ranks on the host and a chunk of b bytes of each input:
//
//   stream of the caller   wait freed; copy down; write arrived
//   cores of all ranks     see all arrived; add up a slice of b / n; when all have, raise ready
//   stream of this object  wait ready; copy up; write taken
//   cores                  see all taken; raise freed
//
// Of several hosts, between the second step and the third: threads of each rank exchange its slice with the other
// hosts.
//
// Bytes of each rank over its link, for N bytes of input (of output: all_gather): all_reduce N down and N up,
// reduce_scatter N down and N / n up, all_gather N / n down and N (n - 1) / n up, broadcast N down on the root and N up
// on the others. reduce_workers.cpp says what that is in memory, ring.h why no chunk overtakes another.
//
// The caller's stream itself brings the chunks down, so no event needs to be put between it and the first one; a
// message of one chunk goes up on it too, and needs none at its end.
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
constexpr milliseconds kLeave{5000};            // for what runs to end in the destructor
constexpr uint32_t kForGood = 1u << 30;
constexpr int kTries = 5;  // of rate; the first ones find the threads asleep

// Options as they are used: lines and pages divide a chunk, a power of two divides 2^32.
HostStaged::Options settled(HostStaged::Options options) {
  const int64_t page = 4096;
  // What travels from host to host is slower than a few calls.
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
    // Half of the last-level cache for the ring of all ranks; where its size is not known, none of it.
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

struct Nothing {};  // to bring, or to want

}  // namespace

struct HostStaged::State {
  State(Driver& driver, std::vector<Segment> segments, const Options& options);
  State(Driver& driver, std::vector<Segment> segments, const Options& options, std::function<bool()> stopped);
  ~State();

  void meet(const std::function<bool()>& stopped);
  void let_go();
  bool ended();
  bool end_by(Deadline deadline);

  // Where an operation is enqueued. quiet: all earlier ones are through, so that streams need no event to be behind
  // them.
  struct Order {
    Stream stream, upper;  // the caller's, and the one that goes up: the same for a message of one chunk
    bool quiet;
  };
  // Runs an operation: down(part, k, stream) and up(part, k, stream) copy what this rank brings and wants.
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
  Event down_last = nullptr;   // behind all that came down: one of the two
  std::atomic<uint32_t> next;  // chunk
  bool torn = false;           // an operation was not enqueued as a whole
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

// Delegates, so that the destructor runs for what throws in here.
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

// Memory lies where it is touched first, and pinning touches it: so all settle their own before any pins the others'.
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
    // A device may still write here: the memory stays until this process ends.
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
  } catch (const std::exception&) {  // a device that has failed
    return false;
  }
}

// From when they see `gone`, no rank's cores make anything ready, nor send it to other hosts. What is ready by then the
// others' streams may take, and what is on its way may go, before this rank's overwrite it.
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

// What is enqueued next, on whatever stream, comes down behind down_last, and goes up behind up_event.
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
  if (k == work.first) workers->push(work);  // they wake while the first bytes come down
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

// A rank that is alone has nothing to wait for: what it would get is what it has.
bool HostStaged::State::copied(void* out, const void* in, int64_t bytes, Stream stream) {
  if (options.size * options.hosts.count > 1) return false;
  if (bytes && out != in) driver.copy(out, in, bytes, stream);
  return true;
}

// An average over several hosts is divided when it is whole.
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
  if (getpid() != state_->owner) static_cast<void>(state_.release());  // a child of a fork has no threads
}

// Chunks of which each input has arrived, and the result is taken, without a stream.
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

// Blocks of one host lie in every Hosts::count-th row.
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

// Blocks come down into the result at once. A rank takes up the others' alone.
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

// Of several hosts a root waits as all do, until its host has sent it all.
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
