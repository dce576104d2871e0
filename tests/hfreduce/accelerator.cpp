// Accelerators of ranks that are threads, over played GPUs without peer access: all collectives on several streams,
// then a call that differs, a rank that does not come, an abort; and every rank ends. Arguments: rounds, seed. Prints
// "ok".
#include "cuda/accelerator.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <thread>

#include "communicator.h"
#include "fake_gpu.h"
#include "threads.h"

using namespace hfreduce;

namespace {

// A rank with its accelerator, and memory that it may call its device's.
struct Rank {
  Rank(Store& store, const Config& config, unsigned seed)
      : c(store, config), gpu(new gpu::FakeGpu(seed)), accelerator(c, std::unique_ptr<gpu::Driver>(gpu), {}, patience) {
    for (gpu::Stream& stream : streams) stream = gpu->stream(false);
  }
  ~Rank() {
    accelerator.shutdown(milliseconds(5000));
    for (gpu::Stream stream : streams) gpu->destroy(stream);
    for (void* memory : kept) mine.release(memory);
  }
  float* memory(int64_t count) { return static_cast<float*>(mine.allocate(count * sizeof(float))); }

  static constexpr milliseconds patience{20000};
  gpu::FakeGpu mine{0, 0};  // of memory that outlives the accelerator's
  Communicator c;
  gpu::FakeGpu* gpu;
  gpu::Accelerator accelerator;
  gpu::Stream streams[2];
  std::vector<void*> kept;  // until no stream may write to it
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
  r.accelerator.all_reduce(x, y, count * n, DType::f32, {}, stream, r.patience);
  settle();
  for (int64_t i = 0; i < count * n; ++i) EXPECT(y[i] == static_cast<float>(n * (n - 1) / 2 + n * (i % 5)));
  r.accelerator.reduce_scatter(x, y, count, DType::f32, {Op::max}, stream, r.patience);
  settle();
  for (int64_t i = 0; i < count; ++i) EXPECT(y[i] == static_cast<float>(n - 1 + (me * count + i) % 5));
  for (int64_t i = 0; i < count; ++i) x[i] = static_cast<float>(me);
  r.accelerator.all_gather(x, y, count, DType::f32, stream, r.patience);
  r.accelerator.broadcast(x, count, DType::f32, n - 1, stream, r.patience);
  settle();
  for (int64_t i = 0; i < count * n; ++i) EXPECT(y[i] == static_cast<float>(i / count));
  for (int64_t i = 0; i < count; ++i) EXPECT(x[i] == static_cast<float>(n - 1));
  r.mine.release(x), r.mine.release(y);
}

// Until the communicator fails, as it must; what it says.
std::string failure(Rank& r, int64_t count, int64_t more, milliseconds timeout) {
  float* const x = r.memory(count + more);
  r.kept.push_back(x);
  try {
    for (int i = 0; i < 2000; ++i) {
      r.accelerator.all_reduce(x, x, count + more, DType::f32, {}, r.streams[0], timeout);
      std::this_thread::sleep_for(milliseconds(5));
    }
  } catch (const Fault& fault) {
    return fault.what();
  }
  return "";
}

void rank(Store& store, const Config& config, int rounds, unsigned seed, const std::string& fault) {
  Rank r(store, config, seed + config.rank);
  EXPECT(r.accelerator.path(Kind::all_reduce, 4, DType::f32, Op::sum) == gpu::Path::assisted);
  EXPECT(r.accelerator.path(Kind::all_to_all, 0, DType::f32, Op::sum) == gpu::Path::host);
  EXPECT(r.accelerator.describe().find("CPU-assisted reduce") != std::string::npos);
  std::mt19937 random(seed);
  for (int i = 0; i < rounds; ++i) {
    collectives(r, static_cast<int64_t>(random() % 3000), r.streams[i % 2]);
    if (i % 3 == 0) r.c.barrier();
  }
  if (fault == "differs") {
    const std::string words = failure(r, 100, config.rank == 1 ? 1 : 0, r.patience);
    EXPECT(words.find("different collectives") != std::string::npos && words.find("of 101 f") != std::string::npos);
  } else if (fault == "late" && config.rank == 1) {
    while (!r.c.failed()) std::this_thread::sleep_for(milliseconds(1));
  } else if (fault == "late") {
    const std::string words = failure(r, 100, 0, milliseconds(300));
    EXPECT(words.find("Timed out") != std::string::npos && words.find("rank 1") != std::string::npos);
  } else if (fault == "abort") {
    std::thread other;
    if (config.rank == 1) other = std::thread([&] { r.c.abort("the end"); });
    EXPECT(failure(r, 100'000, 0, r.patience).find("the end") != std::string::npos);
    if (other.joinable()) other.join();
  }
}

}  // namespace

int main(int argc, char** argv) {
  EXPECT(argc == 3);
  const int rounds = std::atoi(argv[1]);
  const auto seed = static_cast<unsigned>(std::atoi(argv[2]));
  for (const char* const fault : {"", "differs", "late", "abort"}) {
    Notes store;
    std::vector<std::thread> ranks;
    for (int r = 0; r < 3; ++r) {
      Config config;
      config.rank = r, config.size = 3, config.slot_bytes = 4096, config.timeout = milliseconds(60000);
      config.interface = "127.0.0.1";
      ranks.emplace_back([&store, config, rounds, seed, fault] { rank(store, config, rounds, seed, fault); });
    }
    for (std::thread& r : ranks) r.join();
  }
  std::puts("ok");
}
