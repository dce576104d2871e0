// Chunks of a message on their way: added up inside this host, then between hosts, then spread inside this one.
#pragma once

#include <functional>

#include "collectives/interhost/job_thread.h"
#include "collectives/interhost/rails.h"

namespace hfreduce {

// Each stage is a function of the chunk's number. The first and the last run on the caller's thread, in order; the
// second, on ranks that have a rail, on one of two threads, each with connections of its own: while one waits for what
// comes at the end of its chunk, the other fills the link.
class Stages {
 public:
  static constexpr int64_t kUnderWay = 4;  // chunks: one in the first stage, two between hosts, one in the last

  Stages(const Roster& roster, Mesh& mesh, Health& health, const Layout& layout, int streams);

  // The rail of the caller's thread, where it works alone.
  between::Rail rail(const Watch& watch) { return rail(watch, 0); }

  using Inside = std::function<void(int64_t chunk)>;
  using Between = std::function<void(int64_t chunk, const between::Rail& rail)>;
  // Throws what a stage threw; then the communicator has failed, and nothing is under way any more. A single chunk
  // takes no threads.
  void run(int64_t chunks, const Watch& watch, const Inside& first, const Between& second, const Inside& last);

 private:
  static constexpr int kLanes = 2;
  struct Lane {
    TcpLinks links;
    JobThread thread;
  };

  between::Rail rail(const Watch& watch, int lane) { return {lanes_[lane].links, watch, layout_.rail, layout_.host}; }
  void fail(const Fault& fault);

  const Roster& roster_;
  Health& health_;
  const Layout& layout_;
  Lane lanes_[kLanes];
};

}  // namespace hfreduce
