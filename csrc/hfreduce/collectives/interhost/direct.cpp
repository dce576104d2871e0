// Direct: every host sends to every other host, without hops.
//
// The message is cut into n slices, one for each of the n hosts to add up. Each host sends every other host that host's
// slice. It adds up its own slice from all inputs at once, in the order of hosts and with one rounding, piece by piece:
// each piece when all hosts have sent it. Each piece of the sum goes to all others at once. For N bytes each host sends
// and receives (n-1)/n N for each half, in one hop, over n-1 streams.
#include <algorithm>
#include <memory>

#include "collectives/interhost/rail.h"
#include "collectives/reduce.h"

namespace hfreduce::interhost {

namespace {

class Direct {
 public:
  Direct(const Rail& rail, void* data, int64_t count, const Sum& sum, Part part);
  void run() {
    Backoff backoff(rail_.watch);
    while (!finished()) {
      bool moved = false;
      for (Host& host : hosts_) {
        moved |= send(host);
        moved |= receive(host);
      }
      moved |= add();
      if (moved) {
        backoff.moved();
        continue;
      }
      backoff.rest([&](Backoff::Wanted& wanted) {
        for (Host& host : hosts_) {
          const bool full = !host.to.begun() || may_send(host) > 0, empty = !host.from.begun() || may_receive(host) > 0;
          if (full) host.to.want(wanted);
          if (empty) host.from.want(wanted);
        }
      });
    }
  }

 private:
  // Another host. Sent: its slice of our data, then our sum. Received: our slice of its data, then its sum.
  struct Host {
    int index;
    Sender to;
    Receiver from;
    std::unique_ptr<char[]> piece;
    int64_t sent = 0, received = 0;
  };

  int64_t edge(int slice) const { return slice_begin(count_, slice, rail_.size()) * size_; }
  int64_t begin(int index) const { return edge(rail_.hosts[index]); }
  int64_t bytes(int index) const { return edge(rail_.hosts[index] + 1) - begin(index); }
  int64_t to_send(int host) const { return (scatter_ ? bytes(host) : 0) + (gather_ ? own_ : 0); }
  int64_t to_receive(int host) const { return (scatter_ ? own_ : 0) + (gather_ ? bytes(host) : 0); }
  int64_t piece_end() const { return std::min(own_, added_ + kPiece); }
  // The number of bytes that may be sent now, or received.
  int64_t may_send(const Host& host) const {
    const int64_t first = scatter_ ? bytes(host.index) : 0;
    return host.sent < first ? first - host.sent : gather_ ? first + added_ - host.sent : 0;
  }
  int64_t may_receive(const Host& host) const {
    const int64_t first = scatter_ ? own_ : 0;
    return host.received < first ? piece_end() - host.received : to_receive(host.index) - host.received;
  }
  bool send(Host& host) {
    const int64_t first = scatter_ ? bytes(host.index) : 0;
    const char* from =
        host.sent < first ? data_ + begin(host.index) + host.sent : data_ + begin(rail_.index) + host.sent - first;
    const int64_t now = host.to.write(from, may_send(host));
    host.sent += now;
    return now > 0;
  }
  bool receive(Host& host) {
    const int64_t first = scatter_ ? own_ : 0;
    char* into = host.received < first ? host.piece.get() + host.received - added_
                                       : data_ + begin(host.index) + host.received - first;
    const int64_t now = host.from.read(into, may_receive(host));
    host.received += now;
    return now > 0;
  }
  bool add() {
    const int64_t end = piece_end();
    if (added_ == own_) return false;
    for (const Host& host : hosts_)
      if (host.received < end) return false;
    char* const own = data_ + begin(rail_.index) + added_;
    std::vector<const void*> inputs(rail_.size());
    for (const Host& host : hosts_) inputs[rail_.hosts[host.index]] = host.piece.get();
    inputs[rail_.hosts[rail_.index]] = own;
    reduce(own, inputs.data(), nullptr, rail_.size(), (end - added_) / size_, sum_.dtype, sum_.last(), sum_.divisor);
    added_ = end;
    return true;
  }
  bool finished() {
    for (Host& host : hosts_)
      if (!host.to.begun() || !host.from.begun() || host.sent < to_send(host.index) ||
          host.received < to_receive(host.index))
        return false;
    return true;
  }

  const Rail& rail_;
  char* const data_;
  const int64_t count_, size_;
  const Sum& sum_;
  const bool scatter_, gather_;
  const int64_t own_;  // bytes of this host's slice
  int64_t added_ = 0;  // bytes of it that are added up
  std::vector<Host> hosts_;
};

Direct::Direct(const Rail& rail, void* data, int64_t count, const Sum& sum, Part part)
    : rail_(rail),
      data_(static_cast<char*>(data)),
      count_(count),
      size_(size_of(sum.dtype)),
      sum_(sum),
      scatter_(part != Part::gather),
      gather_(part != Part::scatter),
      own_(bytes(rail.index)) {
  if (!scatter_) added_ = own_;
  // Hosts begin with different peers, to spread the load: all with the next one, then all with the one after that.
  for (int i = 1; i < rail.size(); ++i) {
    const int index = (rail.index + i) % rail.size();
    hosts_.push_back({index, Sender(rail, rail.ranks[index], 0, to_send(index)),
                      Receiver(rail, rail.ranks[index], 0, to_receive(index)), nullptr});
    if (scatter_) hosts_.back().piece.reset(new char[std::min(kPiece, own_)]);
  }
}

}  // namespace

void direct(const Rail& rail, void* data, int64_t count, const Sum& sum, Part part) {
  Direct(rail, data, count, sum, part).run();
}

}  // namespace hfreduce::interhost
