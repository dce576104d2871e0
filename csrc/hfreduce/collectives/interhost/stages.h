// The pipeline of chunks: added up inside this host, reduced between hosts, distributed inside this host.
#pragma once

#include <algorithm>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <mutex>
#include <thread>

#include "collectives/interhost/rail.h"

namespace hfreduce::interhost {

// Bytes of a slice: large enough to amortize the latency between hosts, small enough that the stages overlap and that
// the next stage finds the data in a cache.
constexpr int64_t kLeastSlice = 256 << 10, kMostSlice = 4 << 20;
constexpr int64_t kChunks = 8;  // per message, within these limits

// A message, cut into chunks of `parts` slices.
struct Cut {
  Cut(int64_t count, int64_t size, int parts) : count(count), parts(parts) {
    const int64_t bytes = std::clamp(count / parts * size / kChunks, kLeastSlice, kMostSlice);
    slice = std::min(std::max<int64_t>(1, bytes / size), (count + parts - 1) / parts);
    chunks = slice ? (count + slice * parts - 1) / (slice * parts) : 1;
  }
  int64_t count;
  int parts;
  int64_t slice, chunks;
};

struct Chunk {
  Chunk(const Cut& cut, int64_t index)
      : first(index * cut.slice * cut.parts),
        count(std::min(cut.slice * cut.parts, cut.count - first)),
        slice((count + cut.parts - 1) / cut.parts),
        whole(slice * cut.parts == count) {}
  int64_t first, count;  // elements
  int64_t slice;
  bool whole;  // whether all its slices are full; otherwise it is padded in a buffer
};

// A thread that runs jobs in order: transfers between hosts while the calling rank adds up inside its own. Jobs check
// the health and a deadline themselves, so waiting for one needs no deadline.
class JobThread {
 public:
  using Job = std::function<void()>;

  ~JobThread();  // joins the thread; there must be no jobs left
  void submit(Job job);
  // Returns when the oldest job that was not waited for is done; throws what it threw. Call `stop` after that.
  void wait();
  // Drops the jobs that have not begun, and returns when none runs.
  void stop();

 private:
  void work();

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Job> jobs_;
  uint64_t done_ = 0, waited_ = 0;
  bool running_ = false, ending_ = false;
  std::exception_ptr error_;  // of the last job that ran; later ones do not begin
  std::thread thread_;        // started by the first job
};

// A stage is a function of the chunk's number. The first and the last run in order on the calling thread. The second
// runs, on ranks that have a rail, on one of two threads with connections of their own: while one waits for the end of
// its chunk, the other keeps the link busy.
class Stages {
 public:
  static constexpr int64_t kUnderWay = 4;  // chunks: one in the first stage, two between hosts, one in the last

  Stages(const Roster& roster, Mesh& mesh, Health& health, const HostLayout& layout, int connections);

  // The rail for the calling thread, while no other thread uses it.
  Rail rail(const Watch& watch) { return rail(watch, 0); }

  using Stage = std::function<void(int64_t chunk)>;
  using Travel = std::function<void(int64_t chunk, const Rail& rail)>;
  // Throws what a stage threw. Then the communicator has failed, and no job runs any more. A single chunk uses no
  // threads.
  void run(int64_t chunks, const Watch& watch, const Stage& first, const Travel& second, const Stage& last);

 private:
  static constexpr int kLanes = 2;
  struct Lane {
    HostStreams streams;
    JobThread thread;
  };

  Rail rail(const Watch& watch, int lane) {
    return {lanes_[lane].streams, watch, layout_.rail, roster_.place(), roster_.order};
  }
  void fail(const Fault& fault);

  const Roster& roster_;
  Health& health_;
  const HostLayout& layout_;
  Lane lanes_[kLanes];
};

}  // namespace hfreduce::interhost
