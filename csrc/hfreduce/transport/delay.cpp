#include "transport/delay.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <system_error>

namespace hfreduce {
namespace {

constexpr size_t kHeld = 1024;  // parcels of a connection; more stay in the kernel

timespec to_timespec(Clock::duration duration) {
  const int64_t ns = std::max<int64_t>(std::chrono::nanoseconds(duration).count(), 0);
  return {static_cast<time_t>(ns / 1000000000), static_cast<long>(ns % 1000000000)};
}

}  // namespace

std::unique_ptr<Delay> Delay::wanted(std::vector<Socket>& sockets) {
  const char* text = std::getenv("HFREDUCE_TEST_DELAY_US");
  const int64_t us = text ? std::atoll(text) : 0;
  if (us <= 0) return nullptr;
  return std::unique_ptr<Delay>(new Delay(sockets, std::chrono::microseconds(us)));
}

Delay::Delay(std::vector<Socket>& sockets, std::chrono::microseconds time)
    : time_(time), bell_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
  for (Socket& socket : sockets) {
    int pair[2];
    if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, pair) != 0)
      throw std::system_error(errno, std::generic_category(), "hfreduce: socketpair");
    lanes_.push_back({std::move(socket), Socket(pair[0]), {}});
    socket = Socket(pair[1]);
  }
  thread_ = std::thread([this] { run(); });
}

Delay::~Delay() {
  eventfd_write(bell_.fd(), 1);
  thread_.join();
}

void Delay::run() {
  while (wait())
    for (Lane& lane : lanes_) {
      take_in(lane);
      pass_on(lane);
    }
}

bool Delay::wait() {
  std::vector<pollfd> asked = {{bell_.fd(), POLLIN, 0}};
  Deadline next = Deadline::max();
  for (const Lane& lane : lanes_) {
    if (!lane.ended && lane.held.size() < kHeld) asked.push_back({lane.from.fd(), POLLIN, 0});
    if (lane.full) asked.push_back({lane.to.fd(), POLLOUT, 0});
    if (!lane.full && !lane.held.empty()) next = std::min(next, lane.held.front().due);
  }
  const timespec left = to_timespec(next == Deadline::max() ? Clock::duration::zero() : next - Clock::now());
  ppoll(asked.data(), asked.size(), next == Deadline::max() ? nullptr : &left, nullptr);
  return asked[0].revents == 0;
}

void Delay::take_in(Lane& lane) {
  char bytes[16 << 10];
  while (!lane.ended && lane.held.size() < kHeld) {
    const ssize_t got = recv(lane.from.fd(), bytes, sizeof bytes, 0);
    if (got < 0 && (errno == EAGAIN || errno == EINTR)) return;
    lane.ended = got <= 0;
    // The end travels as an empty parcel: it must not overtake the bytes before it.
    lane.held.push_back({Clock::now() + time_, std::string(bytes, lane.ended ? 0 : static_cast<size_t>(got))});
  }
}

void Delay::pass_on(Lane& lane) {
  lane.full = false;
  while (!lane.held.empty() && lane.held.front().due <= Clock::now()) {
    Parcel& parcel = lane.held.front();
    if (parcel.bytes.empty()) shutdown(lane.to.fd(), SHUT_WR);
    while (parcel.passed_on < parcel.bytes.size()) {
      const ssize_t sent = send(lane.to.fd(), parcel.bytes.data() + parcel.passed_on,
                                parcel.bytes.size() - parcel.passed_on, MSG_NOSIGNAL);
      lane.full = sent < 0 && errno == EAGAIN;
      if (sent < 0) return;
      parcel.passed_on += static_cast<size_t>(sent);
    }
    lane.held.pop_front();
  }
}

}  // namespace hfreduce
