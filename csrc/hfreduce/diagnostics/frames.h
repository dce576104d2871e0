// Where Python is, queried on a separate thread, because that may have to wait for the GIL.
#pragma once

#include <condition_variable>
#include <exception>
#include <functional>
#include <mutex>
#include <optional>
#include <string>
#include <thread>

#include "types.h"

namespace hfreduce {

class Frames {
 public:
  // where: see Monitor; may be null. came: called when an answer has arrived.
  Frames(std::function<std::string()> where, std::function<void()> came)
      : where_(std::move(where)), came_(std::move(came)) {}
  ~Frames() { stop(); }

  // Returns a ticket. The first call starts the thread.
  uint64_t ask() {
    std::lock_guard lock(mutex_);
    if (!where_ || stopping_) return answered_ = ++asked_;
    if (!thread_.joinable()) thread_ = std::thread([this] { run(); });
    changed_.notify_all();
    return ++asked_;
  }
  std::optional<std::string> get(uint64_t ticket) {
    std::lock_guard lock(mutex_);
    return answered_ >= ticket ? std::optional<std::string>(frame_) : std::nullopt;
  }
  // "" if there is no answer by the deadline.
  std::string wait(uint64_t ticket, Deadline deadline) {
    std::unique_lock lock(mutex_);
    changed_.wait_until(lock, deadline, [&] { return stopping_ || answered_ >= ticket; });
    return answered_ >= ticket ? frame_ : "";
  }
  // Joins the thread. Idempotent.
  void stop() {
    {
      std::lock_guard lock(mutex_);
      stopping_ = true;
    }
    changed_.notify_all();
    if (thread_.joinable()) thread_.join();
  }

 private:
  void run() {
    std::unique_lock lock(mutex_);
    while (true) {
      changed_.wait(lock, [&] { return stopping_ || asked_ > answered_; });
      if (stopping_) return;
      const uint64_t ticket = asked_;
      lock.unlock();
      std::string frame;
      try {
        frame = where_();
      } catch (const std::exception& error) {
        frame = std::string("unknown: ") + error.what();
      }
      lock.lock();
      frame_ = frame;
      answered_ = ticket;
      changed_.notify_all();
      came_();
    }
  }

  const std::function<std::string()> where_;
  const std::function<void()> came_;
  std::mutex mutex_;
  std::condition_variable changed_;
  uint64_t asked_ = 0, answered_ = 0;
  std::string frame_;
  bool stopping_ = false;
  std::thread thread_;
};

}  // namespace hfreduce
