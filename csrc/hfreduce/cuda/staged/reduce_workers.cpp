// Memory traffic of a chunk, all ranks together: each input is read once, and the result is written once (and read
// before, unless it is streamed). The copy engines write each input once and read the result once per rank. While the
// ring fits in the last-level cache, most of this stays out of DRAM.
#include "cuda/staged/reduce_workers.h"

#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <sys/prctl.h>

#include <algorithm>
#include <cstring>
#include <fstream>
#include <sstream>
#include <string>

#include "collectives/reduce.h"

namespace hfreduce::gpu {

namespace {

// Bytes added up between checks: all inputs' pieces fit in an L1 or L2 cache.
constexpr int64_t kPiece = 32 << 10;
// How long threads spin before they sleep, and how often the leader polls after that.
constexpr std::chrono::microseconds kSpin{200}, kNap{50};
// How often the leader asks whether the communicator has failed.
constexpr milliseconds kAsk{1};

// Binds the thread to the allowed cores of a NUMA node ("0-31,64-95"). On any failure the affinity is left unchanged.
void bind(int node) {
  if (node < 0) return;
  std::ifstream file("/sys/devices/system/node/node" + std::to_string(node) + "/cpulist");
  cpu_set_t allowed, wanted;
  CPU_ZERO(&wanted);
  if (!file || sched_getaffinity(0, sizeof(allowed), &allowed)) return;
  for (std::string range; std::getline(file, range, ',');) {
    int first = 0, last = 0;
    char dash = 0;
    std::istringstream text(range);
    if (!(text >> first)) continue;
    if (!(text >> dash >> last)) last = first;
    for (int cpu = first; cpu <= last && cpu < CPU_SETSIZE; ++cpu)
      if (CPU_ISSET(cpu, &allowed)) CPU_SET(cpu, &wanted);
  }
  if (CPU_COUNT(&wanted)) sched_setaffinity(0, sizeof(wanted), &wanted);
}

}  // namespace

ReduceWorkers::ReduceWorkers(const StagingRing& ring, const Options& options, std::function<bool()> stopped,
                             std::function<void()> on_stop)
    : ring_(ring),
      options_(options),
      stopped_(std::move(stopped)),
      on_stop_(std::move(on_stop)),
      places_(options.threads + (options.hosts.carry ? Hosts::kLanes : 0)),
      last_(ring.mine().reduced.load()),
      added_(last_) {
  for (Place& place : places_) place.chunks = last_;
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  for (int t = 0; t < static_cast<int>(places_.size()); ++t) {
    threads_.emplace_back([this, t] { run(t); });
    pthread_setname_np(threads_.back().native_handle(), t < options.threads ? "hfreduce-add" : "hfreduce-carry");
  }
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

ReduceWorkers::~ReduceWorkers() { quit(); }

void ReduceWorkers::push(const Work& work) {
  {
    std::lock_guard lock(mutex_);
    const uint64_t pushed = pushed_.load(std::memory_order_relaxed);
    uint64_t begun = pushed;
    for (const Place& place : places_) begun = std::min(begun, place.works.load(std::memory_order_relaxed));
    while (works_.size() > pushed - begun) works_.pop_front();
    works_.push_back(work);
    pushed_.store(pushed + 1, std::memory_order_seq_cst);
  }
  wake(idle_);
}

void ReduceWorkers::quit() {
  end();
  for (std::thread& thread : threads_) thread.join();
  threads_.clear();
}

void ReduceWorkers::end() {
  quit_ = true;
  for (Bed* bed : {&idle_, &early_, &carriers_}) wake(*bed);
}

void ReduceWorkers::wake(Bed& bed) {
  if (!bed.sleepers.load(std::memory_order_seq_cst)) return;  // later sleepers check the condition first
  {
    std::lock_guard lock(mutex_);
  }  // a thread that checked the condition before is asleep by now
  bed.awake.notify_all();
}

void ReduceWorkers::run(int thread) {
  bind(options_.numa_node);
  prctl(PR_SET_TIMERSLACK, 1000);  // ns; with the default, naps take twice as long
  Work work;
  while (next(thread, work) && perform(work, thread)) {
  }
}

bool ReduceWorkers::next(int thread, Work& work) {
  Place& place = places_[thread];
  const uint64_t begun = place.works.load(std::memory_order_relaxed);
  const auto there = [&] { return pushed_.load(std::memory_order_seq_cst) > begun; };
  bool met = false;
  if (!spin(thread == 0, there, met)) return false;
  // The leader stays awake while streams of this rank wait for other ranks, to detect their failure.
  const auto idle = [&] { return passed(ring_.mine().ready.load(std::memory_order_acquire), last_); };
  if (!met && thread == 0 && !look([&] { return there() || idle(); })) return false;
  if (!there() && !sleep(idle_, there)) return false;
  std::lock_guard lock(mutex_);
  work = works_[works_.size() - (pushed_.load(std::memory_order_relaxed) - begun)];
  place.works.store(begun + 1, std::memory_order_relaxed);
  return true;
}

bool ReduceWorkers::perform(const Work& work, int thread) {
  ChunkCut cut(work, ring_.chunk, options_.least);
  for (uint32_t k = work.first; !cut.done(); ++k) {
    const Span part = cut.next();
    if (quit_.load(std::memory_order_relaxed)) return false;
    if (!(thread < options_.threads ? add(work, part, k, thread) : carry(work, part, k, thread))) return false;
  }
  return true;
}

// This rank's part of a slot, which it adds up and carries: a slice; or the blocks of the ranks with its local rank on
// all hosts, including the padding between them.
struct ReduceWorkers::Share {
  int64_t byte, count;
};

ReduceWorkers::Share ReduceWorkers::share(const Work& work, const Span& part) const {
  const int64_t step = part.step(work), blocks = work.rows / ring_.size;
  if (work.rows > 1) return {ring_.rank * blocks * step, blocks > 1 ? blocks * step / work.size : part.count};
  const Slice slice(part.count, work.size, ring_.rank, options_.hosts.rails ? options_.hosts.rails : ring_.size);
  return {slice.first * work.size, slice.count()};
}

bool ReduceWorkers::add(const Work& work, const Span& part, uint32_t chunk, int thread) {
  Share mine = work.sums() ? share(work, part) : Share{};
  // A chunk is done when all threads that add have run, so small chunks use fewer threads.
  const auto threads =
      static_cast<int>(std::clamp<int64_t>(mine.count * work.size / options_.share, 1, options_.threads));
  if (thread < threads) {
    const Slice slice(mine.count, work.size, thread, threads);
    mine = {mine.byte + slice.first * work.size, slice.count()};
  } else {
    mine = {};
  }
  if (thread == 0 || mine.count) {
    if (!wait(thread, [&] { return ring_.all(&StagingRing::Head::arrived, chunk + 1); })) return false;
    if (thread == 0 && work.sums()) wake(early_);
    if (mine.count) reduce(work, mine.byte, mine.count, chunk, thread == 0);
  }
  places_[thread].chunks.store(chunk + 1, std::memory_order_release);
  if (thread) return true;
  for (int t = 1; t < threads; ++t)
    if (!wait(0, [&] { return passed(places_[t].chunks.load(std::memory_order_acquire), chunk + 1); })) return false;
  last_ = chunk + 1;
  if (!options_.hosts.carry) return publish(work, chunk);
  added_.store(last_, std::memory_order_seq_cst);
  wake(carriers_);
  return true;
}

void ReduceWorkers::reduce(const Work& work, int64_t byte, int64_t count, uint32_t chunk, bool leader) {
  std::vector<const void*> inputs(ring_.size);
  std::vector<double> factors;
  const bool factored = work.reduction.op == Op::premul_sum;
  for (int r = 0; factored && r < ring_.size; ++r) {
    factors.emplace_back();
    std::memcpy(&factors.back(), ring_.head(r).factors[ring_.slot(chunk)], sizeof(double));
  }
  const int64_t piece = kPiece / work.size;
  for (int64_t i = 0; i < count; i += piece, byte += kPiece) {
    for (int r = 0; r < ring_.size; ++r) inputs[r] = ring_.input(r, chunk) + byte;
    hfreduce::reduce(ring_.result(chunk) + byte, inputs.data(), factored ? factors.data() : nullptr, ring_.size,
                     std::min(piece, count - i), work.dtype, work.reduction.op, ring_.size, options_.streaming);
    if (leader) ring_.sweep();
  }
}

// Each lane handles its chunks in order. Results are published in the order of all chunks.
bool ReduceWorkers::carry(const Work& work, const Span& part, uint32_t chunk, int thread) {
  const int lane = thread - options_.threads;
  if (static_cast<int>(chunk % Hosts::kLanes) != lane) return true;
  if (!wait(thread, [&] { return passed(added_.load(std::memory_order_seq_cst), chunk + 1); })) return false;
  const Share mine = share(work, part);
  if (mine.count && !exchange(work, ring_.result(chunk) + mine.byte, mine.count, lane)) return false;
  const Flag& reduced = ring_.mine().reduced;
  if (!wait(thread, [&] { return passed(reduced.load(std::memory_order_seq_cst), chunk); })) return false;
  publish(work, chunk);
  wake(carriers_);
  return true;
}

bool ReduceWorkers::exchange(const Work& work, void* data, int64_t count, int lane) {
  Flag& carrying = ring_.mine().carrying;
  std::exception_ptr error;
  carrying.fetch_add(1, std::memory_order_seq_cst);
  const bool whole = !ring_.gone();
  try {
    if (whole) options_.hosts.carry(work.enqueued, lane, data, count);
  } catch (...) {
    error = std::current_exception();
  }
  carrying.fetch_sub(1, std::memory_order_seq_cst);
  if (error) options_.hosts.failed(work.enqueued, error);
  return whole && !error;
}

// Returns whether to go on.
bool ReduceWorkers::publish(const Work& work, uint32_t chunk) {
  StagingRing::Head& mine = ring_.mine();
  // Sequentially consistent, like the loads: the last rank to store sees that all have, and others may, too. A rank
  // that let go did so before anyone could read incomplete data, and so before the last rank got here. This rank raises
  // its own flag last: its process may end as soon as its own streams have finished.
  mine.reduced.store(chunk + 1, std::memory_order_seq_cst);
  if (work.sums() || options_.hosts.carry) {
    if (ring_.all(&StagingRing::Head::reduced, chunk + 1) && !ring_.gone())
      for (int i = 1; i <= ring_.size; ++i) raise(ring_.head((ring_.rank + i) % ring_.size).ready, chunk + 1);
    return true;
  }
  if (!wait(0, [&] { return passed(mine.ready.load(std::memory_order_acquire), chunk); })) return false;
  if (!ring_.gone()) raise(mine.ready, chunk + 1);
  return true;
}

// Returns whether to go on. `met`: whether the condition is already true.
template <class Until>
bool ReduceWorkers::spin(bool leader, Until until, bool& met) {
  const Deadline deadline = Clock::now() + kSpin;
  do {
    for (int i = 0; i < 16; ++i) {
      if ((met = until())) return true;
      if (leader) ring_.sweep();
      pause();
    }
    if (quit_.load(std::memory_order_relaxed)) return false;
    sched_yield();
  } while (Clock::now() < deadline);
  return true;
}

template <class Until>
bool ReduceWorkers::wait(int thread, Until until) {
  bool met = false;
  if (!spin(thread == 0, until, met)) return false;
  if (met || thread == 0) return met || look(until);
  return sleep(thread < options_.threads ? early_ : carriers_, until);
}

template <class Until>
bool ReduceWorkers::look(Until until) {
  Deadline ask = Clock::now();
  while (!until()) {
    ring_.sweep();
    if (quit_.load(std::memory_order_relaxed)) return false;
    if (Clock::now() >= ask) {
      if (stopped_()) {
        end();
        on_stop_();
        return false;
      }
      ask = Clock::now() + kAsk;
    }
    std::this_thread::sleep_for(kNap);
  }
  return true;
}

template <class Until>
bool ReduceWorkers::sleep(Bed& bed, Until until) {
  bed.sleepers.fetch_add(1, std::memory_order_seq_cst);
  std::unique_lock lock(mutex_);
  bed.awake.wait(lock, [&] { return until() || quit_.load(std::memory_order_seq_cst); });
  bed.sleepers.fetch_sub(1, std::memory_order_relaxed);
  return !quit_.load(std::memory_order_relaxed);
}

}  // namespace hfreduce::gpu
