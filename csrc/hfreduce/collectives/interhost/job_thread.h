// A thread that does one job after another: what travels between hosts while this rank adds up inside its own.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <mutex>
#include <thread>

namespace hfreduce {

// Jobs watch the health and a deadline themselves, so waiting for one needs no deadline of its own.
class JobThread {
 public:
  using Job = std::function<void()>;

  ~JobThread();  // joins the thread; no job may be left
  void submit(Job job);
  // Returns when the oldest job that was not waited for yet is done; throws what it threw. After such a throw, call
  // stop.
  void wait();
  // Forgets the jobs that have not begun, and returns when none runs.
  void stop();

 private:
  void work();

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Job> jobs_;
  uint64_t done_ = 0, waited_ = 0;
  bool running_ = false, ending_ = false;
  std::exception_ptr error_;  // of the last job that was done; the later ones are not begun
  std::thread thread_;        // from the first job on
};

}  // namespace hfreduce
