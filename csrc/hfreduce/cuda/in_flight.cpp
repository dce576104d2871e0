#include "cuda/in_flight.h"

#include <pthread.h>

namespace hfreduce::gpu {

// Polling interval. What the thread finds is for messages and faults, so nothing waits for it.
static constexpr milliseconds kLook{5};

InFlight::InFlight(Communicator& communicator, Driver& driver, std::function<void(const Enqueued&)> look)
    : communicator_(communicator), driver_(driver), look_(std::move(look)), thread_([this] { run(); }) {
  pthread_setname_np(thread_.native_handle(), "hfreduce-gpu");
}

InFlight::~InFlight() {
  {
    std::lock_guard lock(mutex_);
    closed_ = true;
  }
  work_.notify_all();
  thread_.join();
  for (Event event : spare_) driver_.destroy_event(event);
}

Event InFlight::take() {
  if (spare_.empty()) return driver_.event();
  const Event event = spare_.back();
  spare_.pop_back();
  return event;
}

void InFlight::add(const Enqueued& enqueued, Stream stream, bool ordered) {
  std::lock_guard lock(mutex_);
  const Event event = take();
  driver_.record(event, stream);
  operations_.push_back({enqueued, event});
  if (ordered) last_ = stream, end_ = event;
  if (operations_.size() == 1) work_.notify_one();
}

// An event that was reached and recorded again belongs to a later operation. end_ is nevertheless the last ordered
// operation's, because it is reset when it is reached.
void InFlight::order(Stream stream) {
  std::lock_guard lock(mutex_);
  if (end_ && last_ != stream) driver_.wait_event(end_, stream);
}

bool InFlight::empty_by(Deadline deadline) {
  std::unique_lock lock(mutex_);
  return rest_.wait_until(lock, deadline, [this] { return operations_.empty(); }) && !lost_;
}

// Ends the operations that the device has finished. Returns the oldest unfinished one.
std::optional<Enqueued> InFlight::sweep() {
  while (true) {
    Pending first;
    {
      std::lock_guard lock(mutex_);
      if (operations_.empty()) return std::nullopt;
      first = operations_.front();
    }
    if (!driver_.reached(first.event)) return first.enqueued;
    communicator_.ended(first.enqueued, !communicator_.failed());
    std::lock_guard lock(mutex_);
    operations_.pop_front();
    spare_.push_back(first.event);
    if (end_ == first.event) end_ = nullptr;
    if (operations_.empty()) rest_.notify_all();
  }
}

void InFlight::run() {
  std::unique_lock lock(mutex_);
  while (true) {
    work_.wait(lock, [this] { return closed_ || !operations_.empty(); });
    if (work_.wait_for(lock, kLook, [this] { return closed_; })) return;
    const Enqueued first = operations_.front().enqueued;
    lock.unlock();
    std::string broken;
    try {
      const auto oldest = sweep();
      if (oldest) look_(*oldest);
    } catch (const std::exception& error) {
      broken = error.what();
    }
    if (!broken.empty()) communicator_.broke(first, broken);
    lock.lock();
    if (broken.empty()) continue;
    operations_.clear();  // the device is lost: no event will be reached
    lost_ = true, end_ = nullptr;
    rest_.notify_all();
  }
}

}  // namespace hfreduce::gpu
