// The all-gather by copy engines over GPUs simulated on threads, with checked bytes. Ranks are threads. The first
// argument selects the test:
//   sequences   calls of any size, in place or not, on two streams
//   missing     one rank misses some calls: no stream hangs, and no rank takes invalid data
//   late        one rank comes to some calls when the others have let go: its writes lower flags that they raised
//   leaving     one rank lets go in the middle: the others get all that it gave its streams
// Then rounds and seed. Prints "ok".
#include "cuda/p2p/copies.h"

#include <unistd.h>

#include <string>

#include "collectives/host/slots.h"
#include "fake_gpu.h"
#include "threads.h"

using namespace hfreduce;
using namespace hfreduce::gpu;

namespace {

// One call, drawn equally on all ranks.
struct Gather {
  int64_t bytes;
  int stream;
  bool in_place;
  unsigned seed;
  char byte(int rank, int64_t i) const { return static_cast<char>((i * 2654435761u >> 13) ^ (seed + 77 * rank)); }
};

// Ranks that are threads of this process.
struct Group {
  explicit Group(const Copies::Options& options) : options(options), handles(options.size) {
    for (int r = 0; r < options.size; ++r) memory.push_back(Segment::create(Copies::segment_bytes()));
  }
  ~Group() {
    for (int fd : memory) close(fd);
  }
  // A barrier.
  void meet() {
    std::unique_lock lock(mutex);
    const int round = come++ / options.size + 1;
    all.notify_all();
    all.wait(lock, [&] { return come >= round * options.size; });
  }

  const Copies::Options options;
  std::vector<int> memory;
  std::vector<Handle> handles;
  std::mutex mutex;
  std::condition_variable all;
  int come = 0;
};

class Rank {
 public:
  Rank(Group& group, int rank, unsigned seed) : gpu(seed * 64 + rank, 4), group(group), rank(rank) {
    std::vector<Segment> segments;
    for (int fd : group.memory) segments.emplace_back(fd, Copies::segment_bytes());
    Copies::Options options = group.options;
    options.rank = rank;
    copies = std::make_unique<Copies>(gpu, std::move(segments), options);
    group.handles[rank] = copies->handle();
    group.meet();
    copies->open(group.handles);
    for (Stream& stream : streams) stream = gpu.stream(false);
    last = gpu.event();
  }
  ~Rank() {
    for (Stream stream : streams) gpu.synchronize(stream);
    group.meet();  // nobody writes to the rings any more
    const Deadline before = Clock::now();
    copies.reset();
    EXPECT(Clock::now() - before < milliseconds(2000));
    clear();
    for (Stream stream : streams) gpu.destroy(stream);
    gpu.destroy_event(last);
  }

  void enqueue(const Gather& call) {
    const Stream stream = streams[call.stream];
    const int64_t whole = call.bytes * group.options.size;
    Flight flight{call, gpu.allocate(call.bytes), gpu.allocate(call.bytes), gpu.allocate(whole), gpu.event()};
    for (int64_t i = 0; i < call.bytes; ++i) *at(flight.source, i) = call.byte(rank, i);
    void* const in = call.in_place ? at(flight.out, rank * call.bytes) : flight.in;
    gpu.copy(in, flight.source, call.bytes, stream);  // maybe late
    gpu.wait_event(last, stream);
    copies->all_gather(in, flight.out, call.bytes, stream);
    gpu.record(last, stream);
    gpu.copy(flight.in, flight.out, call.bytes, stream);  // `in` may be overwritten now
    gpu.record(flight.end, stream);
    flights.push_back(flight);
  }
  void let_go_until_ended() {
    for (const Deadline limit = Clock::now() + milliseconds(10000); !flights.empty() && !ended(flights.size() - 1);) {
      EXPECT(Clock::now() < limit);
      copies->let_go();
      usleep(2000);
    }
  }
  bool ended(size_t i) { return gpu.reached(flights[i].end); }
  void check(size_t flight) {
    const auto& [call, source, in, out, end] = flights[flight];
    for (int r = 0; r < group.options.size; ++r)
      for (int64_t i = 0; i < call.bytes; ++i) EXPECT(*at(out, r * call.bytes + i) == call.byte(r, i));
  }
  void check_all() {
    for (Stream stream : streams) gpu.synchronize(stream);
    for (size_t i = 0; i < flights.size(); ++i) check(i);
    clear();
  }
  void clear() {
    for (const Flight& flight : flights) {
      for (void* memory : {flight.source, flight.in, flight.out}) gpu.release(memory);
      gpu.destroy_event(flight.end);
    }
    flights.clear();
  }

  struct Flight {
    Gather call;
    void *source, *in, *out;
    Event end;
  };
  FakeGpu gpu;
  Group& group;
  const int rank;
  Stream streams[2];
  Event last;
  std::unique_ptr<Copies> copies;
  std::vector<Flight> flights;
};

// Runs f for each rank, with a random generator that is equal on all of them.
template <class F>
void ranks(int size, unsigned seed, milliseconds grace, F f) {
  std::mt19937 random(seed);
  Copies::Options options;
  options.size = size, options.grace = grace;
  options.chunk = 4096 << random() % 2, options.least = 64 << random() % 7, options.depth = 2 << random() % 2;
  options.first = 0u - random() % 60;
  Group group(options);
  std::vector<std::thread> threads;
  for (int r = 0; r < size; ++r)
    threads.emplace_back([&, r, random]() mutable {
      Rank rank(group, r, seed);
      f(rank, random);
    });
  for (std::thread& thread : threads) thread.join();
}

// Sizes are often those of chunks and rings, or off by one.
Gather drawn(std::mt19937& random, const Copies::Options& options) {
  const int64_t sizes[] = {1, 64, options.least, options.chunk, options.chunk * options.depth};
  const int64_t near = sizes[random() % 5] + static_cast<int64_t>(random() % 3) - 1;
  Gather call;
  call.bytes = random() % 3 ? near : static_cast<int64_t>(random() % 60000);
  call.stream = static_cast<int>(random() % 2);
  call.in_place = random() % 2;
  call.seed = random();
  return call;
}

void sequences(int size, unsigned seed) {
  ranks(size, seed, milliseconds(200), [](Rank& rank, std::mt19937& random) {
    for (int i = 0; i < 5; ++i) {
      for (int calls = 1 + static_cast<int>(random() % 10); calls; --calls)
        rank.enqueue(drawn(random, rank.group.options));
      rank.check_all();
    }
  });
}

// The ranks that wait for rank 0 let go, at different times.
void missing(int size, unsigned seed) {
  ranks(size, seed, milliseconds(20), [](Rank& rank, std::mt19937& random) {
    const size_t calls = 20, comes = random() % 8;
    for (size_t i = 0; i < calls; ++i) {
      const Gather call = drawn(random, rank.group.options);
      if (rank.rank || i < comes) rank.enqueue(call);
    }
    for (size_t i = 0; i < comes; ++i) {
      while (!rank.ended(i)) usleep(100);
      rank.check(i);
    }
    usleep(random() % 3000 * rank.rank);
    for (size_t i = comes; i < rank.flights.size(); ++i)
      if (rank.flights[i].call.bytes) EXPECT(!rank.ended(i));
    rank.let_go_until_ended();
  });
}

void late(int size, unsigned seed) {
  ranks(size, seed, milliseconds(20), [](Rank& rank, std::mt19937& random) {
    alignas(kLine) uint32_t gate = 0;
    rank.gpu.pin(&gate, sizeof(gate));
    for (Stream stream : rank.streams) rank.gpu.wait(&gate, rank.rank ? 1 : 0, stream);
    if (!rank.rank) rank.group.meet();
    for (int calls = rank.rank ? 20 : 2; calls; --calls) rank.enqueue(drawn(random, rank.group.options));
    if (rank.rank) rank.copies->let_go(), rank.group.meet();
    usleep(20000);  // meanwhile rank 0 gives and writes flags
    __atomic_store_n(&gate, 1u, __ATOMIC_SEQ_CST);
    rank.let_go_until_ended();
    for (Stream stream : rank.streams) rank.gpu.synchronize(stream);
    rank.gpu.unpin(&gate);
  });
}

// Rank 0 lets go as soon as the others have their data, long before the grace time ends.
void leaving(int size, unsigned seed) {
  ranks(size, seed, milliseconds(25000), [](Rank& rank, std::mt19937& random) {
    for (int calls = 10; calls; --calls) rank.enqueue(drawn(random, rank.group.options));
    usleep(random() % 3000);
    const Deadline before = Clock::now();
    if (rank.rank == 0) rank.copies->let_go();
    EXPECT(Clock::now() - before < milliseconds(20000));
    if (rank.rank) rank.check_all();
  });
}

}  // namespace

int main(int argc, char** argv) {
  EXPECT(argc == 4);
  const std::string what = argv[1];
  const int rounds = std::atoi(argv[2]);
  const auto seed = static_cast<unsigned>(std::atoi(argv[3]));
  for (int i = 0; i < rounds; ++i) {
    const int size = 2 + (static_cast<int>(seed) + i) % 3;
    if (what == "sequences") sequences(i % 8 ? size : 1, seed + i);
    if (what == "missing") missing(size, seed + i);
    if (what == "late") late(size, seed + i);
    if (what == "leaving") leaving(size, seed + i);
  }
  std::puts("ok");
}
