#include "collectives/interhost/stages.h"

#include <utility>

namespace hfreduce::interhost {

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

Stages::Stages(const Roster& roster, Mesh& mesh, Health& health, const HostLayout& layout, int connections)
    : roster_(roster),
      health_(health),
      layout_(layout),
      lanes_{{HostStreams(roster, mesh, 0, connections), {}}, {HostStreams(roster, mesh, 1, connections), {}}} {}

void Stages::run(int64_t chunks, const Watch& watch, const Stage& first, const Travel& second, const Stage& last) {
  const bool on_rail = !layout_.rail.empty();
  const Rail rails[kLanes] = {rail(watch, 0), rail(watch, 1)};
  if (chunks == 1) {
    first(0);
    if (on_rail) second(0, rails[0]);
    return last(0);
  }
  try {
    for (int64_t c = 0; c < chunks + kUnderWay - 1; ++c) {
      if (c < chunks) {
        first(c);
        if (on_rail) lanes_[c % kLanes].thread.submit([&, c] { second(c, rails[c % kLanes]); });
      }
      const int64_t done = c - (kUnderWay - 1);
      if (done < 0) continue;
      if (on_rail) lanes_[done % kLanes].thread.wait();
      last(done);
    }
  } catch (const Fault& fault) {
    fail(fault);
    throw;
  } catch (const std::exception& error) {
    fail(Fault(Fault::Cause::aborted, {roster_.rank}, roster_.me().name() + " failed: " + error.what()));
    throw;
  }
}

// Stops the jobs in flight, which use memory of the caller.
void Stages::fail(const Fault& fault) {
  health_.fail(fault);
  for (Lane& lane : lanes_) lane.thread.stop();
}

}  // namespace hfreduce::interhost
