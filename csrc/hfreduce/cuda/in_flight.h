// Operations that this rank has enqueued and the device has not finished. A thread polls them, and sleeps while there
// are none.
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
  // look: called with the oldest operation every few milliseconds. It may fail the communicator. Once that has failed,
  // it must release what waits, every time: a peer's stream may lower a raised flag again.
  InFlight(Communicator&, Driver&, std::function<void(const Enqueued&)> look);
  ~InFlight();  // joins the thread; unfinished operations keep their events

  // Adds an operation whose work was enqueued on `stream`. ordered: whether `order` applies to it.
  void add(const Enqueued&, Stream stream, bool ordered);
  // Makes later work on `stream` run after the last ordered operation.
  void order(Stream stream);

  bool empty_by(Deadline deadline);  // whether all operations have ended by then

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
  Event end_ = nullptr;  // of the last ordered operation, on last_
  bool closed_ = false, lost_ = false;
  std::thread thread_;
};

}  // namespace hfreduce::gpu
