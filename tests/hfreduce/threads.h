// For programs whose ranks are threads: a store in memory, and a check that aborts the program.
#pragma once

#include <cstdio>
#include <cstdlib>
#include <map>
#include <mutex>
#include <optional>
#include <string>

#include "bootstrap/roster.h"

#define EXPECT(condition)                                                          \
  do {                                                                             \
    if (!(condition)) {                                                            \
      std::fprintf(stderr, "%s:%d: not so: %s\n", __FILE__, __LINE__, #condition); \
      std::abort();                                                                \
    }                                                                              \
  } while (0)

namespace hfreduce {

// The arguments of a program: number of rounds, and seed.
struct Given {
  Given(int argc, char** argv) {
    EXPECT(argc == 3);
    rounds = std::atoi(argv[1]);
    seed = static_cast<unsigned>(std::atoi(argv[2]));
  }
  int rounds;
  unsigned seed;
};

class Notes : public Store {
 public:
  void set(const std::string& key, const std::string& value) override {
    std::lock_guard lock(mutex_);
    notes_[key] = value;
  }
  std::optional<std::string> find(const std::string& key) override {
    std::lock_guard lock(mutex_);
    const auto found = notes_.find(key);
    return found == notes_.end() ? std::nullopt : std::optional(found->second);
  }

 private:
  std::mutex mutex_;
  std::map<std::string, std::string> notes_;
};

}  // namespace hfreduce
