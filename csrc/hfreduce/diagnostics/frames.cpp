#include "diagnostics/frames.h"

#include <exception>

namespace hfreduce {

Frames::Frames(std::function<std::string()> where, std::function<void()> came)
    : where_(std::move(where)), came_(std::move(came)) {}

uint64_t Frames::ask() {
  std::lock_guard lock(mutex_);
  if (!where_ || stopping_) {
    answered_ = ++asked_;
    return asked_;
  }
  if (!thread_.joinable()) thread_ = std::thread([this] { run(); });
  changed_.notify_all();
  return ++asked_;
}

void Frames::run() {
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

std::optional<std::string> Frames::get(uint64_t ticket) {
  std::lock_guard lock(mutex_);
  return answered_ >= ticket ? std::optional<std::string>(frame_) : std::nullopt;
}

std::string Frames::wait(uint64_t ticket, Deadline deadline) {
  std::unique_lock lock(mutex_);
  changed_.wait_until(lock, deadline, [&] { return stopping_ || answered_ >= ticket; });
  return answered_ >= ticket ? frame_ : "";
}

void Frames::stop() {
  {
    std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  changed_.notify_all();
  if (thread_.joinable()) thread_.join();
}

}  // namespace hfreduce
