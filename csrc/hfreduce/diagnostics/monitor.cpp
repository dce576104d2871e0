// Nothing is sent while all is well: the kernel closes the sockets of a killed process, and an end without goodbye is a
// death. The peers on its host read its last operation from shared memory, and tell the others.
#include "diagnostics/monitor.h"

#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <condition_variable>
#include <cstring>
#include <map>
#include <optional>
#include <string_view>
#include <system_error>
#include <thread>
#include <type_traits>

#include "diagnostics/frames.h"

namespace hfreduce {

namespace {

// What monitors send each other: a head and a body.
enum class Notice : uint32_t {
  request = 1,  // a number: asks where the rank is
  status,       // the number, a RankStatus: sent when Python has answered, or after kFrame
  fault,        // cause, ranks at fault, text: the group has failed
  goodbye,      // the end of this connection is no death; or, as in `fault`, the reason why the rank ended
};

struct Head {
  Notice message;
  uint32_t bytes;  // of the body
};

constexpr uint32_t kLongest = 1 << 20;

template <class T>
void put(std::string& to, const T& value) {
  static_assert(std::is_trivially_copyable_v<T>);
  to.append(reinterpret_cast<const char*>(&value), sizeof(value));
}

// Removes a value from the front. Returns false if there are too few bytes.
template <class T>
bool get(std::string_view& from, T& value) {
  static_assert(std::is_trivially_copyable_v<T>);
  if (from.size() < sizeof(value)) return false;
  std::memcpy(&value, from.data(), sizeof(value));
  from.remove_prefix(sizeof(value));
  return true;
}

std::string framed(Notice message, const std::string& body) {
  std::string out;
  put(out, Head{message, static_cast<uint32_t>(body.size())});
  return out + body;
}

std::string encode(const Fault& fault) {
  std::string body;
  put(body, static_cast<int32_t>(fault.cause));
  put(body, static_cast<int32_t>(fault.ranks.size()));
  for (int rank : fault.ranks) put(body, static_cast<int32_t>(rank));
  const std::string text = fault.what();
  return body + text.substr(0, kLongest - body.size());
}

std::optional<Fault> decode_fault(std::string_view body) {
  int32_t cause, n;
  if (!get(body, cause) || !get(body, n) || cause < 0 || cause > static_cast<int32_t>(Fault::Cause::broken))
    return std::nullopt;
  std::vector<int> ranks;
  for (int32_t rank; n > 0; --n, ranks.push_back(rank))
    if (!get(body, rank)) return std::nullopt;
  return Fault(static_cast<Fault::Cause>(cause), ranks, std::string(body));
}

constexpr milliseconds kFrame{300};    // how long an answer waits for Python
constexpr milliseconds kWitness{150};  // how long a death report waits for a peer that knows the last collective
constexpr milliseconds kFlush{200};    // how long leave() tries to send the last messages
constexpr int kSilence = 8;            // seconds without an acknowledgement after which a host is given up

// TCP probes the other host after a second of silence, because a host that is cut off closes no connection. A stopped
// process still acknowledges. Unix sockets reject these options and do not need them.
void notice_silence(int fd) {
  const int on = 1, second = 1, probes = kSilence, limit = kSilence * 1000;
  setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &on, sizeof(on));
  setsockopt(fd, IPPROTO_TCP, TCP_KEEPIDLE, &second, sizeof(second));
  setsockopt(fd, IPPROTO_TCP, TCP_KEEPINTVL, &second, sizeof(second));
  setsockopt(fd, IPPROTO_TCP, TCP_KEEPCNT, &probes, sizeof(probes));
  setsockopt(fd, IPPROTO_TCP, TCP_USER_TIMEOUT, &limit, sizeof(limit));
}

struct Link {
  Socket socket;
  std::string in;   // incomplete message; used by the monitor's thread only
  std::string out;  // what the socket did not take yet
  bool left = false;
  bool open() const { return socket.fd() >= 0; }
};

struct Answer {
  int to;
  uint32_t number;
  uint64_t ticket;  // of its frame
  Deadline deadline;
};

struct Death {
  int rank, error;
  Deadline deadline;
};

}  // namespace

struct Monitor::State {
  State(const Roster& roster, std::vector<Socket> sockets, Health& health, const Recorder& recorder, Where where,
        Last last);

  void run() {
    std::vector<pollfd> fds;
    while (!done()) {
      fds.assign(1, {wake_fd, POLLIN, 0});
      {
        std::lock_guard lock(mutex);
        for (const Link& link : links)  // a negative descriptor is skipped by poll
          fds.push_back({link.socket.fd(), static_cast<short>(POLLIN | (link.out.empty() ? 0 : POLLOUT)), 0});
      }
      if (wait(fds) <= 0) fds.clear();
      for (size_t i = 1; i < fds.size(); ++i) {
        const int rank = static_cast<int>(i) - 1;
        if (fds[i].revents & POLLOUT) {
          std::lock_guard lock(mutex);
          flush(rank);
        }
        if (fds[i].revents & ~POLLOUT) read(rank);
      }
      answer_due();
      report_due();
    }
  }
  // After leave(): whether everything is sent, or the time for it is over.
  bool done() {
    std::lock_guard lock(mutex);
    if (!leaving) return false;
    return Clock::now() >= *leaving || std::all_of(links.begin(), links.end(), [](auto& l) { return l.out.empty(); });
  }
  // Until an event or a deadline.
  int wait(std::vector<pollfd>& fds) {
    std::optional<Deadline> due;
    const auto sooner = [&](Deadline deadline) { due = due ? std::min(*due, deadline) : deadline; };
    for (const Answer& answer : answers) sooner(answer.deadline);
    for (const Death& death : deaths) sooner(death.deadline);
    {
      std::lock_guard lock(mutex);
      if (leaving) sooner(*leaving);
    }
    int64_t ms = -1;
    if (due) ms = std::max<int64_t>(0, std::chrono::duration_cast<milliseconds>(*due - Clock::now()).count() + 1);
    const int n = poll(fds.data(), fds.size(), static_cast<int>(ms));
    eventfd_t count;
    eventfd_read(wake_fd, &count);  // does not block
    return n;
  }
  void read(int rank) {
    char buffer[16384];
    while (links[rank].open()) {
      const ssize_t n = recv(links[rank].socket.fd(), buffer, sizeof(buffer), MSG_DONTWAIT);
      if (n < 0 && errno == EINTR) continue;
      if (n < 0 && errno == EAGAIN) return;
      if (n <= 0) return ended(rank, n < 0 ? errno : 0);
      links[rank].in.append(buffer, n);
      while (take(rank)) {
      }
    }
  }
  // Handles the next complete message. Returns false if there is none.
  bool take(int rank) {
    std::string& in = links[rank].in;
    std::string_view rest = in;
    Head head;
    if (!get(rest, head)) return false;
    if (head.bytes > kLongest) {
      ended(rank, EPROTO);
      return false;
    }
    if (rest.size() < head.bytes) return false;
    handle(rank, head.message, rest.substr(0, head.bytes));
    in.erase(0, sizeof(head) + head.bytes);
    return true;
  }
  void handle(int rank, Notice kind, std::string_view body) {
    uint32_t number;
    RankStatus theirs;
    if (kind == Notice::request && get(body, number)) {
      answers.push_back({rank, number, frames.ask(), Clock::now() + kFrame});
    } else if (kind == Notice::status && get(body, number) && get(body, theirs)) {
      theirs.frame[sizeof(theirs.frame) - 1] = 0;
      std::lock_guard lock(mutex);
      if (const auto round = rounds.find(number); round != rounds.end()) round->second[rank] = theirs;
      changed.notify_all();
    } else if (kind == Notice::fault) {
      if (const auto fault = decode_fault(body)) health.fail(*fault, true);
      changed.notify_all();
    } else if (kind == Notice::goodbye) {
      const auto why = decode_fault(body);
      health.left(rank, why ? *why
                            : Fault(Fault::Cause::left, {rank},
                                    roster.peers[rank].name() + " has left the group: it called shutdown, or "
                                                                "destroy_process_group."));
      std::lock_guard lock(mutex);
      links[rank].left = true;
      changed.notify_all();
    }
  }
  void ended(int rank, int error) {
    bool left;
    {
      std::lock_guard lock(mutex);
      Link& link = links[rank];
      link.socket = Socket();
      link.out.clear();
      left = link.left;
      changed.notify_all();
      if (leaving) return;
    }
    if (left || health.failed()) return;
    // A rank on its host knows its last operation from shared memory. Wait for it, so that all ranks report the same.
    const Call call = last ? last(rank) : Call();
    const bool witnesses = last && !call.sequence && roster.hosts[roster.peers[rank].host].size() > 1;
    deaths.push_back({rank, error, Clock::now() + (witnesses ? kWitness : milliseconds(0))});
  }
  void answer_due() {
    for (size_t i = 0; i < answers.size();) {
      const Answer& answer = answers[i];
      const auto frame = frames.get(answer.ticket);
      if (!frame && Clock::now() < answer.deadline) {
        ++i;
        continue;
      }
      RankStatus mine = status();
      std::strncpy(mine.frame, frame.value_or("").c_str(), sizeof(mine.frame) - 1);
      std::string body;
      put(body, answer.number);
      put(body, mine);
      {
        std::lock_guard lock(mutex);
        send(answer.to, framed(Notice::status, body));
      }
      answers.erase(answers.begin() + i);
    }
  }
  void report_due() {
    while (!deaths.empty() && (health.failed() || Clock::now() >= deaths.front().deadline)) {
      if (!health.failed()) report(deaths.front());
      deaths.erase(deaths.begin());
    }
  }
  void report(const Death& death) {
    std::string text = roster.peers[death.rank].name();
    if (death.error == 0 || death.error == ECONNRESET || death.error == EPIPE)
      text += " has died: its process ended without leaving the group.";
    else
      text += " is out of reach (" + std::generic_category().message(death.error) + "): its host is down or cut off.";
    const Call call = last ? last(death.rank) : Call();
    const RankStatus mine = recorder.status();
    text += call.sequence ? " Its last collective was " + told(call) + "." : " What it did last is not known here.";
    if (mine.last.sequence)
      text += " " + roster.me().name() + (mine.running ? " is in " : " was last in ") + told(mine.last) + ".";
    const Fault fault(Fault::Cause::died, {death.rank}, text + " Its own log, or dmesg on its host, may say why.");
    // Recorded as if from a peer, so that `fail` does not tell the peers: that is done here.
    if (health.fail(fault, true)) tell(fault);
  }
  // Call it with the mutex held.
  void send(int rank, const std::string& bytes) {
    if (!links[rank].open()) return;
    links[rank].out += bytes;
    flush(rank);
  }
  // Call it with the mutex held.
  void flush(int rank) {
    Link& link = links[rank];
    while (link.open() && !link.out.empty()) {
      const ssize_t n = ::send(link.socket.fd(), link.out.data(), link.out.size(), MSG_DONTWAIT | MSG_NOSIGNAL);
      if (n < 0 && errno == EINTR) continue;
      if (n < 0 && errno == EAGAIN) return;  // poll reports when it can continue
      if (n < 0) link.out.clear();           // reading reports the error
      if (n > 0) link.out.erase(0, n);
    }
  }
  void wake() { eventfd_write(wake_fd, 1); }
  RankStatus status() const {
    RankStatus status = recorder.status();
    status.rank = roster.rank;
    status.answered = RankStatus::here;
    return status;
  }
  std::vector<RankStatus> ask(milliseconds patience) {
    const Deadline deadline = Clock::now() + patience;
    const bool failed = health.failed();
    const uint64_t ticket = frames.ask();
    std::unique_lock lock(mutex);
    const uint32_t number = ++asked;
    rounds[number].resize(links.size());
    std::string body;
    put(body, number);
    for (size_t i = 0; i < links.size(); ++i) send(static_cast<int>(i), framed(Notice::request, body));
    wake();  // to send what the sockets did not take
    lock.unlock();
    RankStatus mine = status();
    const std::string frame = frames.wait(ticket, std::min(deadline, Clock::now() + kFrame));
    std::strncpy(mine.frame, frame.c_str(), sizeof(mine.frame) - 1);
    lock.lock();
    std::vector<RankStatus>& round = rounds[number];
    round[roster.rank] = mine;
    changed.wait_until(lock, deadline, [&] {
      if (!failed && health.failed()) return true;
      for (size_t i = 0; i < links.size(); ++i)
        if (links[i].open() && !links[i].left && !round[i].answered) return false;
      return true;
    });
    std::vector<RankStatus> statuses = std::move(round);
    rounds.erase(number);
    for (size_t i = 0; i < links.size(); ++i) {
      RankStatus& status = statuses[i];
      status.rank = static_cast<int32_t>(i);
      if (status.answered) continue;
      status.answered = links[i].left ? RankStatus::left : links[i].open() ? RankStatus::silent : RankStatus::died;
      if (last) status.last = last(status.rank);
    }
    return statuses;
  }
  void tell(const Fault& fault) {
    const std::string bytes = framed(Notice::fault, encode(fault));
    {
      std::lock_guard lock(mutex);
      for (size_t i = 0; i < links.size(); ++i) send(static_cast<int>(i), bytes);
      changed.notify_all();
    }
    wake();
  }
  void leave(const std::string& why) {
    if (!thread.joinable()) return;
    const std::string body =
        why.empty() ? ""
                    : encode(Fault(Fault::Cause::died, {roster.rank},
                                   roster.me().name() +
                                       " has ended, or left the group, because of an exception: " + why + "\n"));
    {
      std::lock_guard lock(mutex);
      for (size_t i = 0; i < links.size(); ++i) send(static_cast<int>(i), framed(Notice::goodbye, body));
      leaving = Clock::now() + kFlush;
    }
    wake();
    thread.join();
    frames.stop();
    std::lock_guard lock(mutex);
    for (Link& link : links) link.socket = Socket();
    changed.notify_all();
  }

  const Roster& roster;
  Health& health;
  const Recorder& recorder;
  const Last last;
  const int wake_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);

  std::mutex mutex;  // guards the members below, except those of the monitor's thread; never held while waiting
  std::condition_variable changed;
  std::vector<Link> links;
  std::map<uint32_t, std::vector<RankStatus>> rounds;  // questions without all answers
  uint32_t asked = 0;
  std::optional<Deadline> leaving;

  std::vector<Answer> answers;  // used by the monitor's thread only
  std::vector<Death> deaths;
  Frames frames;
  std::thread thread;
};

Monitor::State::State(const Roster& roster, std::vector<Socket> sockets, Health& health, const Recorder& recorder,
                      Where where, Last last)
    : roster(roster),
      health(health),
      recorder(recorder),
      last(std::move(last)),
      links(sockets.size()),
      frames(std::move(where), [this] { wake(); }) {
  if (wake_fd < 0) throw std::system_error(errno, std::generic_category(), "hfreduce: eventfd");
  for (size_t i = 0; i < sockets.size(); ++i) {
    links[i].socket = std::move(sockets[i]);
    if (links[i].open()) notice_silence(links[i].socket.fd());
  }
  thread = std::thread([this] { run(); });
}

Monitor::Monitor(const Roster& roster, std::vector<Socket> sockets, Health& health, const Recorder& recorder,
                 Where where, Last last)
    : state_(std::make_unique<State>(roster, std::move(sockets), health, recorder, std::move(where), std::move(last))) {
}

Monitor::~Monitor() {
  leave();
  close(state_->wake_fd);
}

std::vector<RankStatus> Monitor::ask(milliseconds patience) { return state_->ask(patience); }
void Monitor::tell(const Fault& fault) { state_->tell(fault); }
void Monitor::leave(const std::string& why) { state_->leave(why); }

}  // namespace hfreduce
