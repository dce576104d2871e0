// The kernels over peer memory and over host memory, on threads: ranks, blocks and GPU threads are all CPU threads, see
// emulated/cuda/p2p/device.cuh. Random calls one after another, then ranks that stop, are missing, or make a different
// call. Arguments: calls, seed. Prints "ok".
#include <unistd.h>

#include <condition_variable>
#include <cstdlib>
#include <mutex>
#include <stdexcept>
#include <thread>

#include "fake_gpu.h"
#include "kernel_cases.h"
#include "threads.h"

namespace hfreduce::gpu {
void on_stream(Stream, std::function<void()> work) { work(); }
}  // namespace hfreduce::gpu

using namespace hfreduce;
using cases::Case;
using cases::Kernel;

namespace {

// Exchanges the handles of all ranks.
class Table {
 public:
  explicit Table(int size) : handles_(size) {}
  std::vector<gpu::Handle> exchange(int rank, const gpu::Handle& mine) {
    std::unique_lock lock(mutex_);
    handles_[rank] = mine, ++come_;
    all_.notify_all();
    all_.wait(lock, [this] { return come_ == static_cast<int>(handles_.size()); });
    return handles_;
  }

 private:
  std::mutex mutex_;
  std::condition_variable all_;
  std::vector<gpu::Handle> handles_;
  int come_ = 0;
};

// Host memory of all ranks, which each of them maps.
class Shared {
 public:
  explicit Shared(int size) {
    for (int i = 0; i < size; ++i) files_.push_back(Segment::create(gpu::Peers::mapped_bytes(size)));
  }
  ~Shared() {
    for (int file : files_) close(file);
  }
  std::vector<Segment> map() const {
    std::vector<Segment> segments;
    for (int file : files_) segments.emplace_back(file, gpu::Peers::mapped_bytes(static_cast<int>(files_.size())));
    return segments;
  }

 private:
  std::vector<int> files_;
};

enum class Memory { device, host };

// Runs f(rank, its peers) on a thread for each rank. Frees the memory when all are done.
template <class F>
void world(int size, Memory memory, milliseconds limit, F f) {
  Table table(size);
  const Shared shared(size);
  std::vector<gpu::FakeGpu> devices(size);
  std::vector<std::unique_ptr<gpu::Peers>> peers(size);
  std::vector<std::thread> ranks;
  for (int r = 0; r < size; ++r)
    ranks.emplace_back([&, r] {
      const auto exchange = [&](const gpu::Handle& mine) { return table.exchange(r, mine); };
      peers[r] = memory == Memory::device ? std::make_unique<gpu::Peers>(devices[r], r, size, exchange, limit)
                                          : std::make_unique<gpu::Peers>(devices[r], r, shared.map(), limit);
      f(r, *peers[r]);
    });
  for (std::thread& r : ranks) r.join();
  peers.clear();
}

void perform(const Case& c, gpu::Peers& peers) {
  const int rank = peers.links().rank, size = peers.links().size;
  const cases::Memory m = cases::before(c, rank, size);
  // At the beginning of a line, as on a GPU.
  std::vector<char> room(m.bytes.size() + 128);
  char* memory = room.data() + -reinterpret_cast<uintptr_t>(room.data()) % 128;
  std::copy(m.bytes.begin(), m.bytes.end(), memory);
  cases::run(c, peers.links(), memory, m, nullptr);
  if (peers.board().stop) {
    std::fprintf(stderr, "rank %d of %d stopped in %s\n", rank, size, c.text().c_str());
    std::abort();
  }
  const std::string wrong = cases::differences(c, rank, size, {memory, memory + m.bytes.size()});
  if (wrong.empty()) return;
  std::fprintf(stderr, "%s\n", wrong.c_str());
  std::abort();
}

Case simple(Kernel kernel, unsigned fingerprint) {
  Case c{};
  c.kernel = kernel, c.dtype = DType::bf16, c.op = Op::sum, c.count = 700, c.seed = 1;
  c.launch = {nullptr, 2, 4, fingerprint, 256};
  return c;
}

void random_calls(int size, Memory memory, int calls, unsigned seed) {
  world(size, memory, std::chrono::seconds(30), [&](int, gpu::Peers& peers) {
    std::mt19937 random(seed);
    for (int i = 0; i < calls; ++i) perform(cases::draw(random, size, {3000, 3, 8, 4}), peers);
  });
}

// The largest messages that fit into packets in host memory, and one byte more.
void limits() {
  world(3, Memory::host, std::chrono::seconds(30), [&](int, gpu::Peers& peers) {
    for (int i = 0; i < cases::kOfPackets; ++i) {
      Case c = simple(static_cast<Kernel>(i), 9);
      c.dtype = DType::u8, c.launch.threads = 32;
      c.count = c.kernel == Kernel::packets_two_shot ? gpu::kMapped / 2 * 3 : gpu::kMapped;
      perform(c, peers);
      ++c.count;
      bool refused = false;
      try {
        perform(c, peers);
      } catch (const std::invalid_argument&) {
        refused = true;
      }
      EXPECT(refused);
    }
  });
}

// A rank takes no part. The others are stopped by the host or by the clock limit.
void missing(Kernel kernel, Memory memory, bool by_clock) {
  const milliseconds limit = by_clock ? milliseconds(30) : milliseconds(60000);
  world(3, memory, limit, [&](int rank, gpu::Peers& peers) {
    if (rank == 1) return;
    const Case c = simple(kernel, 5);
    cases::Memory m = cases::before(c, rank, 3);
    m.bytes.resize(m.bytes.size() + 16);
    std::thread host([&] {
      if (by_clock) return;
      std::this_thread::sleep_for(milliseconds(30));
      __atomic_store_n(&peers.links().board->stop, 1, __ATOMIC_RELEASE);
    });
    char* memory = m.bytes.data() + -reinterpret_cast<uintptr_t>(m.bytes.data()) % 16;
    cases::run(c, peers.links(), memory, m, nullptr);
    host.join();
    EXPECT(peers.board().stop == 1);
    // A rank that starts late may be overdue, too.
    const uint32_t overdue = peers.board().overdue;
    EXPECT(by_clock ? overdue != 0 && overdue != 1u + rank : overdue == 0);
    EXPECT(peers.board().differs == 0);
  });
}

// Rank 1 makes a different call. All ranks learn of it, from block 0 on.
void mismatch(Kernel mine, Kernel theirs, Memory memory = Memory::device) {
  world(3, memory, std::chrono::minutes(2), [&](int rank, gpu::Peers& peers) {
    perform(simple(Kernel::packets, 3), peers);
    perform(simple(Kernel::two_shot, 4), peers);
    const Case c = simple(rank == 1 ? theirs : mine, rank == 1 ? 77 : 5);
    cases::Memory m = cases::before(c, rank, 3);
    m.bytes.resize(m.bytes.size() + 16);
    char* memory = m.bytes.data() + -reinterpret_cast<uintptr_t>(m.bytes.data()) % 16;
    cases::run(c, peers.links(), memory, m, nullptr);
    const volatile gpu::Board& board = peers.board();
    EXPECT(board.stop == 1 && board.overdue == 0);
    EXPECT(rank == 1 ? board.differs == 1 || board.differs == 3 : board.differs == 2);
    EXPECT(board.theirs == (rank == 1 ? 5u : 77u));
  });
}

}  // namespace

int main(int argc, char** argv) {
  const Given given(argc, argv);
  for (int size : {2, 3, 4}) {
    random_calls(size, Memory::device, given.rounds, given.seed + size);
    random_calls(size, Memory::host, given.rounds / 2, given.seed + size);
  }
  limits();
  for (Kernel kernel :
       {Kernel::packets, Kernel::packets_two_shot, Kernel::broadcast_packets, Kernel::two_shot, Kernel::broadcast}) {
    for (bool by_clock : {false, true}) missing(kernel, Memory::device, by_clock);
    mismatch(kernel, kernel);
  }
  for (Kernel kernel : {Kernel::packets, Kernel::all_gather_packets, Kernel::two_shot, Kernel::broadcast}) {
    for (bool by_clock : {false, true}) missing(kernel, Memory::host, by_clock);
    mismatch(kernel, kernel, Memory::host);
  }
  for (Memory memory : {Memory::device, Memory::host}) mismatch(Kernel::packets, Kernel::two_shot, memory);
  mismatch(Kernel::all_gather, Kernel::packets_two_shot);
  mismatch(Kernel::all_gather_packets, Kernel::all_gather);
  std::puts("ok");
}
