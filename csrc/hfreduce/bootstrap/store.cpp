#include "bootstrap/store.h"

#include <algorithm>
#include <stdexcept>
#include <thread>

namespace hfreduce {

bool ask_until(Deadline deadline, const std::function<bool()>& answered) {
  const Clock::duration longest = milliseconds(50);
  for (Clock::duration pause = milliseconds(1);; pause = std::min(pause * 3 / 2, longest)) {
    if (answered()) return true;
    const Clock::duration left = deadline - Clock::now();
    if (left <= Clock::duration::zero()) return false;
    std::this_thread::sleep_for(std::min(pause, left));
  }
}

std::string Store::wait(const std::string& key, Deadline deadline) {
  std::optional<std::string> value;
  if (ask_until(deadline, [&] { return (value = find(key)).has_value(); })) return *std::move(value);
  throw std::runtime_error("hfreduce: nobody has set the key '" + key + "' in the store by the deadline");
}

}  // namespace hfreduce
