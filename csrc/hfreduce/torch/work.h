// An operation as torch holds it (c10d::Work), and the Line: an in-order queue of operations, served by one thread.
//
// Completing a future runs its callbacks. A callback may begin another operation and wait for it (the PowerSGD hook
// does). Two rules prevent deadlocks and keep the order equal on all ranks:
//   * A future is completed by the thread that served the operation, before that thread serves the next one.
//   * An operation that this thread begins meanwhile runs at once, before all queued ones.
// So operations begun by callbacks run right after the operation that the callbacks belong to, whatever the timing.
// With a pool of callback threads, as in gloo, the callbacks of two gradient buckets race, and ranks begin their nested
// operations in different orders. If a callback waits for an operation that is still queued, another thread of the Line
// takes over after a second.
//
// An operation on device memory has ended for this file when its work is enqueued on a stream. `wait` then makes the
// current stream wait for that stream and does not block. The tensors are kept alive until someone has waited, or the
// device has finished (Backend::sweep).
#pragma once

#include <pthread.h>

#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <utility>
#include <vector>

#include "diagnostics/fault.h"
#include "torch/device.h"
#include "transport/socket.h"

namespace hfreduce {

class Operation : public c10d::Work {
 public:
  using Body = std::function<void(int& source)>;  // source: set to the sender's rank by a receive from any rank

  Operation(int rank, c10d::OpType type, const char* title, std::vector<at::Tensor> outputs, uint64_t sequence,
            Body body, std::unique_ptr<Placed> placed = nullptr)
      : Work(rank, type, title),
        outputs_(std::move(outputs)),
        body_(std::move(body)),
        placed_(std::move(placed)),
        sequence_(sequence) {}

  std::vector<at::Tensor> result() override { return outputs_; }
  int sourceRank() const override { return source_; }
  uint64_t getSequencenumber() const override { return sequence_; }
  void blockCurrentStream() override { wait(); }

  // On a device, does not block (see above) unless a timeout is given: then this waits for the work itself.
  bool wait(std::chrono::milliseconds timeout = kNoTimeout) override {
    TORCH_CHECK_WITH(DistBackendError, forks() == forks_,
                     "hfreduce: this process is a fork of the one that began this ",
                     "operation, which alone can wait for it");
    const Deadline deadline = Clock::now() + timeout;
    Work::wait(timeout);
    while (timeout != kNoTimeout && !isCompleted()) {
      TORCH_CHECK_WITH(DistBackendError, Clock::now() < deadline, "hfreduce: an operation on the device has not ended ",
                       "within the timeout that wait() was given, ", timeout.count(), " ms");
      std::this_thread::sleep_for(std::chrono::microseconds(50));
    }
    return true;
  }

  void synchronize() override {
    for (const auto& member : members_) member->synchronize();
    if (!placed_) return;
    try {
      std::lock_guard lock(placing_);
      placed_->synchronize();
    } catch (const Fault& fault) {
      TORCH_CHECK_WITH(DistBackendError, false, fault.what());
    }
    release();
  }

  bool isCompleted() override {
    if (!Work::isCompleted()) return false;
    for (const auto& member : members_)
      if (!member->isCompleted()) return false;
    std::lock_guard lock(placing_);
    return exception_ || !placed_ || placed_->reached();
  }

  // Releases the body and its tensors: the device has finished, or the current stream waits for it.
  void release() {
    Body body;
    std::lock_guard lock(placing_);
    body.swap(kept_);
  }
  bool kept() const {
    std::lock_guard lock(placing_);
    return static_cast<bool>(kept_);
  }

  // Created on first use: most operations are only waited for.
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    std::lock_guard lock(mutex_);
    if (!future_) {
      future_ = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()), devices());
      settled_ = completed_;
      if (completed_) mark();  // no callback can be attached yet
    }
    return future_;
  }

  // Runs the body. Returns the error, for `end`.
  std::exception_ptr execute() {
    std::exception_ptr error;
    try {
      at::AutoDispatchBelowADInplaceOrView below;  // autograd must not record copies of tensors that require grad
      c10::OptionalStreamGuard guard;
      if (placed_) {
        guard.reset_stream(placed_->stream());
        placed_->begin();
      }
      body_(source_);
      if (placed_) placed_->end();
    } catch (const Fault& fault) {
      error = std::make_exception_ptr(c10::DistBackendError({__func__, __FILE__, __LINE__}, fault.what()));
    } catch (...) {
      error = std::current_exception();
    }
    std::lock_guard lock(placing_);
    if (placed_ && placed_->own()) kept_.swap(body_);
    body_ = nullptr;  // releases its tensors
    return error;
  }

  // Wakes the waiters. Returns whether `notify` has work: a future that was handed out, or a bundle.
  bool end(const std::exception_ptr& error) {
    finish(error);
    std::lock_guard lock(mutex_);
    if (future_) owes_ = !std::exchange(settled_, true);
    return owes_ || bundle_;
  }

  // Completes the future, which runs its callbacks, and informs the bundle.
  void notify() {
    if (owes_) mark();
    if (bundle_) std::exchange(bundle_, {})->part_ended(exception_);
  }

  // Makes this operation, which has no body, a bundle of others. It ends when all of them have ended and `part_ended`
  // was called once more, for the bundle itself.
  void add(Operation& part) {
    parts_.fetch_add(1, std::memory_order_relaxed);
    part.bundle_ = c10::intrusive_ptr<Operation>::reclaim_copy(this);
    members_.push_back(c10::intrusive_ptr<Operation>::reclaim_copy(&part));
    outputs_.insert(outputs_.end(), part.outputs_.begin(), part.outputs_.end());
  }

  void part_ended(const std::exception_ptr& error) {
    {
      std::lock_guard lock(mutex_);
      if (!first_error_) first_error_ = error;
    }
    if (parts_.fetch_sub(1, std::memory_order_acq_rel) == 1 && end(first_error_)) notify();
  }

 private:
  std::vector<c10::Device> devices() const {
    std::vector<c10::Device> devices;
    if (placed_) devices.push_back(placed_->device());
    for (const auto& member : members_)
      if (member->placed_ && devices.empty()) devices.push_back(member->placed_->device());
    return devices;
  }

  // A device future records its completion on the current stream: the work's, or one that waits for all members.
  void mark() {
    if (exception_) return future_->setError(exception_);
    c10::OptionalStreamGuard guard;
    if (placed_) {
      guard.reset_stream(placed_->stream());
    } else if (const auto used = devices(); !used.empty()) {
      guard.reset_stream(pool_stream(used[0]));
      for (const auto& member : members_) member->synchronize();
    }
    future_->markCompleted(c10::IValue(outputs_));
  }

  std::vector<at::Tensor> outputs_;
  Body body_, kept_;
  mutable std::mutex placing_;  // guards kept_ and placed_: torch holds mutex_ while it calls synchronize()
  std::unique_ptr<Placed> placed_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
  c10::intrusive_ptr<Operation> bundle_;                // the bundle that this is a member of
  std::vector<c10::intrusive_ptr<Operation>> members_;  // of a bundle
  std::exception_ptr first_error_;
  std::atomic<int> parts_{1};
  const uint64_t sequence_;
  const int forks_ = forks();
  int source_ = -1;
  bool settled_ = false, owes_ = false;
};

// Runs operations in the order of submission, one at a time: on a thread that is started on first use, or on the
// caller's thread if nothing is queued. Held by shared_ptr: its threads keep it alive.
class Line : public std::enable_shared_from_this<Line> {
 public:
  using Entry = c10::intrusive_ptr<Operation>;

  // inline_ok: the caller may run it itself, since it will wait at once, or since the operation only enqueues.
  void submit(const Entry& operation, bool inline_ok) {
    std::unique_lock lock(mutex_);
    TORCH_CHECK_WITH(DistBackendError, !closed_, "hfreduce: this process group was shut down: make a new one to go on");
    const bool nested = holder_ == std::this_thread::get_id();
    if (nested || (inline_ok && free() && queue_.empty())) {
      serve(lock, operation);
      if (holder_ != std::this_thread::get_id()) return;
      if (!nested) return leave();
      notifying_ = Clock::now();  // the callback goes on
      return;
    }
    queue_.push_back(operation);
    if (threads_.empty()) start();
    work_.notify_one();
  }

  // Whether nothing is queued or running, and nobody but its threads and one owner holds it.
  bool idle() const {
    std::lock_guard lock(mutex_);
    return free() && queue_.empty() && weak_from_this().use_count() <= static_cast<long>(threads_.size()) + 1;
  }

  // Waits until nothing is queued or running. Returns whether that was in time.
  bool idle_by(Deadline deadline) {
    std::unique_lock lock(mutex_);
    if (holder_ == std::this_thread::get_id()) return queue_.empty();
    return rest_.wait_until(lock, deadline, [this] { return free() && queue_.empty(); });
  }

  // Serves the queued operations, accepts no more, and joins the threads. Idempotent.
  void close() {
    std::unique_lock lock(mutex_);
    closed_ = true;
    work_.notify_all();
    while (!threads_.empty()) {
      std::thread thread = std::move(threads_.back());
      threads_.pop_back();
      lock.unlock();
      if (thread.get_id() == std::this_thread::get_id())
        thread.detach();  // a callback closes its own Line; the thread ends after the callback
      else
        thread.join();
      lock.lock();
    }
  }

 private:
  static constexpr milliseconds kPatience{1000};  // with a callback, while operations are queued

  bool free() const { return holder_ == std::thread::id(); }
  bool overdue() const { return notifying_ != Deadline() && Clock::now() - notifying_ > kPatience; }
  bool ready() const { return !queue_.empty() && (free() || overdue()); }

  void start() {
    threads_.emplace_back([self = shared_from_this()] { self->run(); });
    pthread_setname_np(threads_.back().native_handle(), "hfreduce");
  }

  void run() {
    std::unique_lock lock(mutex_);
    while (true) {
      ++idle_;
      if (queue_.empty())
        work_.wait(lock, [this] { return !queue_.empty() || closed_; });
      else  // another thread holds the line: check the clock from time to time
        work_.wait_for(lock, kPatience, [this] { return ready() || closed_; });
      --idle_;
      if (ready()) {
        const Entry operation = std::move(queue_.front());
        queue_.pop_front();
        serve(lock, operation);
        if (holder_ == std::this_thread::get_id()) leave();
      } else if (closed_ && queue_.empty()) {
        return;
      } else if (closed_) {
        work_.wait_for(lock, milliseconds(10));  // another thread serves the rest
      }
    }
  }

  // This thread holds the Line from here to `leave`, or until another thread takes over during its callbacks.
  void serve(std::unique_lock<std::mutex>& lock, const Entry& operation) {
    holder_ = std::this_thread::get_id();
    notifying_ = Deadline();
    lock.unlock();
    const bool more = operation->end(operation->execute());
    lock.lock();
    if (!more) return;
    notifying_ = Clock::now();
    if (idle_ == 0 && !closed_) start();
    lock.unlock();
    operation->notify();
    lock.lock();
  }

  void leave() {
    holder_ = std::thread::id();
    notifying_ = Deadline();
    if (!queue_.empty() || closed_)
      work_.notify_one();
    else
      rest_.notify_all();
  }

  mutable std::mutex mutex_;
  std::condition_variable work_, rest_;
  std::deque<Entry> queue_;
  std::vector<std::thread> threads_;
  std::thread::id holder_;  // the thread that serves
  Deadline notifying_;      // since when the holder runs callbacks; Deadline() while it serves
  int idle_ = 0;
  bool closed_ = false;
};

}  // namespace hfreduce
