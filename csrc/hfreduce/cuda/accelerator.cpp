#include "cuda/accelerator.h"

#include <algorithm>
#include <atomic>
#include <mutex>

#include "collectives/interhost/rail.h"
#include "collectives/reduce.h"
#include "cuda/in_flight.h"
#include "cuda/meeting.h"
#include "cuda/p2p/copies.h"
#include "cuda/p2p/device_messages.h"
#include "cuda/p2p/peers.h"
#include "cuda/staged/staged.h"

namespace hfreduce::gpu {

namespace {

constexpr milliseconds kGoodbye{3000};  // if a rank leaves later than this, its peers leak their memory

// FNV-1a hash of what ranks must agree on. Without the sequence number, which a captured call would replay.
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

}  // namespace

struct Accelerator::State {
  State(Communicator& communicator, std::unique_ptr<Driver> driver, std::vector<DeviceRow> rows, milliseconds timeout);

  void make_staged(milliseconds timeout);
  const Links& links(Path path) const { return (in_mapped(path) ? mapped : peers)->links(); }
  // Numbers, orders, launches and watches one operation. bytes: see Message. work(launch, enqueued) enqueues it.
  template <class Work>
  void enqueue(Path path, const Call& call, int64_t bytes, int64_t bytes_in, int64_t bytes_out, Stream stream,
               milliseconds timeout, Work work);
  void look(const Enqueued& oldest);
  void stop();

  Communicator& communicator;
  std::unique_ptr<Driver> driver;
  std::vector<DeviceRow> rows;
  Means means;
  std::string why_no_peers, why_no_mapped, why_no_staged, why_no_copies, why_no_messages;
  std::unique_ptr<Peers> peers, mapped;
  std::unique_ptr<HostStaged> staged;
  double core_rate = kCoreRate;  // HostStaged::rate, minimum over all ranks; measured only if it decides the path
  std::unique_ptr<Copies> copies;
  std::unique_ptr<DeviceMessages> messages;
  const std::shared_ptr<std::atomic<bool>> stopped = std::make_shared<std::atomic<bool>>(false);
  std::mutex order;  // serializes enqueueing
  std::unique_ptr<InFlight> in_flight;
  bool ended = false;
};

Accelerator::State::State(Communicator& communicator, std::unique_ptr<Driver> given, std::vector<DeviceRow> wanted,
                          milliseconds timeout)
    : communicator(communicator), driver(std::move(given)), rows(agree(communicator, std::move(wanted), timeout)) {
  const bool kernels = reduces(DType::f32, Op::sum);
  const auto wants = [&](Path path) {
    return !peers || std::any_of(rows.begin(), rows.end(), [&](const DeviceRow& row) { return row.path == path; });
  };
  why_no_peers = why_no_mapped = agree(communicator, kernels ? "" : "hfreduce was built without nvcc", timeout);
  if (why_no_peers.empty()) why_no_peers = forbidden(communicator, *driver, timeout);
  if (why_no_peers.empty()) why_no_peers = connect(communicator, *driver, timeout, peers);
  if (why_no_mapped.empty() && (wants(Path::mapped) || wants(Path::mapped_two_shot)))
    why_no_mapped = map(communicator, *driver, timeout, mapped);
  communicator.on_failure([stopped = stopped] { stopped->store(true); });  // setup waits for other ranks
  if (wants(Path::staged)) make_staged(timeout);
  if (peers && wants(Path::copies)) why_no_copies = connect(communicator, *driver, timeout, copies);
  if (peers) why_no_messages = connect(communicator, *driver, timeout, messages);
  means = {communicator.size(),   peers != nullptr,  mapped != nullptr,
           staged != nullptr,     copies != nullptr, communicator.layout().regular,
           core_rate >= kCoreRate};
  in_flight = std::make_unique<InFlight>(communicator, *driver, [this](const Enqueued& oldest) { look(oldest); });
  communicator.on_failure([this] { stop(); });
}

void Accelerator::State::make_staged(milliseconds timeout) {
  const interhost::HostLayout layout = communicator.layout();
  HostStaged::Options options;
  options.rank = layout.local, options.size = layout.size;
  if (layout.hosts > 1) {
    options.hosts.count = layout.hosts, options.hosts.index = layout.host, options.hosts.rails = layout.rails;
    options.hosts.carry = [&communicator = communicator](const Enqueued& enqueued, int lane, void* data,
                                                         int64_t count) {
      communicator.carry(enqueued, lane, data, count);
    };
    options.hosts.failed = [&communicator = communicator](const Enqueued& enqueued, std::exception_ptr error) {
      communicator.broke(enqueued, std::move(error));
    };
  }
  why_no_staged = ordered(communicator, *driver, timeout);
  if (!why_no_staged.empty()) return;
  std::vector<Segment> segments = communicator.share(HostStaged::segment_bytes(options), timeout);
  why_no_staged = attempt(communicator, timeout, [&] {
    staged = std::make_unique<HostStaged>(*driver, std::move(segments), options,
                                          [stopped = stopped] { return stopped->load(std::memory_order_relaxed); });
  });
  if (!why_no_staged.empty()) return staged.reset();
  if (!mapped) return;
  core_rate = staged->rate();
  communicator.all_reduce(&core_rate, &core_rate, 1, DType::f64, {Op::min}, timeout);
}

template <class Work>
void Accelerator::State::enqueue(Path path, const Call& call, int64_t bytes, int64_t bytes_in, int64_t bytes_out,
                                 Stream stream, milliseconds timeout, Work work) {
  std::lock_guard lock(order);
  const Enqueued enqueued = communicator.enqueue(call, bytes_in, bytes_out, timeout);
  try {
    const bool captured = driver->capturing(stream);
    if (captured && !captures(path))
      throw std::runtime_error(std::string("path ") + name(path) + " cannot be captured into a CUDA graph");
    const bool kernel = path != Path::staged;
    if (!captured && kernel) in_flight->order(stream);
    const Extent extent = extent_of(rows, means, {call.kind, bytes, call.dtype, call.op}, path);
    if (bytes) work(Launch{stream, extent.blocks, extent.threads, fingerprint(call), extent.slot}, enqueued);
    if (captured)
      communicator.ended(enqueued, true);  // a replay is watched by its kernels' clock limit and by on_failure
    else
      in_flight->add(enqueued, stream, kernel);
  } catch (const std::exception& error) {
    communicator.ended(enqueued, false);
    communicator.broke(enqueued, error.what());
  }
  communicator.check();
}

// Called while the oldest operation has not ended: checks what its kernel reports, and the deadline.
void Accelerator::State::look(const Enqueued& oldest) {
  if (communicator.failed()) {  // `stop` has run; repeat what may have been overwritten since
    if (copies) copies->let_go();
    return;
  }
  for (Peers* const each : {peers.get(), mapped.get()}) {
    if (!each) continue;
    const volatile Board& board = each->board();
    const uint32_t differs = __atomic_load_n(&board.differs, __ATOMIC_ACQUIRE);
    if (differs) return communicator.differs(oldest, static_cast<int>(differs) - 1);
    if (__atomic_load_n(&board.overdue, __ATOMIC_ACQUIRE)) return communicator.overdue(oldest);
  }
  if (Clock::now() >= oldest.deadline) communicator.overdue(oldest);
}

void Accelerator::State::stop() {
  stopped->store(true);
  for (Peers* const each : {peers.get(), mapped.get()})
    if (each) __atomic_store_n(&each->board().stop, 1u, __ATOMIC_RELEASE);
  if (staged) staged->let_go();
  if (copies) copies->let_go();
}

Accelerator::Accelerator(Communicator& communicator, std::unique_ptr<Driver> driver, std::vector<DeviceRow> rows,
                         milliseconds timeout)
    : state_(std::make_unique<State>(communicator, std::move(driver), std::move(rows), timeout)) {}

Accelerator::~Accelerator() { shutdown(milliseconds(0)); }

Path Accelerator::path(const Message& message) const { return path_of(state_->rows, state_->means, message); }

void Accelerator::all_reduce(Path path, const void* in, void* out, int64_t count, DType dtype, Reduction reduction,
                             Stream stream, milliseconds timeout) {
  State& s = *state_;
  const int64_t bytes = count * size_of(dtype);
  const Call call = call_of(Kind::all_reduce, count, dtype, reduction);
  s.enqueue(path, call, bytes, bytes, bytes, stream, timeout, [&](const Launch& launch, const Enqueued& enqueued) {
    if (path == Path::staged) return s.staged->all_reduce(in, out, count, dtype, reduction, stream, enqueued);
    const auto kernel = path == Path::packets_two_shot ? gpu::all_reduce_packets_two_shot
                        : in_packets(path)             ? gpu::all_reduce_packets
                        : path == Path::one_shot       ? gpu::all_reduce_one_shot
                                                       : gpu::all_reduce;
    kernel(s.links(path), in, out, count, dtype, reduction, launch);
  });
}

void Accelerator::reduce_scatter(Path path, const void* in, void* out, int64_t count, DType dtype, Reduction reduction,
                                 Stream stream, milliseconds timeout) {
  State& s = *state_;
  const int64_t block = count * size_of(dtype), bytes = block * s.communicator.size();
  const Call call = call_of(Kind::reduce_scatter, count, dtype, reduction);
  s.enqueue(path, call, bytes, bytes, block, stream, timeout, [&](const Launch& launch, const Enqueued& enqueued) {
    if (path == Path::staged) return s.staged->reduce_scatter(in, out, count, dtype, reduction, stream, enqueued);
    const auto kernel = in_packets(path) ? gpu::reduce_scatter_packets : gpu::reduce_scatter;
    kernel(s.links(path), in, out, count, dtype, reduction, launch);
  });
}

void Accelerator::all_gather(Path path, const void* in, void* out, int64_t count, DType dtype, Stream stream,
                             milliseconds timeout) {
  State& s = *state_;
  const int64_t block = count * size_of(dtype), bytes = block * s.communicator.size();
  s.enqueue(path, call_of(Kind::all_gather, count, dtype), bytes, block, bytes, stream, timeout,
            [&](const Launch& launch, const Enqueued& enqueued) {
              if (path == Path::copies) return s.copies->all_gather(in, out, block, stream);
              if (path == Path::staged) return s.staged->all_gather(in, out, block, stream, enqueued);
              const auto kernel = in_packets(path) ? gpu::all_gather_packets : gpu::all_gather;
              kernel(s.links(path), in, out, block, launch);
            });
}

void Accelerator::broadcast(Path path, void* data, int64_t count, DType dtype, int root, Stream stream,
                            milliseconds timeout) {
  State& s = *state_;
  const int64_t bytes = count * size_of(dtype);
  s.enqueue(path, call_of(Kind::broadcast, count, dtype, {}, root), bytes, bytes, bytes, stream, timeout,
            [&](const Launch& launch, const Enqueued& enqueued) {
              if (path == Path::staged)
                return s.staged->broadcast(data, bytes, root == s.communicator.rank(), stream, enqueued);
              const auto kernel = in_packets(path) ? gpu::broadcast_packets : gpu::broadcast;
              kernel(s.links(path), data, bytes, root, launch);
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
  // All ranks use the path and the number of blocks for the largest part.
  const Message message{Kind::all_to_all, most * s.communicator.size(), dtype};
  const Path path = path_of(s.rows, s.means, message);
  s.enqueue(
      path, call_of(Kind::all_to_all, 0, dtype), message.bytes, bytes_in, bytes_out, stream, timeout,
      [&](const Launch& launch, const Enqueued&) { gpu::all_to_all(s.links(path), in, out, ranges, most, launch); });
}

DeviceMessages* Accelerator::messages() const { return state_->messages.get(); }

std::string Accelerator::describe() const {
  const State& s = *state_;
  const std::string mapped = s.mapped ? "kernels over mapped memory of the host, " : "";
  if (s.peers) {
    const std::string copies = s.copies                  ? "all_gather by copy engines, "
                               : s.why_no_copies.empty() ? ""
                                                         : "no all_gather by copy engines (" + s.why_no_copies + "), ";
    const std::string why = s.messages ? s.messages->why_not() : s.why_no_messages;
    const std::string messages = why.empty() ? "" : "messages by way of the host (" + why + "), ";
    const std::string also = mapped + copies + messages + (s.staged ? "the CPU-assisted reduce, " : "");
    return "GPUs reach each other's memory" + (also.empty() ? "" : "; also " + also.substr(0, also.size() - 2));
  }
  const std::string why = "GPUs do not use each other's memory (" + s.why_no_peers + ")";
  const std::string small = s.mapped || s.why_no_mapped == s.why_no_peers
                                ? mapped
                                : "no kernels over mapped memory (" + s.why_no_mapped + "), ";
  const std::string rate = ", at " + std::to_string(static_cast<int>(s.core_rate / 1e9)) + " GB/s";
  if (s.staged) return why + ": " + small + "CPU-assisted reduce" + (s.mapped ? rate : "");
  return why + ", and the CPU-assisted reduce does not work (" + s.why_no_staged + "): " + small + "copies to the host";
}

void Accelerator::shutdown(milliseconds patience) {
  State& s = *state_;
  if (s.ended) return;
  s.ended = true;
  const auto empty_by = [&](Deadline deadline) {
    return s.in_flight->empty_by(deadline) && (!s.messages || s.messages->empty_by(deadline));
  };
  bool rest = empty_by(Clock::now() + patience);
  if (!rest) {
    s.communicator.abort("the group was shut down while operations were still running on its device");
    s.stop();
    rest = empty_by(Clock::now() + milliseconds(2000));
  }
  s.communicator.on_failure(nullptr);
  s.in_flight.reset();
  if (s.messages) s.messages->quit();
  // No longer used. But memory must stay while a kernel of this rank or of a peer may use it.
  const bool quiet = rest && s.communicator.quiet(std::min(patience, kGoodbye));
  if (rest) s.staged.reset(), s.mapped.reset();
  if (quiet) s.peers.reset(), s.copies.reset(), s.messages.reset();
  if (s.peers || s.mapped || s.staged || s.copies || s.messages) {
    if (s.staged) s.staged->quit();  // its carry threads use the communicator, which has failed
    static_cast<void>(s.peers.release());
    static_cast<void>(s.mapped.release());
    static_cast<void>(s.staged.release());
    static_cast<void>(s.copies.release());
    static_cast<void>(s.messages.release());
    static_cast<void>(s.driver.release());
  }
}

}  // namespace hfreduce::gpu
