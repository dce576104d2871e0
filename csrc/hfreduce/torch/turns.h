// Which of a few streams an operation takes that its caller does not wait for at once.
//
// host-staged all_reduces that follow each other overlap where their streams differ: one comes down while another goes
// up. But what is given to a group is done in its order, as far as anybody can see: an operation may work on what the
// one before writes, without waiting for it in between. So streams change only from one such all_reduce to another one
// that shares no memory with those before it. Everything else goes where the last operation went: it is behind that
// one, and so behind all, since copies of one direction follow each other in whatever streams (staged.cpp).
#pragma once

#include <deque>
#include <utility>
#include <vector>

namespace hfreduce {

class Turns {
 public:
  static constexpr int kStreams = 3;
  using Range = std::pair<const char*, const char*>;  // begin, end

  // overlaps: whether it is such an all_reduce. memory: what it reads and writes.
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
  // An operation's first chunk comes down when as many chunks before as the ring is deep have gone up: 4.
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
