// The host cores of the host-staged reduction: threads that process the chunks of the ring in order and add up this
// rank's slices. They spin for a while when they wait. After that the first thread, the leader, polls, and the others
// sleep until it wakes them. All sleep while there is no work.
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
    int64_t share, least;  // bytes: per thread; of ChunkCut
    bool streaming;
    int numa_node;
    Hosts hosts;
  };
  // stopped: whether the communicator has failed. The leader then calls on_stop, once, and all threads end.
  ReduceWorkers(const StagingRing& ring, const Options&, std::function<bool()> stopped, std::function<void()> on_stop);
  ~ReduceWorkers();  // calls quit

  void push(const Work& work);  // called by one thread at a time, in the order of chunks
  void quit();                  // ends the threads, also those that wait, and joins them

 private:
  // Where threads that wait for the same condition sleep.
  struct Bed {
    std::atomic<int> sleepers{0};
    std::condition_variable awake;
  };
  struct alignas(kLine) Place {
    std::atomic<uint64_t> works{0};  // that this thread has begun
    Flag chunks;                     // that it has finished
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
  Bed idle_, early_, carriers_;  // waiting for: work; a chunk's arrival; a chunk's sum, or its predecessor's transfer
  std::deque<Work> works_;       // those that not all threads have begun
  std::atomic<uint64_t> pushed_{0};
  uint32_t last_;  // the leader's: chunks added up so far
  Flag added_;     // the same, for the carrying threads
  std::vector<std::thread> threads_;
};

}  // namespace hfreduce::gpu
