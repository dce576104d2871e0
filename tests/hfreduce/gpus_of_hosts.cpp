// Accelerators over simulated GPUs of several hosts, connected by TCP. Ranks as threads: all collectives on two
// streams, with CPU collectives in between, then faults. Ranks as processes: a rank of the other host is killed or
// stopped during large messages. Arguments: rounds, seed. Prints "ok".
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <filesystem>
#include <fstream>
#include <random>
#include <thread>
#include <vector>

#include "communicator.h"
#include "cuda/accelerator.h"
#include "fake_gpu.h"
#include "threads.h"

using namespace hfreduce;

namespace {

constexpr milliseconds kPatience{20000};
// Released streams access memory that others use. That is harmless, but ThreadSanitizer would report it.
#ifdef __SANITIZE_THREAD__
constexpr bool kFaults = false;
#else
constexpr bool kFaults = true;
#endif

// A store for processes: one file per key.
class Folder : public Store {
 public:
  Folder() {
    char name[] = "/tmp/hfreduce-XXXXXX";
    EXPECT(mkdtemp(name));
    path_ = name;
  }
  ~Folder() override { std::filesystem::remove_all(path_); }
  void set(const std::string& key, const std::string& value) override {
    const std::string written = place(key) + "." + std::to_string(getpid());
    std::ofstream(written) << value;
    EXPECT(!rename(written.c_str(), place(key).c_str()));
  }
  std::optional<std::string> find(const std::string& key) override {
    std::ifstream file(place(key));
    if (!file) return std::nullopt;
    return std::string(std::istreambuf_iterator<char>(file), {});
  }

 private:
  std::string place(std::string key) const {
    for (char& c : key)
      if (c == '/') c = '_';
    return path_ + "/" + key;
  }
  std::string path_;
};

struct Rank {
  Rank(Store& store, const Config& config, unsigned seed)
      : c(store, config),
        gpu(new gpu::FakeGpu(seed * 16 + config.rank)),
        accelerator(c, std::unique_ptr<gpu::Driver>(gpu), {}, kPatience) {
    for (gpu::Stream& stream : streams) stream = gpu->stream(false);
  }
  ~Rank() {
    accelerator.shutdown(milliseconds(5000));
    for (gpu::Stream stream : streams) gpu->destroy(stream);
    for (void* memory : kept) mine.release(memory);
  }
  float* memory(int64_t count) {
    kept.push_back(mine.allocate(count * sizeof(float)));
    return static_cast<float*>(kept.back());
  }
  void settle() {
    for (gpu::Stream stream : streams) gpu->synchronize(stream);
  }
  bool takes(Kind kind) const { return accelerator.path({kind, 4096}) == gpu::Path::staged; }

  gpu::FakeGpu mine{0, 0};  // owns memory that outlives the accelerator
  Communicator c;
  gpu::FakeGpu* gpu;
  gpu::Accelerator accelerator;
  gpu::Stream streams[2];
  std::vector<void*> kept;
};

// All collectives at once, on two streams. A CPU collective between the same hosts does not wait for them.
void collectives(Rank& r, int64_t count, int root) {
  const int n = r.c.size(), me = r.c.rank();
  const bool blocks = r.takes(Kind::all_gather);
  float *x = r.memory(count * n), *sum = r.memory(count * n), *mean = r.memory(count * n), *part = r.memory(count);
  float *all = r.memory(count * n), *data = r.memory(count);
  for (int64_t i = 0; i < count * n; ++i) x[i] = static_cast<float>(me + i % 5);
  for (int64_t i = 0; i < count; ++i) data[i] = static_cast<float>(me == root ? i % 7 : -1);
  r.accelerator.all_reduce(gpu::Path::staged, x, sum, count * n, DType::f32, {}, r.streams[0], kPatience);
  r.accelerator.broadcast(gpu::Path::staged, data, count, DType::f32, root, r.streams[1], kPatience);
  r.accelerator.all_reduce(gpu::Path::staged, x, mean, count * n, DType::f32, {Op::avg}, r.streams[1], kPatience);
  float ones = 1;
  r.c.all_reduce(&ones, &ones, 1, DType::f32, {});
  EXPECT(ones == static_cast<float>(n));
  if (blocks)
    r.accelerator.reduce_scatter(gpu::Path::staged, x, part, count, DType::f32, {Op::max}, r.streams[0], kPatience);
  if (blocks) r.accelerator.all_gather(gpu::Path::staged, x, all, count, DType::f32, r.streams[1], kPatience);
  r.settle();
  for (int64_t i = 0; i < count * n; ++i) {
    const auto total = static_cast<float>(n * (n - 1) / 2 + n * (i % 5));
    EXPECT(sum[i] == total && mean[i] == total / static_cast<float>(n));
    if (blocks) EXPECT(all[i] == static_cast<float>(i / count + i % count % 5));
  }
  for (int64_t i = 0; i < count; ++i) {
    EXPECT(data[i] == static_cast<float>(i % 7));
    if (blocks) EXPECT(part[i] == static_cast<float>(n - 1 + (me * count + i) % 5));
  }
}

// All-reduces until the communicator fails, as it must. Returns the message.
std::string failure(Rank& r, int64_t count, milliseconds timeout) {
  float* const x = r.memory(count);
  try {
    for (int i = 0; i < 10000; ++i) {
      r.accelerator.all_reduce(gpu::Path::staged, x, x, count, DType::f32, {}, r.streams[0], timeout);
      r.settle();
    }
  } catch (const Fault& fault) {
    r.settle();  // streams are released
    return fault.what();
  }
  return "";
}

void thread(Store& store, const Config& config, int rounds, unsigned seed, const std::string& fault) {
  Rank r(store, config, seed);
  const bool last = config.rank == config.size - 1;
  EXPECT(r.takes(Kind::all_reduce) && r.takes(Kind::broadcast) && !r.takes(Kind::all_to_all));
  std::mt19937 random(seed);
  for (int i = 0; i < rounds; ++i) {
    const auto count = static_cast<int64_t>(random() % 3 ? random() % 3000 : random() % 600'000);
    collectives(r, count, static_cast<int>(random() % config.size));
  }
  if (fault == "differs") {
    const std::string words = failure(r, last ? 1001 : 1000, kPatience);
    EXPECT(words.find("different collectives") != std::string::npos && words.find("of 1001 f") != std::string::npos);
  } else if (fault == "late" && last) {
    while (!r.c.failed()) std::this_thread::sleep_for(milliseconds(1));
  } else if (fault == "late") {
    const std::string words = failure(r, 1'000'000, milliseconds(1000)), culprit = std::to_string(config.size - 1);
    EXPECT(words.find("Timed out") != std::string::npos && words.find("rank " + culprit) != std::string::npos);
  } else if (fault == "abort") {
    std::thread other;
    if (last) other = std::thread([&] { std::this_thread::sleep_for(milliseconds(30)), r.c.abort("the end"); });
    EXPECT(failure(r, 5'000'000, kPatience).find("the end") != std::string::npos);
    if (other.joinable()) other.join();
  }
}

// Two hosts with two ranks each. This signal ends or stops the last rank.
void process(Store& store, const Config& config, int number) {
  Rank r(store, config, 1);
  std::thread end;
  if (config.rank == 3) end = std::thread([=] { std::this_thread::sleep_for(milliseconds(300)), raise(number); });
  const std::string words = failure(r, 5'000'000, milliseconds(3000));
  EXPECT(words.find("rank 3 (") != std::string::npos);
  EXPECT(words.find(number == SIGKILL ? "has died" : "Timed out") != std::string::npos);
}

Config config_of(const std::string& hosts, int rank) {
  Config config;
  config.rank = rank, config.size = static_cast<int>(hosts.size()), config.slot_bytes = 4096;
  config.timeout = milliseconds(60000), config.interface = "127.0.0.1", config.host_id = hosts[rank];
  return config;
}

void processes(int number) {
  Folder store;
  std::vector<pid_t> children;
  for (int rank = 0; rank < 4; ++rank) {
    children.push_back(fork());
    if (children.back()) continue;
    process(store, config_of("aabb", rank), number);
    _exit(0);
  }
  for (int rank = 0; rank < 3; ++rank) {
    int status = 1;
    EXPECT(waitpid(children[rank], &status, 0) == children[rank] && status == 0);
  }
  kill(children[3], SIGKILL);
  EXPECT(waitpid(children[3], nullptr, 0) == children[3]);
}

}  // namespace

int main(int argc, char** argv) {
  const Given given(argc, argv);
  setenv("HFREDUCE_P2P", "0", 1);
  for (int number : {SIGKILL, SIGSTOP})
    if (kFaults) processes(number);
  for (const std::string hosts : {"aabb", "ab", "aab", "abab"})
    for (const char* const fault : {"", "differs", "late", "abort"}) {
      if (*fault && (!kFaults || hosts.size() < 4)) continue;
      Notes store;
      std::vector<std::thread> ranks;
      for (int rank = 0; rank < static_cast<int>(hosts.size()); ++rank)
        ranks.emplace_back([&, rank] { thread(store, config_of(hosts, rank), given.rounds, given.seed, fault); });
      for (std::thread& rank : ranks) rank.join();
    }
  std::puts("ok");
}
