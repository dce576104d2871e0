// The host's cores of the host-staged reduction: threads that follow the chunks of the ring, in order, and add up this
// rank's slices. They spin for a while when they wait; then the first of them, the leader, looks every now and then,
// and wakes the others, which sleep. All sleep when nothing is under way.
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

#include "cuda/staged/ring.h"
#include "cuda/staged/staged.h"

namespace hfreduce::gpu {

class ReduceWorkers {
 public:
  struct Options {
    int threads;
    int64_t share, least;  // bytes: of a thread, of ChunkCut
    bool streaming;
    int numa_node;
    Hosts hosts;
  };
  // stopped: whether the communicator has failed. The leader then calls on_stop, once, and all threads end.
  ReduceWorkers(const StagingRing& ring, const Options&, std::function<bool()> stopped, std::function<void()> on_stop);
  ~ReduceWorkers();  // as quit

  void push(const Work& work);  // by one thread at a time, in the order of chunks
  void quit();                  // the threads end where they wait, and are joined

 private:
  // Where threads sleep that wait for the same.
  struct Bed {
    std::atomic<int> sleepers{0};
    std::condition_variable awake;
  };
  struct alignas(kLine) Place {
    std::atomic<uint64_t> works{0};  // that this thread has begun
    Flag chunks;                     // that it has done
  };

  void run(int thread);
  bool next(int thread, Work& work);
  bool perform(const Work& work, int thread);
  struct Share;
  Share share(const Work& work, const Span& part) const;
  bool add(const Work& work, const Span& part, uint32_t chunk, int thread);
  void reduce(const Work& work, int64_t byte, int64_t count, uint32_t chunk, bool leader);
  bool carry(const Work& work, const Span& part, uint32_t chunk, int thread);
  bool exchange(const Work& work, void* data, int64_t count, int lane);
  bool publish(const Work& work, uint32_t chunk);
  template <class Until>
  bool spin(bool leader, Until until, bool& met);
  template <class Until>
  bool wait(int thread, Until until);
  template <class Until>
  bool look(Until until);
  template <class Until>
  bool sleep(Bed& bed, Until until);
  void wake(Bed& bed);
  void end();

  const StagingRing& ring_;
  const Options options_;
  const std::function<bool()> stopped_;
  const std::function<void()> on_stop_;
  std::vector<Place> places_;
  std::atomic<bool> quit_{false};
  std::mutex mutex_;
  Bed idle_, early_, carriers_;  // for a work; for a chunk to arrive; for one to be added up, or carried before
  std::deque<Work> works_;       // what not all threads have begun
  std::atomic<uint64_t> pushed_{0};
  uint32_t last_;  // the leader's: chunks that are added up here
  Flag added_;     // the same, for those that carry
  std::vector<std::thread> threads_;
};

}  // namespace hfreduce::gpu
