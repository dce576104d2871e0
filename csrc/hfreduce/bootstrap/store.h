// Where ranks leave each other notes before they are connected: torch's Store, or a stand-in of a test.
#pragma once

#include <functional>
#include <optional>
#include <string>

#include "types.h"

namespace hfreduce {

// Keys are of one communicator. `find` never blocks: torch's TCPStore serialises its calls, and a blocked one would
// keep other threads of the process from writing what this one waits for.
class Store {
 public:
  virtual ~Store() = default;
  virtual void set(const std::string& key, const std::string& value) = 0;
  virtual std::optional<std::string> find(const std::string& key) = 0;

  // The value, as soon as somebody has set it: see ask_until. Throws std::runtime_error naming the key at the deadline.
  std::string wait(const std::string& key, Deadline deadline);
};

// Asks until the answer is yes: again after 1 ms, then ever more rarely, up to 50 ms. False when it was never yes by
// the deadline.
bool ask_until(Deadline deadline, const std::function<bool()>& answered);

}  // namespace hfreduce
