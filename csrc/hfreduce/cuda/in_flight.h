// What a rank has enqueued and the device has not done yet; a thread of its own looks at it, and sleeps when there is
// nothing.
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <optional>
#include <thread>
#include <vector>

#include "communicator.h"
#include "cuda/driver.h"

namespace hfreduce::gpu {

class InFlight {
 public:
  // look: asked of the oldest operation every few milliseconds. It may fail the communicator; when that has failed, it
  // is to let go of what waits: every time, for a peer's stream may take back what was raised.
  InFlight(Communicator&, Driver&, std::function<void(const Enqueued&)> look);
  ~InFlight();  // joins the thread; what has not ended keeps its event

  // An operation whose work `stream` has: marks its end. ordered: whether `order` is about it.
  void add(const Enqueued&, Stream stream, bool ordered);
  // Whatever `stream` is given next comes after the last operation that was ordered.
  void order(Stream stream);

  bool empty_by(Deadline deadline);  // whether all has ended by then

 private:
  struct Pending {
    Enqueued enqueued;
    Event event;
  };

  void run();
  std::optional<Enqueued> sweep();
  Event take();

  Communicator& communicator_;
  Driver& driver_;
  const std::function<void(const Enqueued&)> look_;
  std::mutex mutex_;
  std::condition_variable work_, rest_;
  std::deque<Pending> operations_;
  std::vector<Event> spare_;
  Stream last_ = nullptr;
  Event end_ = nullptr;  // of the last one that was ordered, on last_
  bool closed_ = false, lost_ = false;
  std::thread thread_;
};

}  // namespace hfreduce::gpu
