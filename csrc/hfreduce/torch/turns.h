// Which of a few streams an asynchronous operation uses.
//
// Successive host-staged all_reduces overlap if their streams differ: one copies D2H while another copies H2D. But the
// operations of a group must behave as if they ran in order: an operation may use the output of the one before it
// without a wait in between. So the stream changes only between two such all_reduces that share no memory (nor with the
// recent ones before). Everything else uses the stream of the last operation. It then comes after that one, and so
// after all, since copies of one direction are ordered across streams (staged.cpp).
#pragma once

#include <deque>
#include <utility>
#include <vector>

namespace hfreduce {

class Turns {
 public:
  static constexpr int kStreams = 3;
  using Range = std::pair<const char*, const char*>;  // begin, end

  // overlaps: whether it is a host-staged all_reduce. memory: what it reads and writes.
  int next(bool overlaps, const std::vector<Range>& memory) {
    if (!overlaps) {
      recent_.clear();
      return last_;
    }
    if (!recent_.empty()) {
      int turn = (last_ + 1) % kStreams;
      for (const auto& [stream, theirs] : recent_)
        if (meet(theirs, memory)) turn = stream;
      last_ = turn;
    }
    recent_.emplace_back(last_, memory);
    if (recent_.size() > kRecent) recent_.pop_front();
    return last_;
  }

 private:
  // The first D2H copy of an operation waits until earlier chunks, as many as the ring is deep (4), have gone H2D.
  static constexpr size_t kRecent = 16;

  static bool meet(const std::vector<Range>& a, const std::vector<Range>& b) {
    for (const Range& x : a)
      for (const Range& y : b)
        if (x.first < y.second && y.first < x.second) return true;
    return false;
  }

  std::deque<std::pair<int, std::vector<Range>>> recent_;
  int last_ = 0;
};

}  // namespace hfreduce
