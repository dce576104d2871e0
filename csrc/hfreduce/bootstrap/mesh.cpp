// How a connection is established. The dialer connects and sends a Hello of 84 bytes. The listener checks the secret,
// replies with one byte and hands the socket on. The reply costs one round trip. It tells the dialer that a rank of its
// own communicator answers, not another process on a reused port, and not just a listen queue that nobody serves. After
// it, the bytes belong to the user of the connection. Failures before it are retried, since packets get lost.
#include "bootstrap/mesh.h"

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <map>
#include <system_error>
#include <thread>
#include <tuple>

namespace hfreduce {
namespace {

constexpr milliseconds kSlice(50);         // the longest wait between two checks of the health
constexpr milliseconds kGreeting(1000);    // timeout for a Hello
constexpr milliseconds kRefusals(1000);    // time for a listener to come back
constexpr milliseconds kStillThere(1000);  // interval between checks that a peer still listens
constexpr size_t kStrangers = 1024;        // connections without a Hello yet; if there are more, the oldest is dropped
constexpr int kSocket = SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC;
constexpr char kWelcome = 'w';

struct Hello {
  char magic[8] = {'h', 'f', 'r', 'e', 'd', 'u', 'c', 'e'};
  int32_t rank = -1;
  int32_t index = 0;
  Purpose purpose = Purpose::liveness;
  uint8_t unused[3] = {};
  char secret[64] = {};
};
static_assert(sizeof(Hello) == 84);

// In constant time.
bool equal(const char* a, const char* b, size_t bytes) {
  unsigned char difference = 0;
  for (size_t i = 0; i < bytes; ++i) difference = static_cast<unsigned char>(difference | (a[i] ^ b[i]));
  return difference == 0;
}

struct Address {
  sockaddr_storage bytes{};
  socklen_t length = 0;
  const sockaddr* get() const { return reinterpret_cast<const sockaddr*>(&bytes); }
};

// An abstract name begins with a zero byte. It is not a file and disappears with its last socket.
Address abstract(const std::string& name) {
  Address address;
  auto& local = reinterpret_cast<sockaddr_un&>(address.bytes);
  local.sun_family = AF_UNIX;
  std::memcpy(local.sun_path + 1, name.data(), name.size());
  address.length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
  return address;
}

Address internet(const std::string& host, int port) {
  Address address;
  address.length = to_sockaddr(host, port, address.bytes);
  return address;
}

[[noreturn]] void fail(const std::string& what) {
  throw std::system_error(errno, std::generic_category(), "hfreduce: " + what);
}

Socket listen_at(const Address& address, const std::string& said) {
  Socket socket(::socket(address.bytes.ss_family, kSocket, 0));
  if (socket.fd() < 0) fail("socket for " + said);
  if (bind(socket.fd(), address.get(), address.length) != 0) fail("bind to " + said);
  if (::listen(socket.fd(), SOMAXCONN) != 0) fail("listen on " + said);
  return socket;
}

// Small messages leave at once. Buffer sizes are left to the kernel's autotuning, which goes up to net.ipv4.tcp_wmem
// and tcp_rmem. Setting a size would limit it to net.core.wmem_max and disable autotuning.
void tune(const Socket& socket) {
  const int one = 1;
  setsockopt(socket.fd(), IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);  // fails on a Unix socket, which needs none
}

// Whether a descriptor has events within `patience`.
bool ready(int fd, short events, Clock::duration patience) {
  pollfd asked{fd, events, 0};
  const auto ms = std::chrono::ceil<milliseconds>(std::max(patience, Clock::duration::zero()));
  return poll(&asked, 1, static_cast<int>(ms.count())) > 0;
}

int pending_error(int fd) {
  int error = 0;
  socklen_t length = sizeof error;
  return getsockopt(fd, SOL_SOCKET, SO_ERROR, &error, &length) == 0 ? error : errno;
}

}  // namespace

const char* name(Purpose purpose) {
  const char* const names[] = {"liveness", "shared memory", "collectives", "messages"};
  return names[static_cast<int>(purpose)];
}

struct Mesh::State {
  using Key = std::tuple<int, Purpose, int>;  // rank, purpose, index

  // A connection whose Hello is not complete yet.
  struct Stranger {
    Socket socket;
    Deadline until;
    size_t got = 0;
    Hello hello{};
  };

  explicit State(const std::string& wanted) : interface(choose_interface(wanted)) {}

  void run();
  void accept(const Socket& listener, std::vector<Stranger>& strangers);
  bool greet(Stranger& stranger);  // returns whether it is finished: handed on or dropped
  Address address(const Peer& peer) const;
  std::string place(const Peer& peer) const;
  int attempt(const Peer& peer, Purpose purpose, int index, Deadline deadline, Socket& out);
  int answered(const Socket& socket, Deadline deadline);
  bool gone(const Peer& peer) const;
  [[noreturn]] void fail(Fault::Cause cause, const Peer& peer, const std::string& what, const std::string& why) const;

  const Interface interface;
  const pid_t owner = getpid();
  std::string unix_name;
  Socket tcp, local, bell;  // bell: an eventfd that stops the thread
  Roster roster;
  char secret[sizeof Hello::secret] = {};
  Health* health = nullptr;
  std::thread thread;
  std::mutex mutex;
  std::condition_variable changed;
  std::map<Key, std::deque<Socket>> waiting;  // dialed by peers, not taken yet
  bool closed = false;
};

Mesh::Mesh(const std::string& interface) : state_(std::make_unique<State>(interface)) {}

Mesh::~Mesh() {
  // A forked child does not have this thread, and locks may be held by threads that do not exist: leak everything.
  if (state_->owner == getpid())
    close();
  else
    static_cast<void>(state_.release());
}

std::string Mesh::interface() const { return state_->interface.name + " " + state_->interface.address; }

void Mesh::listen(Peer& mine) {
  State& s = *state_;
  mine.address = s.interface.address;
  mine.socket = "hfreduce-" + random_hex(8);
  s.tcp = listen_at(internet(mine.address, 0), interface());
  s.local = listen_at(abstract(mine.socket), "the Unix socket " + mine.socket);
  sockaddr_storage own{};
  socklen_t length = sizeof own;
  if (getsockname(s.tcp.fd(), reinterpret_cast<sockaddr*>(&own), &length) != 0) fail("getsockname");
  // The port is at the same offset for both address families.
  mine.port = ntohs(reinterpret_cast<const sockaddr_in&>(own).sin_port);
}

void Mesh::start(const Roster& roster, Health& health) {
  state_->roster = roster;
  state_->health = &health;
  roster.secret.copy(state_->secret, sizeof state_->secret);
  state_->bell = Socket(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (state_->bell.fd() < 0) fail("eventfd");
  // Signals are handled by Python's threads.
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  state_->thread = std::thread([this] { state_->run(); });
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  pthread_setname_np(state_->thread.native_handle(), "hfreduce-mesh");
}

void Mesh::close() {
  {
    std::lock_guard<std::mutex> lock(state_->mutex);
    state_->closed = true;
  }
  state_->changed.notify_all();
  if (state_->thread.joinable()) {
    eventfd_write(state_->bell.fd(), 1);
    state_->thread.join();
  }
  std::lock_guard<std::mutex> lock(state_->mutex);
  state_->waiting.clear();
  state_->tcp = Socket();
  state_->local = Socket();
}

void Mesh::State::run() {
  std::vector<Stranger> strangers;
  while (true) {
    std::vector<pollfd> asked = {{bell.fd(), POLLIN, 0}, {tcp.fd(), POLLIN, 0}, {local.fd(), POLLIN, 0}};
    for (const Stranger& each : strangers) asked.push_back({each.socket.fd(), POLLIN, 0});
    int timeout = -1;  // strangers are in order of age
    if (!strangers.empty()) {
      const auto left = std::chrono::ceil<milliseconds>(strangers[0].until - Clock::now()).count();
      timeout = static_cast<int>(std::max<int64_t>(left, 0));
    }
    if (poll(asked.data(), asked.size(), timeout) < 0) continue;
    if (asked[0].revents) return;
    std::vector<Stranger> remaining;
    for (size_t i = 0; i < strangers.size(); ++i) {
      const bool done = asked[3 + i].revents ? greet(strangers[i]) : Clock::now() >= strangers[i].until;
      if (!done) remaining.push_back(std::move(strangers[i]));
    }
    strangers = std::move(remaining);
    if (asked[1].revents) accept(tcp, strangers);
    if (asked[2].revents) accept(local, strangers);
  }
}

void Mesh::State::accept(const Socket& listener, std::vector<Stranger>& strangers) {
  Socket socket(accept4(listener.fd(), nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
  if (socket.fd() < 0) {
    // Avoids a busy loop while the process is out of descriptors.
    if (errno == EMFILE || errno == ENFILE || errno == ENOMEM || errno == ENOBUFS) std::this_thread::sleep_for(kSlice);
    return;
  }
  tune(socket);
  if (strangers.size() == kStrangers) strangers.erase(strangers.begin());
  strangers.push_back({std::move(socket), Clock::now() + kGreeting});
}

bool Mesh::State::greet(Stranger& stranger) {
  const Hello mine;
  char* hello = reinterpret_cast<char*>(&stranger.hello);
  const ssize_t got = recv(stranger.socket.fd(), hello + stranger.got, sizeof(Hello) - stranger.got, 0);
  if (got < 0) return errno != EAGAIN && errno != EINTR;
  if (got == 0) return true;
  stranger.got += static_cast<size_t>(got);
  if (stranger.got < sizeof(Hello)) return Clock::now() >= stranger.until;
  const Hello& said = stranger.hello;
  if (!equal(said.magic, mine.magic, sizeof mine.magic)) return true;
  if (!equal(said.secret, secret, sizeof secret)) return true;
  if (said.rank < 0 || said.rank >= roster.size()) return true;
  if (send(stranger.socket.fd(), &kWelcome, 1, MSG_NOSIGNAL) != 1) return true;
  {
    std::lock_guard<std::mutex> lock(mutex);
    waiting[{said.rank, said.purpose, said.index}].push_back(std::move(stranger.socket));
  }
  changed.notify_all();
  return true;
}

Address Mesh::State::address(const Peer& peer) const {
  return peer.host == roster.me().host ? abstract(peer.socket) : internet(peer.address, peer.port);
}

std::string Mesh::State::place(const Peer& peer) const {
  if (peer.host == roster.me().host) return "Unix socket " + peer.socket;
  return peer.address + " port " + std::to_string(peer.port) + ", from " + interface.name + " " + interface.address;
}

void Mesh::State::fail(Fault::Cause cause, const Peer& peer, const std::string& what, const std::string& why) const {
  throw Fault(cause, {peer.rank}, what + " " + peer.name() + " at " + place(peer) + ": " + why);
}

// Waits for the reply byte. Returns an errno, 0 for success.
int Mesh::State::answered(const Socket& socket, Deadline deadline) {
  while (true) {
    char answer = 0;
    const ssize_t got = recv(socket.fd(), &answer, 1, 0);
    if (got == 1) return answer == kWelcome ? 0 : EPROTO;
    if (got == 0) return ECONNRESET;
    if (errno != EAGAIN && errno != EINTR) return errno;
    health->check();
    const auto now = Clock::now();
    if (now >= deadline) return ETIMEDOUT;
    ready(socket.fd(), POLLIN, std::min<Clock::duration>(kSlice, deadline - now));
  }
}

// Connects once. Returns an errno, 0 for success.
int Mesh::State::attempt(const Peer& peer, Purpose purpose, int index, Deadline deadline, Socket& out) {
  const Address to = address(peer);
  out = Socket(::socket(to.bytes.ss_family, kSocket, 0));
  if (out.fd() < 0) return errno;
  tune(out);
  if (connect(out.fd(), to.get(), to.length) != 0) {
    if (errno != EINPROGRESS) return errno;
    while (!ready(out.fd(), POLLOUT, std::min<Clock::duration>(kSlice, deadline - Clock::now()))) {
      health->check();
      if (Clock::now() >= deadline) return ETIMEDOUT;
    }
    if (const int error = pending_error(out.fd())) return error;
  }
  Hello hello;
  hello.rank = roster.rank;
  hello.index = index;
  hello.purpose = purpose;
  std::memcpy(hello.secret, secret, sizeof secret);
  // It fits into the send buffer of a new connection.
  if (send(out.fd(), &hello, sizeof hello, MSG_NOSIGNAL) != sizeof hello) return errno ? errno : EIO;
  return answered(out, deadline);
}

Socket Mesh::dial(int rank, Purpose purpose, int index, Deadline deadline) {
  const Peer& peer = state_->roster.peers[rank];
  const std::string what = std::string("no connection for ") + name(purpose) + " to";
  Deadline refused_since = Deadline::max();
  for (Clock::duration pause = milliseconds(1);; pause = std::min<Clock::duration>(2 * pause, kSlice)) {
    state_->health->check();
    Socket socket;
    const int error = state_->attempt(peer, purpose, index, deadline, socket);
    if (error == 0) return socket;
    const Deadline now = Clock::now();
    refused_since = error == ECONNREFUSED ? std::min(refused_since, now) : Deadline::max();
    if (refused_since != Deadline::max() && now >= refused_since + kRefusals)
      state_->fail(Fault::Cause::broken, peer, what,
                   "Connection refused; its process has ended, or a firewall is between");
    if (now >= deadline)
      state_->fail(Fault::Cause::timeout, peer, what,
                   std::string(std::strerror(error)) + ", until the deadline; is this the right interface " +
                       "(HFREDUCE_INTERFACE), and does the process still run?");
    std::this_thread::sleep_for(std::min(pause, deadline - now));
  }
}

// Whether the peer has stopped listening. A Unix socket tells at once; TCP only if the host answers within kSlice.
bool Mesh::State::gone(const Peer& peer) const {
  const Address to = address(peer);
  Socket socket(::socket(to.bytes.ss_family, kSocket, 0));
  if (socket.fd() < 0) return false;
  if (connect(socket.fd(), to.get(), to.length) == 0) return false;
  if (errno == EINPROGRESS && ready(socket.fd(), POLLOUT, kSlice)) return pending_error(socket.fd()) == ECONNREFUSED;
  return errno == ECONNREFUSED;
}

Socket Mesh::take(int rank, Purpose purpose, int index, Deadline deadline) {
  State& s = *state_;
  const Peer& peer = s.roster.peers[rank];
  const std::string what = std::string("no connection for ") + name(purpose) + " from";
  const State::Key key(rank, purpose, index);
  const auto arrived = [&] { return s.closed || s.waiting.count(key) > 0; };
  Deadline ask = Clock::now() + kStillThere;
  std::unique_lock<std::mutex> lock(s.mutex);
  while (!s.changed.wait_until(lock, std::min<Deadline>(Clock::now() + kSlice, deadline), arrived)) {
    lock.unlock();
    s.health->check();
    const Deadline now = Clock::now();
    if (now >= deadline)
      s.fail(Fault::Cause::timeout, peer, what, "it has not dialed by the deadline; has its process stopped?");
    if (now >= ask && s.gone(peer))
      s.fail(Fault::Cause::broken, peer, what, "it listens no more; its process has ended");
    if (now >= ask) ask = now + kStillThere;
    lock.lock();
  }
  if (s.closed) s.fail(Fault::Cause::broken, peer, what, "this rank has closed its own connections");
  const auto found = s.waiting.find(key);
  Socket socket = std::move(found->second.front());
  found->second.pop_front();
  if (found->second.empty()) s.waiting.erase(found);
  return socket;
}

bool Mesh::dialed(int rank, Purpose purpose, int index) const {
  std::lock_guard<std::mutex> lock(state_->mutex);
  return state_->closed || state_->waiting.count(State::Key(rank, purpose, index)) > 0;
}

}  // namespace hfreduce
