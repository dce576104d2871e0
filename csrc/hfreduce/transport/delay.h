// A transport with delay, for tests on machines whose kernel has no netem: HFREDUCE_TEST_DELAY_US.
#pragma once

#include <deque>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "bootstrap/mesh.h"

namespace hfreduce {

// A thread that reads the connections as fast as bytes come, holds these for the time asked for, and passes them on
// through pairs of sockets.
class Delay {
 public:
  // None without the variable. With it, `sockets` are replaced by those from which the delayed bytes are to be read.
  static std::unique_ptr<Delay> wanted(std::vector<Socket>& sockets);
  ~Delay();

 private:
  struct Parcel {
    Deadline due;
    std::string bytes;
    size_t passed_on = 0;
  };
  struct Lane {
    Socket from, to;
    std::deque<Parcel> held;
    bool ended = false;  // nothing more will come
    bool full = false;   // the reader has not made room yet
  };

  Delay(std::vector<Socket>& sockets, std::chrono::microseconds time);
  void run();
  bool wait();  // until there is something to do; false: the end
  void take_in(Lane& lane);
  void pass_on(Lane& lane);

  const Clock::duration time_;
  std::vector<Lane> lanes_;
  Socket bell_;
  std::thread thread_;
};

}  // namespace hfreduce
