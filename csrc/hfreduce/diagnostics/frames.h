// What Python does just now, asked on a thread of its own: it may have to wait for the interpreter.
#pragma once

#include <condition_variable>
#include <functional>
#include <mutex>
#include <optional>
#include <string>
#include <thread>

#include "types.h"

namespace hfreduce {

class Frames {
 public:
  // where: see Monitor; may be null. came: called when an answer has come.
  Frames(std::function<std::string()> where, std::function<void()> came);
  ~Frames() { stop(); }

  uint64_t ask();  // returns a ticket; the thread starts at the first one
  std::optional<std::string> get(uint64_t ticket);
  std::string wait(uint64_t ticket, Deadline deadline);  // "" when it does not come
  void stop();                                           // joins the thread; idempotent

 private:
  void run();

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
