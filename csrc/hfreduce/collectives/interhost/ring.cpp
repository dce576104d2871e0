// Ring: the n hosts of a rail form a circle. Each sends to the next and receives from the one before.
//
// The message is cut into n slices. In step k = 0 ... n-2 host i sends slice i-1-k and receives slice i-2-k, to which
// it adds its own data. So after n-1 steps it has the whole sum of slice i, added in the order i+1, i+2, ..., i of the
// hosts, rounded to the dtype at each hop. In steps n-1 ... 2n-3 the sums go round once more and replace the old data.
// What is received in one step is sent in the next, and bytes are sent on as soon as they are added, so all steps
// overlap. For N bytes each host sends and receives (n-1)/n N for each half, in n-1 hops.
//
// Patarasuk, Yuan: Bandwidth optimal all-reduce algorithms for clusters of workstations. JPDC 69 (2009).
#include <algorithm>

#include "collectives/interhost/rail.h"
#include "collectives/reduce.h"

namespace hfreduce::interhost {

namespace {

class Ring {
 public:
  Ring(const Rail& rail, void* data, int64_t count, const Sum& sum, Part part);
  void run() {
    Backoff backoff(rail_.watch);
    // Also waits for the headers of empty messages.
    while (send_step_ < end_ || receive_step_ < end_ || !to_.begun() || !from_.begun()) {
      const bool sent = send(), received = receive();
      if (sent || received) {
        backoff.moved();
        continue;
      }
      backoff.rest([&](Backoff::Wanted& wanted) {
        if (!to_.begun() || (send_step_ < end_ && sent_ < ready())) to_.want(wanted);
        if (!from_.begun() || receive_step_ < end_) from_.want(wanted);
      });
    }
  }

 private:
  int slice(int back) const { return ((me_ - back) % n_ + n_) % n_; }
  int64_t edge(int slice) const { return slice_begin(count_, slice, n_) * size_; }
  int64_t begin(int index) const { return edge(rail_.hosts[index]); }
  int64_t bytes(int index) const { return edge(rail_.hosts[index] + 1) - begin(index); }
  // Bytes of the slices of all steps.
  int64_t total(int back) const {
    int64_t sum = 0;
    for (int k = first_; k < end_; ++k) sum += bytes(slice(back + k));
    return sum;
  }
  // Bytes of the current slice that may be sent.
  int64_t ready() const {
    if (send_step_ == first_ || receive_step_ >= send_step_) return bytes(slice(1 + send_step_));
    return receive_step_ == send_step_ - 1 ? received_ : 0;
  }
  bool send() {
    bool moved = false;
    while (send_step_ < end_) {
      const int which = slice(1 + send_step_);
      const int64_t now = to_.write(data_ + begin(which) + sent_, ready() - sent_);
      sent_ += now;
      moved |= now > 0;
      if (sent_ < bytes(which)) return moved;
      ++send_step_;
      sent_ = 0;
      moved = true;
    }
    return moved;
  }
  bool receive() {
    if (receive_step_ == end_) return false;
    const int which = slice(2 + receive_step_);
    char* const at = data_ + begin(which) + received_;
    const int64_t left = bytes(which) - received_;
    int64_t now;
    if (receive_step_ < n_ - 1) {
      const int64_t whole = std::min(left, static_cast<int64_t>(piece_.size()));
      now = from_.read(piece_.data() + in_piece_, whole - in_piece_);
      in_piece_ += now;
      if (in_piece_ == whole) add(whole);
    } else {
      now = from_.read(at, left);
      received_ += now;
    }
    if (received_ < bytes(which)) return now > 0;
    ++receive_step_;
    received_ = 0;
    return true;
  }
  // Adds the piece that has arrived.
  void add(int64_t bytes) {
    if (bytes > 0) {
      char* const own = data_ + begin(slice(2 + receive_step_)) + received_;
      const void* const inputs[] = {piece_.data(), own};
      const bool last = receive_step_ == n_ - 2;
      reduce(own, inputs, nullptr, 2, bytes / size_, sum_.dtype, last ? sum_.last() : sum_.partial(),
             last ? sum_.divisor : 1);
    }
    received_ += bytes;
    in_piece_ = 0;
  }

  const Rail& rail_;
  char* const data_;
  const int64_t count_, size_;
  const Sum& sum_;
  const int n_, me_, first_, end_;  // steps
  Sender to_;
  Receiver from_;
  int send_step_, receive_step_;
  int64_t sent_ = 0, received_ = 0;  // bytes of the current step
  std::vector<char> piece_;
  int64_t in_piece_ = 0;
};

// The steps of a part: scatter has 0 ... n-2, gather has n-1 ... 2n-3.
int first_step(Part part, int n) { return part == Part::gather ? n - 1 : 0; }
int end_step(Part part, int n) { return part == Part::scatter ? n - 1 : 2 * (n - 1); }

Ring::Ring(const Rail& rail, void* data, int64_t count, const Sum& sum, Part part)
    : rail_(rail),
      data_(static_cast<char*>(data)),
      count_(count),
      size_(size_of(sum.dtype)),
      sum_(sum),
      n_(rail.size()),
      me_(rail.index),
      first_(first_step(part, n_)),
      end_(end_step(part, n_)),
      to_(rail, rail.ranks[(me_ + 1) % n_], 0, total(1)),
      from_(rail, rail.ranks[(me_ + n_ - 1) % n_], 0, total(2)),
      send_step_(first_),
      receive_step_(first_) {
  if (part != Part::gather) piece_.resize(std::min(kPiece, edge(n_) - edge(n_ - 1)));  // the last is the largest
}

}  // namespace

void ring(const Rail& rail, void* data, int64_t count, const Sum& sum, Part part) {
  Ring(rail, data, count, sum, part).run();
}

}  // namespace hfreduce::interhost
