// Accelerators of ranks that are threads, over simulated GPUs, with kernels on threads: all collectives on several
// streams, then a different call, a missing rank, and an abort, after which every rank must end. With peer access and
// without. Arguments: rounds, seed. Prints "ok".
#include "cuda/accelerator.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <random>
#include <thread>

#include "communicator.h"
#include "fake_gpu.h"
#include "threads.h"

namespace hfreduce::gpu {
void on_stream(Stream stream, std::function<void()> kernel) { FakeGpu::run(stream, std::move(kernel)); }
}  // namespace hfreduce::gpu

using namespace hfreduce;

namespace {

constexpr milliseconds kPatience{20000};
struct Paths {
  const char* p2p;
  gpu::Path small, large;
  gpu::Path gather = gpu::Path::automatic;  // of all_gather, if different
  gpu::Path of(Kind kind, bool is_small) const {
    if (kind == Kind::all_gather && gather != gpu::Path::automatic) return gather;
    return is_small ? small : large;
  }
};

// One path for small messages and one for large ones, with few threads.
std::vector<gpu::DeviceRow> rows_of(const Paths& paths) {
  std::vector<gpu::DeviceRow> rows;
  for (Kind kind : {Kind::all_reduce, Kind::reduce_scatter, Kind::all_gather, Kind::broadcast}) {
    rows.push_back({kind, 12 << 10, paths.of(kind, true), 1, 32, 0});
    rows.push_back({kind, std::numeric_limits<int64_t>::max(), paths.of(kind, false), 1, 32, 1024});
  }
  return rows;
}

// A rank with its accelerator, and memory that serves as its device's.
struct Rank {
  Rank(Store& store, const Config& config, std::vector<gpu::DeviceRow> rows, unsigned seed)
      : c(store, config),
        gpu(new gpu::FakeGpu(seed, 5, "played " + std::to_string(config.rank))),
        accelerator(c, std::unique_ptr<gpu::Driver>(gpu), std::move(rows), kPatience) {
    for (gpu::Stream& stream : streams) stream = gpu->stream(false);
  }
  ~Rank() {
    accelerator.shutdown(milliseconds(5000));
    for (gpu::Stream stream : streams) gpu->destroy(stream);
    for (void* memory : kept) mine.release(memory);
  }
  float* memory(int64_t count) { return static_cast<float*>(mine.allocate(count * sizeof(float))); }
  // count: elements of all ranks together.
  gpu::Path by(Kind kind, int64_t count, Op op = Op::sum) const {
    return accelerator.path({kind, count * static_cast<int64_t>(sizeof(float)), DType::f32, op});
  }

  gpu::FakeGpu mine{0, 0};  // owns memory that outlives the accelerator
  Communicator c;
  gpu::FakeGpu* gpu;
  gpu::Accelerator accelerator;
  gpu::Stream streams[2];
  std::vector<void*> kept;  // until no stream can write to it
};

void collectives(Rank& r, int64_t count, gpu::Stream stream) {
  const int n = r.c.size(), me = r.c.rank();
  float* const x = r.memory(count * n);
  float* const y = r.memory(count * n);
  const auto settle = [&] {
    gpu::Event event = r.gpu->event();
    r.gpu->record(event, stream);
    while (!r.gpu->reached(event)) std::this_thread::yield();
    r.gpu->destroy_event(event);
  };
  for (int64_t i = 0; i < count * n; ++i) x[i] = static_cast<float>(me + i % 5);
  r.accelerator.all_reduce(r.by(Kind::all_reduce, count * n), x, y, count * n, DType::f32, {}, stream, kPatience);
  settle();
  for (int64_t i = 0; i < count * n; ++i) EXPECT(y[i] == static_cast<float>(n * (n - 1) / 2 + n * (i % 5)));
  r.accelerator.reduce_scatter(r.by(Kind::reduce_scatter, count * n, Op::max), x, y, count, DType::f32, {Op::max},
                               stream, kPatience);
  settle();
  for (int64_t i = 0; i < count; ++i) EXPECT(y[i] == static_cast<float>(n - 1 + (me * count + i) % 5));
  for (int64_t i = 0; i < count; ++i) x[i] = static_cast<float>(me);
  r.accelerator.all_gather(r.by(Kind::all_gather, count * n), x, y, count, DType::f32, stream, kPatience);
  r.accelerator.broadcast(r.by(Kind::broadcast, count), x, count, DType::f32, n - 1, stream, kPatience);
  settle();
  for (int64_t i = 0; i < count * n; ++i) EXPECT(y[i] == static_cast<float>(i / count));
  for (int64_t i = 0; i < count; ++i) EXPECT(x[i] == static_cast<float>(n - 1));
  r.mine.release(x), r.mine.release(y);
}

// Runs until the communicator fails, as it must. Returns the message.
std::string failure(Rank& r, bool copies, int64_t count, milliseconds timeout) {
  float* const x = r.memory(count * (r.c.size() + 1));
  r.kept.push_back(x);
  try {
    for (int i = 0; i < 2000; ++i) {
      if (copies)
        r.accelerator.all_gather(r.by(Kind::all_gather, count * r.c.size()), x, x + count, count, DType::f32,
                                 r.streams[i % 2], timeout);
      else
        r.accelerator.all_reduce(r.by(Kind::all_reduce, count), x, x, count, DType::f32, {}, r.streams[0], timeout);
      std::this_thread::sleep_for(milliseconds(5));
    }
  } catch (const Fault& fault) {
    return fault.what();
  }
  return "";
}

// The default paths, around the sizes at which they change.
void defaults(Store& store, const Config& config, bool peers) {
  Rank r(store, config, {}, 1);
  const auto path = [&](Kind kind, int64_t bytes, Op op = Op::sum) {
    return r.accelerator.path({kind, bytes, DType::f32, op});
  };
  const gpu::Path small = peers ? gpu::Path::packets : gpu::Path::mapped;
  const gpu::Path large = peers ? gpu::Path::two_shot : gpu::Path::mapped_two_shot;
  const int64_t most = (peers ? 512 << 10 : 32 << 10) / (config.size - 1);  // to each other rank
  EXPECT(path(Kind::broadcast, most) == small && path(Kind::broadcast, most + 4) == large);
  EXPECT(path(Kind::all_reduce, most) == small);
  EXPECT(path(Kind::all_reduce, most + 4) == (peers && config.size > 2 ? gpu::Path::packets_two_shot : large));
  EXPECT(path(Kind::all_reduce, (512 << 10) + 4) == large);
  for (Kind kind : {Kind::reduce_scatter, Kind::all_gather}) {
    EXPECT(path(kind, most * config.size) == small && path(kind, (most + 4) * config.size) == large);
  }
  EXPECT(path(Kind::all_reduce, 4, Op::premul_sum) == small);
  EXPECT(path(Kind::all_to_all, 0) == large);
  EXPECT(path(Kind::all_reduce, 16 << 20) == large && path(Kind::all_gather, 36 << 20) == large);
  const gpu::Path sums = path(Kind::all_reduce, 20 << 20);  // whichever is faster on this host
  EXPECT(sums == large || (!peers && sums == gpu::Path::staged));
  for (bool cores : {true, false}) {
    const gpu::Means means{2, false, true, true, false, true, cores};
    const auto by = [&](Kind kind) { return gpu::path_of({}, means, {kind, 1 << 30}); };
    EXPECT(by(Kind::all_reduce) == (cores ? gpu::Path::staged : gpu::Path::mapped_two_shot));
    EXPECT(by(Kind::reduce_scatter) == gpu::Path::mapped_two_shot && by(Kind::all_gather) == gpu::Path::staged);
  }
  EXPECT(path(Kind::reduce_scatter, 1 << 30) == large);
  EXPECT(path(Kind::all_gather, 1 << 30) == (peers ? large : gpu::Path::staged));
  EXPECT(path(Kind::broadcast, 25 << 20) == (peers ? large : gpu::Path::staged));
  EXPECT((r.accelerator.describe().find("kernels over mapped memory") != std::string::npos) != peers);
}

void rank(Store& store, const Config& config, const Paths& paths, int rounds, unsigned seed, const std::string& fault) {
  Rank r(store, config, rows_of(paths), seed + config.rank);
  for (Kind kind : {Kind::all_reduce, Kind::reduce_scatter, Kind::all_gather, Kind::broadcast}) {
    EXPECT(r.accelerator.path({kind, 12 << 10}) == paths.of(kind, true));
    EXPECT(r.accelerator.path({kind, 13 << 10}) == paths.of(kind, false));
  }
  const auto described = [&](const char* words) { return r.accelerator.describe().find(words) != std::string::npos; };
  const bool copies = paths.gather == gpu::Path::copies;
  EXPECT(described("CPU-assisted reduce") == (paths.p2p == std::string("0")));
  EXPECT(described("all_gather by copy engines") == copies);
  std::mt19937 random(seed);
  for (int i = 0; i < rounds; ++i) {
    collectives(r, static_cast<int64_t>(random() % 3000), r.streams[i % 2]);
    if (i % 3 == 0) r.c.barrier();
  }
  if (fault == "differs") {
    const std::string words = failure(r, copies, config.rank == 1 ? 101 : 100, kPatience);
    EXPECT(words.find("different collectives") != std::string::npos && words.find("of 101 f") != std::string::npos);
  } else if (fault == "late" && config.rank == 1) {
    while (!r.c.failed()) std::this_thread::sleep_for(milliseconds(1));
  } else if (fault == "late") {
    const std::string words = failure(r, copies, 100, milliseconds(300));
    EXPECT(words.find("Timed out") != std::string::npos && words.find("rank 1") != std::string::npos);
  } else if (fault == "abort") {
    std::thread other;
    if (config.rank == 1) other = std::thread([&] { r.c.abort("the end"); });
    // Kernels that are stopped leave slots that the next ones write while peers may still read them. That is harmless,
    // but ThreadSanitizer would report it.
    const int64_t count = paths.large != gpu::Path::staged ? 1000 : 100'000;
    EXPECT(failure(r, copies, count, kPatience).find("the end") != std::string::npos);
    if (other.joinable()) other.join();
  }
}

// Runs f(store, config) for each of three ranks.
template <class F>
void world(F f) {
  Notes store;
  std::vector<std::thread> ranks;
  for (int r = 0; r < 3; ++r) {
    Config config;
    config.rank = r, config.size = 3, config.slot_bytes = 4096, config.timeout = milliseconds(60000);
    config.interface = "127.0.0.1";
    ranks.emplace_back([&store, config, f] { f(store, config); });
  }
  for (std::thread& r : ranks) r.join();
}

}  // namespace

int main(int argc, char** argv) {
  const Given given(argc, argv);
  setenv("HFREDUCE_DEVICE_MESSAGES", "1", 1);
  for (bool peers : {true, false}) {
    setenv("HFREDUCE_P2P", peers ? "1" : "0", 1);
    world([&](Store& store, const Config& config) { defaults(store, config, peers); });
  }
  for (const Paths& paths :
       {Paths{"1", gpu::Path::packets, gpu::Path::two_shot},
        Paths{"1", gpu::Path::packets, gpu::Path::two_shot, gpu::Path::copies},
        Paths{"0", gpu::Path::mapped, gpu::Path::mapped_two_shot}, Paths{"0", gpu::Path::mapped, gpu::Path::staged},
        Paths{"0", gpu::Path::staged, gpu::Path::staged}}) {
    setenv("HFREDUCE_P2P", paths.p2p, 1);
    for (const char* const fault : {"", "differs", "late", "abort"}) {
#ifdef __SANITIZE_THREAD__
      // Released copies read what is being written. This is harmless, too.
      if (*fault && paths.gather == gpu::Path::copies) continue;
#endif
      world([&](Store& store, const Config& config) { rank(store, config, paths, given.rounds, given.seed, fault); });
    }
  }
  std::puts("ok");
}
