// The host-staged reduction over a GPU simulated on threads, with checked bits. The first argument selects the test:
//   pairs       every supported dtype and operation, one after another
//   sequences   any operations of any size, in place or not, on two streams; ranks are threads
//   processes   the same, ranks are processes
//   hosts       the same, ranks are threads of several hosts
//   leavers     one rank never comes, or lets go in the middle: no stream hangs, and no rank takes invalid data
//   host_leavers  the same, on several hosts
//   dead        one rank dies after its input has arrived
//   carried     one rank lets go while both send to another host
// Then rounds and seed. Prints "ok".
#include "cuda/staged/staged.h"

#include <sys/wait.h>
#include <unistd.h>

#include <string>

#include "cuda/staged/ring.h"
#include "fake_gpu.h"
#include "played_hosts.h"
#include "staged_calls.h"

using namespace hfreduce;
using namespace hfreduce::gpu;

namespace {

#define EXPECT(condition, ...)                                                     \
  do {                                                                             \
    if (!(condition)) {                                                            \
      std::fprintf(stderr, "%s:%d: not so: %s; ", __FILE__, __LINE__, #condition); \
      std::fprintf(stderr, __VA_ARGS__);                                           \
      std::fputc('\n', stderr);                                                    \
      std::abort();                                                                \
    }                                                                              \
  } while (0)

using Options = HostStaged::Options;

class Rank {
 public:
  Rank(const World& world, const std::vector<int>& memory, Options options, unsigned seed, int dawdle,
       std::function<bool()> stopped)
      : gpu(seed * 64 + options.rank, dawdle),
        world(world),
        rank(world.first(options.hosts.index) + options.rank),
        size(world.ranks()) {
    std::vector<Segment> segments;
    for (int fd : memory) segments.emplace_back(fd, HostStaged::segment_bytes(options));
    staged = std::make_unique<HostStaged>(gpu, std::move(segments), options, std::move(stopped));
    for (Stream& stream : streams) stream = gpu.stream(false);
  }
  ~Rank() {
    finish();
    clear();
    for (Stream stream : streams) gpu.destroy(stream);
  }
  void finish() { staged.reset(); }

  // Enqueues the call, and before it a copy of its input, so that the input may arrive late.
  void enqueue(const Call1& call) {
    const Bytes data = input(call, rank, size);
    const Stream stream = streams[call.stream];
    Flight flight{call, nullptr, nullptr, gpu.event()};
    const auto bytes = static_cast<int64_t>(data.size());
    const int64_t block = call.kind == Kind::all_gather ? call.bytes() : 0;
    void* const source = gpu.allocate(bytes);
    copy(source, data.data(), bytes);
    const bool same = call.in_place && call.kind != Kind::reduce_scatter;
    flight.in = gpu.allocate(bytes);
    flight.out = gpu.allocate(block ? block * size : bytes);
    void* const in = call.kind == Kind::broadcast || same ? at(flight.out, rank * block) : flight.in;
    gpu.copy(in, source, bytes, stream);  // maybe late
    start(call, in, flight.out, stream);
    gpu.record(flight.end, stream);
    flights.push_back(flight);
    sources.push_back(source);
  }
  void check(size_t i) {
    const Call1& call = flights[i].call;
    const Bytes right = expected(call, rank, world);
    EXPECT(right.empty() || !std::memcmp(flights[i].out, right.data(), right.size()),
           "rank %d of %d, operation %zu: %s of %lld %s, %s, root %d, in place %d", rank, size, i, name(call.kind),
           static_cast<long long>(call.count), name(call.dtype), name(call.op), call.root, call.in_place);
  }
  void check_all() {
    for (Stream stream : streams) gpu.synchronize(stream);
    for (size_t i = 0; i < flights.size(); ++i) check(i);
    clear();
  }
  void clear() {
    for (auto& flight : flights) {
      for (void* memory : {flight.in, flight.out}) gpu.release(memory);
      gpu.destroy_event(flight.end);
    }
    for (void* source : sources) gpu.release(source);
    flights.clear(), sources.clear();
  }

  struct Flight {
    Call1 call;
    void *in, *out;
    Event end;
  };
  FakeGpu gpu;
  const World world;
  const int rank, size;
  Stream streams[2];
  std::unique_ptr<HostStaged> staged;
  std::vector<Flight> flights;
  std::vector<void*> sources;

 private:
  void start(const Call1& call, const void* in, void* out, Stream stream) {
    const Enqueued enqueued = call.enqueued();
    if (call.kind == Kind::all_reduce)
      staged->all_reduce(in, out, call.count, call.dtype, call.reduction(rank), stream, enqueued);
    if (call.kind == Kind::reduce_scatter)
      staged->reduce_scatter(in, out, call.count, call.dtype, call.reduction(rank), stream, enqueued);
    if (call.kind == Kind::all_gather) staged->all_gather(in, out, call.bytes(), stream, enqueued);
    if (call.kind == Kind::broadcast) staged->broadcast(out, call.bytes(), call.root == rank, stream, enqueued);
  }
};

// Runs f(memory of its host, its options) for the ranks of all hosts, as threads; or as processes, on one host.
template <class F>
void ranks(Options options, const World& world, Network& network, bool processes, F f) {
  std::vector<std::vector<int>> memory(world.hosts());
  std::vector<std::thread> threads;
  std::vector<pid_t> children;
  for (int h = 0; h < world.hosts(); ++h) {
    options.size = world.sizes[h];
    for (int r = 0; r < options.size; ++r) memory[h].push_back(Segment::create(HostStaged::segment_bytes(options)));
    for (int r = 0; r < options.size; ++r) {
      options.rank = r;
      options.hosts.count = world.hosts(), options.hosts.index = h, options.hosts.rails = world.rails();
      if (world.hosts() > 1) {
        options.hosts.carry = [=, &network](const Enqueued& enqueued, int lane, void* data, int64_t count) {
          network.carry(h, r, enqueued.call, lane, data, count);
        };
        options.hosts.failed = [](const Enqueued&, std::exception_ptr) {};
      }
      if (!processes) {
        threads.emplace_back([=, &memory] { f(memory[h], options); });
      } else if (const pid_t child = fork()) {
        children.push_back(child);
      } else {
        f(memory[h], options);
        _exit(0);
      }
    }
  }
  for (std::thread& thread : threads) thread.join();
  for (const pid_t child : children) {
    int status = 1;
    EXPECT(waitpid(child, &status, 0) == child && status == 0, "a rank ended with status %d", status);
  }
  for (const auto& host : memory)
    for (int fd : host) close(fd);
}

bool never() { return false; }

// Rings of two to eight small chunks, with a first chunk number shortly before the wrap-around.
Options drawn(std::mt19937& random) {
  Options options;
  options.threads = 1 + static_cast<int>(random() % 3);
  options.share = 1 << random() % 12;
  options.chunk = 4096 << random() % 2;
  options.least = 512 << random() % 4;
  options.depth = 2 << random() % 3;
  options.streaming = static_cast<int>(random() % 2);
  options.first = 0u - random() % 60;
  return options;
}

void pairs(const World& world, unsigned seed) {
  std::mt19937 random(seed);
  Network network(world);
  ranks(drawn(random), world, network, false, [=](const std::vector<int>& memory, const Options& options) {
    Rank rank(world, memory, options, seed, 0, never);
    std::mt19937 random(seed);
    Call1 call;
    for (int d = 0; d <= static_cast<int>(DType::e5m2); ++d)
      for (int o = 0; o <= static_cast<int>(Op::premul_sum); ++o) {
        call.dtype = static_cast<DType>(d), call.op = static_cast<Op>(o), call.seed = random();
        call.kind = random() % 2 || !world.regular() ? Kind::all_reduce : Kind::reduce_scatter;
        call.count = 1 + static_cast<int64_t>(random() % (12000 / size_of(call.dtype)));
        if (supported(call.dtype, call.op)) rank.enqueue(call);
      }
    rank.check_all();
  });
}

// Sizes are often those of chunks and rings, or off by one.
Call1 drawn_call(std::mt19937& random, const Options& options, const World& world) {
  constexpr Kind kKinds[] = {Kind::all_reduce, Kind::all_reduce, Kind::reduce_scatter, Kind::all_gather,
                             Kind::broadcast};
  constexpr DType kTypes[] = {DType::bf16, DType::f32, DType::i8, DType::f64};
  constexpr Op kOps[] = {Op::sum, Op::avg, Op::max, Op::premul_sum};
  Call1 call;
  do call.kind = kKinds[random() % 5];
  while (!world.regular() && call.kind != Kind::all_reduce && call.kind != Kind::broadcast);
  call.dtype = kTypes[random() % 4];
  call.op = kOps[random() % 4];
  if (!supported(call.dtype, call.op)) call.op = Op::sum;
  call.root = static_cast<int>(random() % world.ranks());
  call.stream = static_cast<int>(random() % 2);
  call.in_place = random() % 2;
  call.seed = random();
  const int64_t sizes[] = {0, 1, 64, options.least, options.chunk, options.chunk * options.depth};
  const int64_t near = sizes[random() % 6] / size_of(call.dtype) + static_cast<int64_t>(random() % 3) - 1;
  call.count = random() % 3 ? std::max<int64_t>(near, 0) : static_cast<int64_t>(random() % 20000);
  return call;
}

void sequences(const World& world, int rounds, unsigned seed, bool processes) {
  std::mt19937 random(seed);
  Network network(world);
  ranks(drawn(random), world, network, processes, [=](const std::vector<int>& memory, const Options& options) {
    Rank rank(world, memory, options, seed, 3, never);
    std::mt19937 random(seed);
    for (int i = 0; i < rounds; ++i) {
      for (int calls = 1 + static_cast<int>(random() % 12); calls; --calls)
        rank.enqueue(drawn_call(random, options, world));
      rank.check_all();
      if (random() % 4 == 0) usleep(random() % 3000 + options.rank * 100);  // cores fall asleep
    }
  });
}

// Rank 0 comes to `comes` operations only, or lets go after some time. The others' communicators fail later.
void leavers(const World& world, unsigned seed) {
  std::mt19937 random(seed);
  Network network(world);
  const bool lets_go = random() % 2;
  const int calls = 40, comes = lets_go ? calls : static_cast<int>(random() % 8);
  const auto leaves = std::chrono::microseconds(random() % 20000);
  ranks(drawn(random), world, network, false, [=, &network](const std::vector<int>& memory, const Options& options) {
    std::atomic<bool> failed{false};
    Rank rank(world, memory, options, seed, 3, [&] { return failed.load(); });
    std::mt19937 random(seed);
    std::thread leaver([&] {
      if (rank.rank || !lets_go) return;
      std::this_thread::sleep_for(leaves);
      network.cut();
      rank.staged->let_go();
    });
    for (int i = 0; i < calls; ++i) {
      const Call1 call = drawn_call(random, options, world);
      if (rank.rank || i < comes) rank.enqueue(call);
    }
    leaver.join();
    std::this_thread::sleep_for(milliseconds(60));
    std::vector<size_t> whole;
    for (size_t i = 0; i < rank.flights.size(); ++i)
      if ((rank.rank || !lets_go) && rank.gpu.reached(rank.flights[i].end)) whole.push_back(i);
    for (size_t i : whole) rank.check(i);
    network.cut();
    failed = true;
    if (seed % 2 && (rank.rank || lets_go)) {
      for (Stream stream : rank.streams) rank.gpu.synchronize(stream);  // the cores release them
      rank.enqueue(drawn_call(random, options, world));                 // and later ones
      for (Stream stream : rank.streams) rank.gpu.synchronize(stream);
    }
    const Deadline before = Clock::now();
    rank.finish();
    EXPECT(Clock::now() - before < milliseconds(4000), "rank %d took too long to end", rank.rank);
    rank.clear();
  });
}

// Rank 0 is simulated here: its input has arrived, then it has died. Rank 1 has done what it can.
void dead() {
  Options options;
  options.size = 2, options.rank = 1, options.chunk = 4096;
  const size_t bytes = HostStaged::segment_bytes(options);
  const std::vector<int> memory{Segment::create(bytes), Segment::create(bytes)};
  const Segment segment(memory[0], bytes);
  auto& head = *reinterpret_cast<StagingRing::Head*>(segment.data());
  head.settled = 1, head.arrived = 1;
  std::atomic<bool> failed{false};
  {
    Rank rank({{2}}, memory, options, 1, 0, [&] { return failed.load(); });
    Call1 call;
    call.count = 100;
    rank.enqueue(call);
    usleep(50000);
    EXPECT(head.reduced == 0u && !rank.gpu.reached(rank.flights[0].end), "nobody has reduced for rank 0");
    failed = true;
    for (Stream stream : rank.streams) rank.gpu.synchronize(stream);
    rank.finish();
    rank.clear();
  }
  for (int fd : memory) close(fd);
}

// Rank 0 waits for transfers in flight. After it has let go, nothing more is sent.
void carried() {
  const World world{{2}};
  Network network(world);
  std::atomic<int> calls{0};
  std::atomic<bool> sent{false}, failed{false};
  Options options;
  options.chunk = 4096;
  ranks(options, world, network, false, [&](const std::vector<int>& memory, Options options) {
    const auto until = [](auto met) {
      while (!met()) usleep(100);
    };
    options.hosts.count = 2;
    options.hosts.carry = [&](const Enqueued&, int, void*, int64_t) { ++calls, until([&] { return sent.load(); }); };
    Rank rank(world, memory, options, 1, 0, [&] { return failed.load(); });
    Call1 call;
    call.count = 4 * options.chunk / size_of(call.dtype);
    rank.enqueue(call);
    until([&] { return calls == 2 * Hosts::kLanes; });
    if (rank.rank == 0) {
      const Deadline grace = Clock::now() + milliseconds(150);
      std::atomic<bool> gone{false};
      std::thread leaver([&] { rank.staged->let_go(), gone = true; });
      usleep(50000);
      EXPECT(!gone || Clock::now() > grace, "rank 0 did not wait for what was on its way");
      sent = true;
      leaver.join();
    }
    usleep(50000);
    EXPECT(calls == 2 * Hosts::kLanes, "%d parts were sent in all", calls.load());
    failed = true;
    for (Stream stream : rank.streams) rank.gpu.synchronize(stream);
    rank.finish();
    rank.clear();
  });
}

}  // namespace

int main(int argc, char** argv) {
  EXPECT(argc == 4, "three arguments");
  const std::string what = argv[1];
  const int rounds = std::atoi(argv[2]);
  const auto seed = static_cast<unsigned>(std::atoi(argv[3]));
  const std::vector<World> several{{{2, 2}}, {{1, 1}}, {{1, 1, 1}}, {{2, 1}}, {{2, 2, 2}}, {{1, 3}}};
  for (int i = 0; i < rounds; ++i) {
    const unsigned number = seed + i;
    const int size = 1 + static_cast<int>(number) % 4;
    const World world{{size}}, &hosts = several[number % several.size()];
    if (what == "pairs") pairs(number % 2 ? world : hosts, number);
    if (what == "sequences" || what == "processes") sequences(world, 6, number, what == "processes");
    if (what == "dead") dead();
    if (what == "carried") carried();
    if (what == "leavers") leavers({{std::max(size, 2)}}, number);
    if (what == "hosts") sequences(hosts, 6, number, false);
    if (what == "host_leavers") leavers(hosts, number);
  }
  std::puts("ok");
}
