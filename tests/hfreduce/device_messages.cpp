// Messages between ranks that are threads, over simulated GPUs that reach each other's memory: all pairs at once, on
// separate streams and on one; receives from any rank beside those from one rank; then faults. Arguments: rounds, seed.
// Prints "ok".
#include "cuda/p2p/device_messages.h"

#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <random>
#include <thread>

#include "fake_gpu.h"
#include "threads.h"

using namespace hfreduce;

namespace {

constexpr int kRanks = 3;
constexpr milliseconds kPatience{20000};
using Segments = std::shared_ptr<const std::vector<Segment>>;
using Options = gpu::DeviceMessages::Options;

// A rank. Its message buffers live until its streams have ended.
struct Rank {
  Rank(Store& store, const Config& config, const Segments& segments, const Options& options, unsigned seed,
       std::atomic<int>& met)
      : met(met), c(store, config), gpu(seed + config.rank, 20), messages(c, gpu, segments, options) {
    for (gpu::Stream& stream : streams) stream = gpu.stream(false);
    gpu.pin(page, sizeof(page));
  }
  ~Rank() {
    EXPECT(messages.empty_by(Clock::now() + milliseconds(3000)));
    messages.quit();
    meet();
    for (gpu::Stream stream : streams) gpu.destroy(stream);
    gpu.unpin(page);
    for (void* memory : kept) gpu.release(memory);
  }
  // A barrier of all ranks, which works even after their communicators have failed.
  void meet() {
    meetings += kRanks;
    for (++met; met < meetings;) std::this_thread::yield();
  }
  // Streams wait for it until open() is called.
  uint32_t* gate() { return reinterpret_cast<uint32_t*>(page); }
  void open() { __atomic_store_n(gate(), 1u, __ATOMIC_SEQ_CST); }
  int32_t* memory(int64_t count) {
    std::lock_guard lock(mutex);
    kept.push_back(gpu.allocate(count * sizeof(int32_t)));
    return static_cast<int32_t*>(kept.back());
  }
  void send(const int32_t* data, int64_t count, int to, int tag, gpu::Stream stream, milliseconds timeout = kPatience) {
    if (messages.sends(to, tag)) return messages.send(data, count, DType::i32, to, stream, timeout);
    gpu.synchronize(stream);
    c.send(data, count, DType::i32, to, tag, timeout);
  }
  Received recv(int32_t* data, int64_t count, int from, int tag, gpu::Stream stream, milliseconds timeout = kPatience) {
    const auto take = [&](const Received& message, const Watch& watch) {
      if (++taken % 3 == 0) std::this_thread::sleep_for(std::chrono::microseconds(taken * 97 % 400));
      messages.take(data, message, watch, stream);
    };
    const Received got = c.receive([&] { return data; }, take, count, DType::i32, from, tag, timeout);
    if (!got.ticket) messages.offer(got.from);
    return got;
  }
  // After this, messages to `to` and from `from` go from device to device.
  void acquaint(int to, int from) {
    int32_t* const x = memory(1);
    send(x, 1, to, 0, streams[0]);
    EXPECT(!recv(x, 1, from, 0, streams[0]).ticket);
    c.barrier();
    EXPECT(messages.sends(to, 0) && messages.why_not().empty());
  }

  std::atomic<int>& met;
  int meetings = 0;
  Communicator c;
  gpu::FakeGpu gpu;
  gpu::DeviceMessages messages;
  gpu::Stream streams[2 * kRanks];
  std::atomic<int> taken{0};
  alignas(64) char page[64] = {};
  std::mutex mutex;
  std::vector<void*> kept;
};

struct Letter {
  int64_t count;
  int tag;
  int32_t value(int64_t i) const { return static_cast<int32_t>(count * 7 + tag + i); }
};

// Sizes are often those of chunks and rings, or off by one.
std::vector<Letter> letters(unsigned seed, int from, int to, const Options& options) {
  std::mt19937 random(seed * 64 + from * 8 + to);
  const int64_t chunk = options.chunk / 4, sizes[] = {0, 1, chunk, chunk * options.depth, 3 * chunk * options.depth};
  std::vector<Letter> all;
  for (int i = 0; i < 24; ++i) {
    const int64_t near = sizes[random() % 5] + static_cast<int64_t>(random() % 3) - 1;
    all.push_back({std::max<int64_t>(near, 0), random() % 5 ? 0 : 3});
  }
  return all;
}

// From every rank to every other one, with a thread for each pair and direction. single: on one stream. Returns how
// many messages came from device to device.
int pairs(Rank& r, const Options& options, unsigned seed, bool single) {
  std::vector<std::thread> threads;
  std::atomic<int> by_device{0};
  const int me = r.c.rank();
  struct Arrival {
    Letter letter;
    const int32_t* data;
  };
  std::vector<Arrival> arrivals[kRanks];
  for (int other = 0; other < kRanks; ++other) {
    if (other == me) continue;
    threads.emplace_back([&, other] {
      for (const Letter& letter : letters(seed, me, other, options)) {
        int32_t* const data = r.memory(letter.count);
        for (int64_t i = 0; i < letter.count; ++i) data[i] = letter.value(i);
        r.send(data, letter.count, other, letter.tag, r.streams[single ? 0 : other]);
      }
    });
    threads.emplace_back([&, other] {
      for (const Letter& letter : letters(seed, other, me, options)) {
        int32_t* const data = r.memory(letter.count);
        arrivals[other].push_back({letter, data});
        const gpu::Stream stream = r.streams[single ? 0 : kRanks + other];
        const Received got = r.recv(data, letter.count, other, letter.tag, stream);
        EXPECT(got.from == other && (!got.ticket || letter.tag == 0));
        by_device += got.ticket != 0;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (gpu::Stream stream : r.streams) r.gpu.synchronize(stream);
  for (const auto& from : arrivals)
    for (const auto& [letter, data] : from)
      for (int64_t i = 0; i < letter.count; ++i) EXPECT(data[i] == letter.value(i));
  return by_device;
}

// Rank 1 sends 3 n messages to rank 0, and rank 2 sends n. Rank 0 receives n from rank 1 and 2 n from any rank, both at
// once, and then the rest.
void from_anybody(Rank& r, bool single) {
  constexpr int kEach = 20;
  constexpr int64_t kCount = 300;
  const int me = r.c.rank();
  for (int i = 0; me && i < (me == 1 ? 3 : 1) * kEach; ++i) {
    int32_t* const data = r.memory(kCount);
    std::fill_n(data, kCount, 1000 * me + i);
    r.send(data, kCount, 0, 0, r.streams[0]);
  }
  std::vector<std::pair<int, const int32_t*>> got[2];
  const auto receives = [&](int from, int times, auto& list, gpu::Stream stream) {
    for (int i = 0; i < times; ++i) {
      int32_t* const data = r.memory(kCount);
      list.emplace_back(r.recv(data, kCount, from, 0, stream).from, data);
    }
  };
  if (me == 0) {
    std::thread other([&] { receives(1, kEach, got[0], r.streams[single ? 1 : 0]); });
    receives(-1, 2 * kEach, got[1], r.streams[1]);
    other.join();
    receives(-1, kEach, got[1], r.streams[2]);
  }
  for (gpu::Stream stream : r.streams) r.gpu.synchronize(stream);
  std::vector<int32_t> seen;
  for (const auto& list : got)
    for (const auto& [from, data] : list) {
      EXPECT(std::all_of(data, data + kCount, [&](int32_t value) { return value == data[0]; }));
      EXPECT(data[0] / 1000 == from);
      seen.push_back(data[0]);
    }
  std::sort(seen.begin(), seen.end());
  for (size_t i = 0; i < seen.size(); ++i)
    EXPECT(seen[i] == static_cast<int32_t>(i < 3 * kEach ? 1000 + i : 2000 + i - 3 * kEach));
}

// Three messages, of which two fit into the ring. The first is received on a stream that is busy.
void overtaken(Rank& r, const Options& options) {
  const int64_t count = options.chunk / 4 * options.depth / 2;
  if (r.c.rank() == 2) return r.c.barrier();
  r.acquaint(1 - r.c.rank(), 1 - r.c.rank());
  int32_t* data[3];
  for (auto& each : data) each = r.memory(count);
  if (r.c.rank() == 1) {
    for (int i = 0; i < 3; ++i) std::fill_n(data[i], count, i + 1);
    for (const auto* each : data) r.send(each, count, 0, 0, r.streams[0]);
    return;
  }
  r.gpu.wait(r.gate(), 1, r.streams[1]);
  std::thread later([&] { std::this_thread::sleep_for(milliseconds(60)), r.open(); });
  for (int i = 0; i < 3; ++i) r.recv(data[i], count, 1, 0, r.streams[1 + (i > 0)]);
  later.join();
  for (gpu::Stream stream : r.streams) r.gpu.synchronize(stream);
  for (int i = 0; i < 3; ++i) EXPECT(std::all_of(data[i], data[i] + count, [&](int32_t x) { return x == i + 1; }));
}

// The message of the fault that `call` throws.
template <class F>
std::string failure(F call) {
  try {
    call();
  } catch (const Fault& fault) {
    return fault.what();
  }
  return "";
}
bool has(const std::string& text, const char* words) { return text.find(words) != std::string::npos; }

// Rank 1 sends, rank 0 receives, and rank 2 learns of the fault.
void goes_wrong(Rank& r, const Options& options, const std::string& fault) {
  const int me = r.c.rank();
  r.acquaint((me + 1) % kRanks, (me + 2) % kRanks), r.acquaint((me + 2) % kRanks, (me + 1) % kRanks);
  const int64_t ring = options.chunk / 4 * options.depth, count = fault == "stuck" ? ring : 2 * ring;
  int32_t* const data = r.memory(count + 1);
  const milliseconds soon(fault == "size" ? 20000 : 400);
  const bool stuck = fault.rfind("stuck", 0) == 0;
  std::string words;
  if (me == 1 && stuck) r.gpu.wait(r.gate(), 1, r.streams[0]);
  if (me == 1)
    words = failure([&] { r.send(data, count, 0, 0, r.streams[0], soon); });
  else if (me == 0 && fault == "size")
    words = failure([&] { r.recv(data, count + 1, 1, 0, r.streams[1]); });
  else if (me == 0 && stuck)
    words = failure([&] { r.recv(data, count, 1, 0, r.streams[1], soon); });
  else if (me == 2 && fault == "abort")
    std::this_thread::sleep_for(milliseconds(50)), r.c.abort("the end");
  const std::string later = failure([&] {
    while (true) r.c.check(), std::this_thread::sleep_for(milliseconds(1));
  });
  EXPECT(words.empty() || words == later);
  if (fault == "size") EXPECT(has(later, "Both sides must give the same") && has(later, "rank 1"));
  if (fault == "late") EXPECT(has(later, "Timed out") && has(later, "waiting for rank 0") && has(later, "send number"));
  if (fault == "stuck")
    EXPECT(has(later, "Timed out") && has(later, "waiting for rank 1") && has(later, "recv number"));
  if (fault == "abort") EXPECT(has(later, "the end"));
  if (me == 0) r.gpu.synchronize(r.streams[1]);  // it was released, while the sender's stream is stuck
  r.meet();
  r.open();
}

// A message that fits into the ring arrives although its sender has left and this device is busy.
void left(Rank& r, const Options& options) {
  const int64_t count = options.chunk / 4 * options.depth;
  int32_t* const data = r.memory(count);
  if (r.c.rank() == 1) {
    std::fill_n(data, count, 5);
    r.acquaint(0, 0);
    r.send(data, count, 0, 0, r.streams[0]);
    EXPECT(r.messages.empty_by(Clock::now() + milliseconds(3000)));
    r.c.shutdown();
  } else if (r.c.rank() == 0) {
    r.acquaint(1, 1);
    r.gpu.wait(r.gate(), 1, r.streams[1]);
    EXPECT(r.recv(data, count, 1, 0, r.streams[1]).ticket);
    std::this_thread::sleep_for(milliseconds(400));
    EXPECT(!r.c.failed());
    r.open();
    r.gpu.synchronize(r.streams[1]);
    EXPECT(std::all_of(data, data + count, [](int32_t value) { return value == 5; }));
  } else {
    r.c.barrier();
  }
}

void job(const std::string& what, unsigned seed) {
  std::mt19937 random(seed);
  Options options;
  options.chunk = 512 << random() % 2;
  options.depth = 2 << random() % 3;
  options.first = 0u - random() % 40;
  std::vector<Segment> segments;
  for (int r = 0; r < kRanks; ++r) {
    const size_t bytes = gpu::DeviceMessages::segment_bytes(kRanks);
    const int fd = Segment::create(bytes);
    segments.emplace_back(fd, bytes);
    close(fd);
  }
  const auto shared = std::make_shared<const std::vector<Segment>>(std::move(segments));
  Notes store;
  std::atomic<int> met{0};
  std::vector<std::thread> ranks;
  for (int rank = 0; rank < kRanks; ++rank)
    ranks.emplace_back([&, rank] {
      Config config;
      config.rank = rank, config.size = kRanks, config.slot_bytes = 4096, config.timeout = milliseconds(60000);
      config.interface = "127.0.0.1";
      Rank r(store, config, shared, options, seed, met);
      if (what == "pairs" || what == "single") {
        pairs(r, options, seed, what == "single");
        r.c.barrier();
        EXPECT(pairs(r, options, seed + 1, what == "single") > 24);
        return;
      }
      if (what == "anybody") return from_anybody(r, seed % 2);
      if (what == "overtaken") return overtaken(r, options);
      if (what == "left") return left(r, options);
      goes_wrong(r, options, what);
    });
  for (std::thread& rank : ranks) rank.join();
}

}  // namespace

int main(int argc, char** argv) {
  const Given given(argc, argv);
  for (int i = 0; i < given.rounds; ++i)
    for (const char* const what :
         {"pairs", "single", "anybody", "overtaken", "left", "size", "late", "stuck", "stuck large", "abort"})
      job(what, given.seed + i);
  std::puts("ok");
}
