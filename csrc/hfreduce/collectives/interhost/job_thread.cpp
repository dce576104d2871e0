#include "collectives/interhost/job_thread.h"

#include <utility>

namespace hfreduce {

JobThread::~JobThread() {
  {
    std::lock_guard lock(mutex_);
    ending_ = true;
  }
  changed_.notify_all();
  if (thread_.joinable()) thread_.join();
}

void JobThread::submit(Job job) {
  {
    std::lock_guard lock(mutex_);
    jobs_.push_back(std::move(job));
    if (!thread_.joinable()) thread_ = std::thread([this] { work(); });
  }
  changed_.notify_all();
}

void JobThread::wait() {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return done_ > waited_ || error_; });
  if (done_ > waited_)
    ++waited_;
  else
    std::rethrow_exception(error_);
}

void JobThread::stop() {
  std::unique_lock lock(mutex_);
  jobs_.clear();
  changed_.wait(lock, [&] { return !running_; });
  waited_ = done_ = 0;
  error_ = nullptr;
}

void JobThread::work() {
  std::unique_lock lock(mutex_);
  while (true) {
    changed_.wait(lock, [&] { return ending_ || (!jobs_.empty() && !error_); });
    if (ending_) return;
    const Job job = std::move(jobs_.front());
    jobs_.pop_front();
    running_ = true;
    lock.unlock();
    std::exception_ptr error;
    try {
      job();
    } catch (...) {
      error = std::current_exception();
    }
    lock.lock();
    running_ = false;
    error_ = error;
    if (!error) ++done_;
    changed_.notify_all();
  }
}

}  // namespace hfreduce
