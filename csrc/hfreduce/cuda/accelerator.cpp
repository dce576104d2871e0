#include "cuda/accelerator.h"

#include <algorithm>
#include <atomic>
#include <limits>
#include <mutex>

#include "cuda/assisted.h"
#include "cuda/in_flight.h"
#include "cuda/meeting.h"
#include "cuda/peers.h"
#include "reduce.h"

namespace hfreduce::gpu {

namespace {

// Sent by a rank in packets, up to which a second trip costs more than sending everything to all.
constexpr int64_t kPacketBytes = 512 << 10;
// A block of two_shot takes 16 KiB at least, or its steps cost more than they move. 64 blocks reach 0.9 of what the
// links carry, steadily; 128 reach all, but fall to a quarter of it in some calls (docs/notes/hfreduce_gpu.md).
constexpr int64_t kBlockBytes = 16 << 10, kPacketBlockBytes = 4 << 10;
constexpr int kBlocks = 64, kPacketBlocks = 32, kThreads = 512;
constexpr milliseconds kGoodbye{3000};  // ranks that leave later than that leave their peers' memory where it is

Call call_of(Kind kind, int64_t count, DType dtype, Op op = Op::sum, int root = -1, double factor = 1.0) {
  Call call;
  call.kind = kind, call.count = count, call.dtype = dtype, call.op = op, call.root = root, call.factor = factor;
  return call;
}

// FNV-1a of what ranks must agree on, but for the number: a captured call has another one when it is replayed.
uint32_t fingerprint(const Call& call) {
  uint32_t hash = 2166136261u;
  const auto add = [&](uint64_t value) {
    for (int i = 0; i < 8; ++i) hash = (hash ^ ((value >> (8 * i)) & 255)) * 16777619u;
  };
  add(static_cast<uint64_t>(call.kind) | static_cast<uint64_t>(call.dtype) << 8 | static_cast<uint64_t>(call.op) << 16);
  add(static_cast<uint64_t>(call.count));
  add(static_cast<uint64_t>(call.root));
  return hash ? hash : 1;
}

bool reduction(Kind kind) { return kind == Kind::all_reduce || kind == Kind::reduce_scatter; }

}  // namespace

const char* name(Path path) {
  constexpr const char* names[] = {"packets", "packets_two_shot", "one_shot", "two_shot", "assisted",
                                   "host",    "automatic"};
  return names[static_cast<int>(path)];
}

struct Accelerator::State {
  State(Communicator& communicator, std::unique_ptr<Driver> driver, std::vector<Row> rows, milliseconds timeout);

  void make_assisted(milliseconds timeout);
  int64_t most(Path path) const {  // bytes that it takes
    if (path == Path::packets) return kPackets;
    if (path == Path::packets_two_shot) return packets_two_shot_bytes(communicator.size());
    return std::numeric_limits<int64_t>::max();
  }
  bool takes(Path path, Kind kind, int64_t bytes, DType dtype, Op op) const;
  const Row* row(Kind kind, int64_t bytes, DType dtype, Op op) const;
  Path path(Kind kind, int64_t bytes, DType dtype, Op op) const;
  Launch launch(const Call& call, int64_t bytes, Path path, Stream stream) const;
  // Numbers, orders, runs and watches one operation. bytes: see path; work(path, launch) enqueues it.
  template <class Work>
  void enqueue(const Call& call, int64_t bytes, int64_t bytes_in, int64_t bytes_out, Stream stream,
               milliseconds timeout, Work work);
  void look(const Enqueued& oldest);
  void stop();

  Communicator& communicator;
  std::unique_ptr<Driver> driver;
  std::vector<Row> rows;
  std::string why_no_peers, why_no_assisted;
  std::unique_ptr<Peers> peers;
  std::unique_ptr<Assisted> assisted;
  const std::shared_ptr<std::atomic<bool>> stopped = std::make_shared<std::atomic<bool>>(false);
  std::mutex order;  // of what is enqueued
  std::unique_ptr<InFlight> in_flight;
  bool ended = false;
};

Accelerator::State::State(Communicator& communicator, std::unique_ptr<Driver> given, std::vector<Row> wanted,
                          milliseconds timeout)
    : communicator(communicator), driver(std::move(given)), rows(agree(communicator, std::move(wanted), timeout)) {
  const bool kernels = reduces(DType::f32, Op::sum);
  why_no_peers = agree(communicator, kernels ? "" : "hfreduce was built without nvcc", timeout);
  if (why_no_peers.empty()) why_no_peers = forbidden(communicator, *driver, timeout);
  if (why_no_peers.empty()) why_no_peers = connect(communicator, *driver, timeout, peers);
  communicator.on_failure([stopped = stopped] { stopped->store(true); });  // who makes something waits for the others
  const bool asked = std::any_of(rows.begin(), rows.end(), [](const Row& row) { return row.path == Path::assisted; });
  if (!peers || asked) make_assisted(timeout);
  in_flight = std::make_unique<InFlight>(communicator, *driver, [this](const Enqueued& oldest) { look(oldest); });
  communicator.on_failure([this] { stop(); });
}

void Accelerator::State::make_assisted(milliseconds timeout) {
  Assisted::Options options;
  options.rank = communicator.rank(), options.size = communicator.size();
  why_no_assisted = ordered(communicator, *driver, timeout);
  if (!why_no_assisted.empty()) return;
  std::vector<Segment> segments = communicator.share(Assisted::segment_bytes(options), timeout);
  why_no_assisted = attempt(communicator, timeout, [&] {
    assisted = std::make_unique<Assisted>(*driver, std::move(segments), options,
                                          [stopped = stopped] { return stopped->load(std::memory_order_relaxed); });
  });
  if (!why_no_assisted.empty()) assisted.reset();
}

bool Accelerator::State::takes(Path path, Kind kind, int64_t bytes, DType dtype, Op op) const {
  const bool ours = kind == Kind::all_gather || kind == Kind::broadcast || reduction(kind);
  switch (path) {
    case Path::packets:
    case Path::packets_two_shot:
    case Path::one_shot:
      return peers && kind == Kind::all_reduce && bytes <= most(path) && reduces(dtype, op);
    case Path::two_shot:
      return peers && (ours || kind == Kind::all_to_all) && (!reduction(kind) || reduces(dtype, op));
    case Path::assisted:
      return assisted && ours && (!reduction(kind) || supported(dtype, op));
    default:
      return path == Path::host;
  }
}

const Row* Accelerator::State::row(Kind kind, int64_t bytes, DType dtype, Op op) const {
  for (const Row& row : rows) {
    if (row.kind != kind || bytes > row.max_bytes) continue;
    if (row.path == Path::automatic) return nullptr;
    if (takes(row.path, kind, bytes, dtype, op)) return &row;
  }
  return nullptr;
}

Path Accelerator::State::path(Kind kind, int64_t bytes, DType dtype, Op op) const {
  if (const Row* const chosen = row(kind, bytes, dtype, op)) return chosen->path;
  if (bytes * (communicator.size() - 1) <= kPacketBytes && takes(Path::packets, kind, bytes, dtype, op))
    return Path::packets;
  for (Path path : {Path::two_shot, Path::assisted})
    if (takes(path, kind, bytes, dtype, op)) return path;
  return Path::host;
}

Launch Accelerator::State::launch(const Call& call, int64_t bytes, Path path, Stream stream) const {
  const Row* const chosen = row(call.kind, bytes, call.dtype, call.op);
  const bool packets = path <= Path::packets_two_shot;
  const int64_t share = packets ? kPacketBlockBytes : kBlockBytes, limit = packets ? kPacketBlocks : kBlocks;
  const int64_t blocks = std::clamp<int64_t>((bytes + share - 1) / share, 1, limit);
  Launch launch{stream, static_cast<int>(blocks), kThreads, fingerprint(call)};
  if (chosen && chosen->blocks > 0) launch.blocks = std::min<int>(chosen->blocks, kMaxBlocks);
  if (chosen && chosen->threads > 0) launch.threads = std::min<int>(chosen->threads, kMaxThreads) / 32 * 32;
  if (chosen && chosen->slot > 0) launch.slot = std::clamp<int>(chosen->slot / 256 * 256, 256, kSlot);
  return launch;
}

template <class Work>
void Accelerator::State::enqueue(const Call& call, int64_t bytes, int64_t bytes_in, int64_t bytes_out, Stream stream,
                                 milliseconds timeout, Work work) {
  const Path path = this->path(call.kind, bytes, call.dtype, call.op);
  std::lock_guard lock(order);
  const Enqueued enqueued = communicator.enqueue(call, bytes_in, bytes_out, timeout);
  try {
    const bool captured = driver->capturing(stream);
    if (captured && path == Path::assisted)
      throw std::runtime_error("the CPU-assisted reduce cannot be captured into a CUDA graph");
    const bool kernel = path != Path::assisted;
    if (!captured && kernel) in_flight->order(stream);
    if (bytes) work(path, launch(call, bytes, path, stream));
    if (captured)
      communicator.ended(enqueued, true);  // what is replayed has its clock limit, and the hook of a failure
    else
      in_flight->add(enqueued, stream, kernel);
  } catch (const std::exception& error) {
    communicator.ended(enqueued, false);
    communicator.broke(enqueued, error.what());
  }
  communicator.check();
}

// The oldest operation has not ended: what its kernel says, and the clock.
void Accelerator::State::look(const Enqueued& oldest) {
  if (peers) {
    const volatile Board& board = peers->board();
    const uint32_t differs = __atomic_load_n(&board.differs, __ATOMIC_ACQUIRE);
    if (differs) return communicator.differs(oldest, static_cast<int>(differs) - 1);
    if (__atomic_load_n(&board.overdue, __ATOMIC_ACQUIRE)) return communicator.overdue(oldest);
  }
  if (Clock::now() >= oldest.deadline) communicator.overdue(oldest);
}

void Accelerator::State::stop() {
  stopped->store(true);
  if (peers) __atomic_store_n(&peers->board().stop, 1u, __ATOMIC_RELEASE);
  if (assisted) assisted->let_go();
}

Accelerator::Accelerator(Communicator& communicator, std::unique_ptr<Driver> driver, std::vector<Row> rows,
                         milliseconds timeout)
    : state_(std::make_unique<State>(communicator, std::move(driver), std::move(rows), timeout)) {}

Accelerator::~Accelerator() { shutdown(milliseconds(0)); }

Path Accelerator::path(Kind kind, int64_t bytes, DType dtype, Op op) const {
  return state_->path(kind, bytes, dtype, op);
}

void Accelerator::all_reduce(const void* in, void* out, int64_t count, DType dtype, Reduction reduction, Stream stream,
                             milliseconds timeout) {
  State& s = *state_;
  const int64_t bytes = count * size_of(dtype);
  const Call call = call_of(Kind::all_reduce, count, dtype, reduction.op, -1, reduction.factor);
  s.enqueue(call, bytes, bytes, bytes, stream, timeout, [&](Path path, const Launch& launch) {
    if (path == Path::assisted) return s.assisted->all_reduce(in, out, count, dtype, reduction, stream);
    const auto kernel = path == Path::packets            ? gpu::all_reduce_packets
                        : path == Path::packets_two_shot ? gpu::all_reduce_packets_two_shot
                        : path == Path::one_shot         ? gpu::all_reduce_one_shot
                                                         : gpu::all_reduce;
    kernel(s.peers->links(), in, out, count, dtype, reduction, launch);
  });
}

void Accelerator::reduce_scatter(const void* in, void* out, int64_t count, DType dtype, Reduction reduction,
                                 Stream stream, milliseconds timeout) {
  State& s = *state_;
  const int64_t block = count * size_of(dtype), bytes = block * s.communicator.size();
  const Call call = call_of(Kind::reduce_scatter, count, dtype, reduction.op, -1, reduction.factor);
  s.enqueue(call, bytes, bytes, block, stream, timeout, [&](Path path, const Launch& launch) {
    if (path == Path::assisted) return s.assisted->reduce_scatter(in, out, count, dtype, reduction, stream);
    gpu::reduce_scatter(s.peers->links(), in, out, count, dtype, reduction, launch);
  });
}

void Accelerator::all_gather(const void* in, void* out, int64_t count, DType dtype, Stream stream,
                             milliseconds timeout) {
  State& s = *state_;
  const int64_t block = count * size_of(dtype), bytes = block * s.communicator.size();
  s.enqueue(call_of(Kind::all_gather, count, dtype), bytes, block, bytes, stream, timeout,
            [&](Path path, const Launch& launch) {
              if (path == Path::assisted) return s.assisted->all_gather(in, out, block, stream);
              gpu::all_gather(s.peers->links(), in, out, block, launch);
            });
}

void Accelerator::broadcast(void* data, int64_t count, DType dtype, int root, Stream stream, milliseconds timeout) {
  State& s = *state_;
  const int64_t bytes = count * size_of(dtype);
  s.enqueue(call_of(Kind::broadcast, count, dtype, Op::sum, root), bytes, bytes, bytes, stream, timeout,
            [&](Path path, const Launch& launch) {
              if (path == Path::assisted) return s.assisted->broadcast(data, bytes, root, stream);
              gpu::broadcast(s.peers->links(), data, bytes, root, launch);
            });
}

void Accelerator::all_to_all(const void* in, const int64_t* in_offsets, const int64_t* in_counts, void* out,
                             const int64_t* out_offsets, const int64_t* out_counts, DType dtype, Stream stream,
                             milliseconds timeout) {
  State& s = *state_;
  const int64_t size = size_of(dtype);
  Ranges ranges{};
  int64_t most = 0, bytes_in = 0, bytes_out = 0;
  for (int i = 0; i < s.communicator.size(); ++i) {
    ranges.in_offsets[i] = in_offsets[i] * size, ranges.in_sizes[i] = in_counts[i] * size;
    ranges.out_offsets[i] = out_offsets[i] * size, ranges.out_sizes[i] = out_counts[i] * size;
    most = std::max({most, ranges.in_sizes[i], ranges.out_sizes[i]});
    bytes_in += ranges.in_sizes[i], bytes_out += ranges.out_sizes[i];
  }
  s.communicator.all_reduce(&most, &most, 1, DType::i64, {Op::max}, timeout);
  // All ranks take the path, and the blocks, of the largest part.
  s.enqueue(call_of(Kind::all_to_all, 0, dtype), most * s.communicator.size(), bytes_in, bytes_out, stream, timeout,
            [&](Path, const Launch& launch) { gpu::all_to_all(s.peers->links(), in, out, ranges, most, launch); });
}

std::string Accelerator::describe() const {
  const State& s = *state_;
  if (s.peers) return "GPUs reach each other's memory" + std::string(s.assisted ? ", and the CPU-assisted reduce" : "");
  const std::string why = "GPUs do not use each other's memory (" + s.why_no_peers + ")";
  if (s.assisted) return why + ": CPU-assisted reduce";
  return why + ", and the CPU-assisted reduce does not work (" + s.why_no_assisted + "): copies to the host";
}

void Accelerator::shutdown(milliseconds patience) {
  State& s = *state_;
  if (s.ended) return;
  s.ended = true;
  bool rest = s.in_flight->empty_by(Clock::now() + patience);
  if (!rest) {
    s.communicator.abort("the group was shut down while operations were still running on its device");
    s.stop();
    rest = s.in_flight->empty_by(Clock::now() + milliseconds(2000));
  }
  s.communicator.on_failure(nullptr);
  s.in_flight.reset();
  // Of no more use in any case; but whose kernels may still run must keep its memory, and its peers theirs.
  const bool quiet = rest && s.communicator.quiet(std::min(patience, kGoodbye));
  if (rest) s.assisted.reset();
  if (quiet) s.peers.reset();
  if (s.peers || s.assisted) {
    static_cast<void>(s.peers.release());
    static_cast<void>(s.assisted.release());
    static_cast<void>(s.driver.release());
  }
}

}  // namespace hfreduce::gpu
