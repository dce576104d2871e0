#include "communicator.h"

#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <system_error>

#include "collectives/host/host.h"
#include "collectives/reduce.h"
#include "communicator_state.h"

namespace hfreduce {

namespace {

// A descriptor that is closed on every path.
struct Descriptor {
  explicit Descriptor(int fd) : fd(fd) {}
  Descriptor(Descriptor&& other) noexcept : fd(other.fd) { other.fd = -1; }
  ~Descriptor() {
    if (fd >= 0) close(fd);
  }
  int fd;
};

}  // namespace

Communicator::State::State(Store& store, const Config& given)
    : config(given), mesh(given.interface), sent(given.size), received(given.size) {
  const Deadline deadline = Clock::now() + config.timeout;
  ShmGroup::check_slots(1, config.slot_bytes);
  for (int i = static_cast<int>(config.global_ranks.size()); i < config.size; ++i) config.global_ranks.push_back(i);
  roster = meet(store, deadline);
  mesh.start(roster, health);
  for (const std::vector<int>& host : roster.hosts)  // all hosts are checked, so that all ranks throw
    ShmGroup::check_slots(static_cast<int>(host.size()), config.slot_bytes);
  std::vector<std::string> names;
  for (int rank : roster.local()) names.push_back(roster.peers[rank].name());
  plan.emplace(Shape{static_cast<int>(names.size()), static_cast<int>(roster.hosts.size()), roster.cores},
               config.slot_bytes, agree(store, deadline));
  const size_t bytes = ShmGroup::segment_bytes(static_cast<int>(names.size()), config.slot_bytes);
  shm.emplace(share(bytes, shared++, deadline), roster.me().local_rank, roster.local(), names, config.slot_bytes,
              roster.cores);
  health.on_failure = [this](const Fault& fault, bool from_peer) {
    shm->wake();
    if (monitor && !from_peer) monitor->tell(fault);
    std::lock_guard lock(hooking);
    if (hook) hook();
  };
  monitor = std::make_unique<Monitor>(roster, liveness(deadline), health, recorder, config.where,
                                      [this](int rank) { return shm->last(rank); });
  if (!roster.one_host()) hierarchy.emplace(roster, mesh, *shm, health, *plan);
  messages.emplace(roster, mesh, *shm, health);
}

Roster Communicator::State::meet(Store& store, Deadline deadline) {
  Peer mine = Roster::self(config.rank, config.global_ranks[config.rank], config.host_id);
  mesh.listen(mine);
  return Roster::meet(store, mine, config.size, deadline, config.global_ranks, config.sorted);
}

// Rank 0's plan applies to all ranks: hosts may have been tuned separately, but must choose alike.
std::vector<Row> Communicator::State::agree(Store& store, Deadline deadline) {
  if (config.rank == 0 && config.size > 1)
    store.set("plan " + roster.secret,
              std::string(reinterpret_cast<const char*>(config.plan.data()), config.plan.size() * sizeof(Row)));
  if (config.rank == 0) return config.plan;
  const std::string told = store.wait("plan " + roster.secret, deadline);
  std::vector<Row> rows(told.size() / sizeof(Row));
  if (!rows.empty()) std::memcpy(rows.data(), told.data(), rows.size() * sizeof(Row));
  return rows;
}

// The memory of all local ranks: each creates its own segment and passes it to the others.
std::vector<Segment> Communicator::State::share(size_t bytes, int index, Deadline deadline) {
  const std::vector<int>& local = roster.local();
  const Descriptor mine(Segment::create(bytes));
  std::vector<Socket> sockets;
  for (int rank : local)
    sockets.push_back(rank == config.rank  ? Socket()
                      : rank < config.rank ? mesh.dial(rank, Purpose::segment, index, deadline)
                                           : mesh.take(rank, Purpose::segment, index, deadline));
  for (const Socket& socket : sockets)
    if (socket.fd() >= 0) send_descriptor(socket, mine.fd, deadline);
  std::vector<Segment> segments;
  for (size_t i = 0; i < local.size(); ++i) {
    if (local[i] == config.rank) {
      segments.emplace_back(mine.fd, bytes);
      continue;
    }
    const Descriptor theirs(receive_descriptor(sockets[i], deadline));
    struct stat stat;
    if (fstat(theirs.fd, &stat) || static_cast<size_t>(stat.st_size) != bytes)
      throw std::invalid_argument("hfreduce: " + roster.peers[local[i]].name() + " made " +
                                  std::to_string(stat.st_size) + " bytes of shared memory, this rank " +
                                  std::to_string(bytes) + ": slot_bytes must be the same on all ranks");
    segments.emplace_back(theirs.fd, bytes);
  }
  return segments;
}

std::vector<Socket> Communicator::State::liveness(Deadline deadline) {
  std::vector<Socket> sockets(config.size);
  for (int rank = 0; rank < config.size; ++rank)
    if (rank < config.rank)
      sockets[rank] = mesh.dial(rank, Purpose::liveness, 0, deadline);
    else if (rank > config.rank)
      sockets[rank] = mesh.take(rank, Purpose::liveness, 0, deadline);
  return sockets;
}

void Communicator::State::shutdown(const std::string& why) {
  std::lock_guard lock(ending);
  if (ended) return;
  ended = true;
  shut_down = !health.failed();
  try {
    if (messages && !health.failed()) messages->drain(Clock::now() + std::min(config.timeout, milliseconds(10000)));
  } catch (const std::exception&) {  // the peers have been told
  }
  if (monitor) monitor->leave(why);
  health.fail(Fault(Fault::Cause::aborted, {config.rank},
                    "group " + config.name + " was shut down by this rank; make a new one to go on"),
              true);
  messages.reset();
  hierarchy.reset();
  mesh.close();
}

// A forked child shares its parent's connections: what it sent on them would be taken for the parent's.
void Communicator::State::check_owner() const {
  if (forks() == owner) return;
  throw Fault(Fault::Cause::aborted, {config.rank},
              "process " + std::to_string(getpid()) + " is a fork of " + roster.me().name() + ", whose group " +
                  config.name + " it cannot use: start workers by multiprocessing's \"spawn\" or \"forkserver\", or " +
                  "make a group in the child.");
}

void Communicator::State::check_root(const char* what, int rank) const {
  if (rank < 0 || rank >= config.size)
    throw std::invalid_argument(std::string("hfreduce: ") + what + " must be a rank of the group, 0 to " +
                                std::to_string(config.size - 1) + ", got " + std::to_string(rank));
}

void Communicator::State::check_op(DType dtype, Reduction reduction) const {
  if (!supported(dtype, reduction.op))
    throw std::invalid_argument(std::string("hfreduce: ") + name(reduction.op) + " is not defined for " + name(dtype));
}

Communicator::Communicator(Store& store, const Config& config) : state_(std::make_unique<State>(store, config)) {}
Communicator::~Communicator() {
  if (forks() != state_->owner) static_cast<void>(state_.release());
}

int Communicator::rank() const { return state_->config.rank; }
int Communicator::size() const { return state_->config.size; }
bool Communicator::failed() const { return state_->health.failed(); }
const Plan& Communicator::plan() const { return *state_->plan; }
uint64_t Communicator::operations() const { return state_->operations.load(std::memory_order_relaxed); }
void Communicator::shutdown(const std::string& why) {
  if (forks() == state_->owner) state_->shutdown(why);
}

void Communicator::abort(const std::string& reason) {
  check_owner();
  state_->health.fail(
      Fault(Fault::Cause::aborted, {rank()},
            "group " + state_->config.name + " was aborted by " + state_->roster.me().name() + ": " + reason));
}

void Communicator::check_owner() const { state_->check_owner(); }

std::string Communicator::record() const {
  return state_->recorder.json(state_->config.name, rank(), state_->config.global_ranks);
}

std::string Communicator::describe() const {
  const Roster& roster = state_->roster;
  std::string text = "hfreduce group " + state_->config.name + ": " + roster.me().name() + ", " +
                     std::to_string(roster.size()) + " ranks on " + std::to_string(roster.hosts.size()) + " host" +
                     (roster.one_host() ? "" : "s") + " (";
  for (size_t i = 0; i < roster.hosts.size(); ++i)
    text += (i ? ", " : "") + roster.peers[roster.hosts[i][0]].hostname + ": " + std::to_string(roster.hosts[i].size());
  return text + "), shared memory" + (roster.one_host() ? "" : ", TCP over " + state_->mesh.interface()) +
         roster.neighbours();
}

void Communicator::OperationScope::failed() {
  open_ = false;
  state_.recorder.ended(record_, false);
  try {
    throw;
  } catch (const Fault& fault) {
    state_.health.fail(fault);
  } catch (const std::exception& error) {
    state_.health.fail(Fault(Fault::Cause::aborted, {state_.config.rank},
                             state_.roster.me().name() + " failed in " + told(watch.call) + ": " + error.what()));
  }
  state_.health.check();
  throw;
}

void Communicator::all_reduce(const void* in, void* out, int64_t count, DType dtype, Reduction reduction,
                              milliseconds timeout) {
  State& s = *state_;
  s.check_op(dtype, reduction);
  const int64_t bytes = count * size_of(dtype);
  OperationScope scope(s, call_of(Kind::all_reduce, count, dtype, reduction), bytes, bytes, timeout);
  try {
    if (s.hierarchy) return s.hierarchy->all_reduce(in, out, count, dtype, reduction, scope.choice, scope.watch);
    if (scope.choice.inside == Inside::one_shot)
      return host::all_reduce_one_shot(*s.shm, in, out, count, dtype, reduction, scope.choice.chunk, scope.watch);
    host::all_reduce_two_shot(*s.shm, in, out, count, dtype, reduction, scope.choice.chunk, scope.watch);
  } catch (const std::exception&) {
    scope.failed();
  }
}

void Communicator::reduce(const void* in, void* out, int64_t count, DType dtype, Reduction reduction, int root,
                          milliseconds timeout) {
  State& s = *state_;
  s.check_op(dtype, reduction);
  s.check_root("root", root);
  const int64_t bytes = count * size_of(dtype);
  OperationScope scope(s, call_of(Kind::reduce, count, dtype, reduction, root), bytes, rank() == root ? bytes : 0,
                       timeout);
  try {
    if (s.hierarchy) return s.hierarchy->reduce(in, out, count, dtype, reduction, root, scope.choice, scope.watch);
    host::all_reduce_two_shot(*s.shm, in, out, count, dtype, reduction, s.config.slot_bytes, scope.watch, root);
  } catch (const std::exception&) {
    scope.failed();
  }
}

void Communicator::reduce_scatter(const void* in, void* out, int64_t count, DType dtype, Reduction reduction,
                                  milliseconds timeout) {
  State& s = *state_;
  s.check_op(dtype, reduction);
  const int64_t bytes = count * size_of(dtype);
  OperationScope scope(s, call_of(Kind::reduce_scatter, count, dtype, reduction), bytes * size(), bytes, timeout);
  try {
    if (s.hierarchy) return s.hierarchy->reduce_scatter(in, out, count, dtype, reduction, scope.choice, scope.watch);
    host::reduce_scatter(*s.shm, in, count, out, count, dtype, reduction, size(), scope.watch);
  } catch (const std::exception&) {
    scope.failed();
  }
}

void Communicator::all_gather(const void* in, void* out, int64_t count, DType dtype, milliseconds timeout) {
  State& s = *state_;
  const int64_t bytes = count * size_of(dtype);
  OperationScope scope(s, call_of(Kind::all_gather, count, dtype), bytes, bytes * size(), timeout);
  try {
    if (s.hierarchy) return s.hierarchy->all_gather(in, out, bytes, scope.choice, scope.watch);
    host::all_gather(*s.shm, in, out, bytes, bytes, scope.watch);
  } catch (const std::exception&) {
    scope.failed();
  }
}

void Communicator::broadcast(void* data, int64_t count, DType dtype, int root, milliseconds timeout) {
  State& s = *state_;
  s.check_root("root", root);
  const int64_t bytes = count * size_of(dtype);
  OperationScope scope(s, call_of(Kind::broadcast, count, dtype, {}, root), bytes, bytes, timeout);
  try {
    if (s.hierarchy) return s.hierarchy->broadcast(data, bytes, root, scope.watch);
    host::broadcast(*s.shm, data, bytes, root, scope.watch);
  } catch (const std::exception&) {
    scope.failed();
  }
}

void Communicator::gather(const void* in, void* out, int64_t count, DType dtype, int root, milliseconds timeout) {
  State& s = *state_;
  s.check_root("root", root);
  const int64_t bytes = count * size_of(dtype);
  OperationScope scope(s, call_of(Kind::gather, count, dtype, {}, root), bytes, rank() == root ? bytes * size() : 0,
                       timeout);
  try {
    if (s.hierarchy) return s.hierarchy->gather(in, out, bytes, root, scope.watch);
    host::gather(*s.shm, in, out, bytes, root, scope.watch);
  } catch (const std::exception&) {
    scope.failed();
  }
}

void Communicator::scatter(const void* in, void* out, int64_t count, DType dtype, int root, milliseconds timeout) {
  State& s = *state_;
  s.check_root("root", root);
  const int64_t bytes = count * size_of(dtype);
  OperationScope scope(s, call_of(Kind::scatter, count, dtype, {}, root), rank() == root ? bytes * size() : 0, bytes,
                       timeout);
  try {
    if (s.hierarchy) return s.hierarchy->scatter(in, out, bytes, root, scope.watch);
    host::scatter(*s.shm, in, out, bytes, root, scope.watch);
  } catch (const std::exception&) {
    scope.failed();
  }
}

void Communicator::all_to_all(const void* in, const std::vector<int64_t>& in_offsets,
                              const std::vector<int64_t>& in_counts, void* out, const std::vector<int64_t>& out_offsets,
                              const std::vector<int64_t>& out_counts, DType dtype, milliseconds timeout) {
  State& s = *state_;
  std::vector<int64_t> bytes[4];
  int64_t all[2] = {};
  int i = 0;
  for (const auto* numbers : {&in_offsets, &in_counts, &out_offsets, &out_counts}) {
    if (static_cast<int>(numbers->size()) != size())
      throw std::invalid_argument("hfreduce: all_to_all takes an offset and a count for each of the " +
                                  std::to_string(size()) + " ranks, got " + std::to_string(numbers->size()));
    for (int64_t number : *numbers) bytes[i].push_back(number * size_of(dtype));
    if (i % 2)
      for (int64_t number : bytes[i]) all[i / 2] += number;
    ++i;
  }
  const int64_t *from = bytes[0].data(), *sizes = bytes[1].data(), *to = bytes[2].data(), *wanted = bytes[3].data();
  OperationScope scope(s, call_of(Kind::all_to_all, 0, dtype), all[0], all[1], timeout);
  try {
    if (s.hierarchy) return s.hierarchy->all_to_all(in, from, sizes, out, to, wanted, scope.watch);
    host::all_to_all(*s.shm, in, from, sizes, out, to, wanted, scope.watch);
  } catch (const std::exception&) {
    scope.failed();
  }
}

void Communicator::barrier(milliseconds timeout) {
  State& s = *state_;
  OperationScope scope(s, call_of(Kind::barrier, 0, DType::u8), 0, 0, timeout);
  try {
    if (s.hierarchy) return s.hierarchy->barrier(scope.watch);
    s.shm->arrive(scope.watch);
    s.shm->next();
  } catch (const std::exception&) {
    scope.failed();
  }
}

void Communicator::send(const void* data, int64_t count, DType dtype, int to, int tag, milliseconds timeout) {
  State& s = *state_;
  s.check_root("the receiver", to);
  const int64_t bytes = count * size_of(dtype);
  OperationScope scope(s, call_of(Kind::send, count, dtype, {}, to), s.sent[to], bytes, 0, timeout);
  try {
    s.messages->send(data, bytes, to, tag, 0, scope.watch);
  } catch (const std::exception&) {
    scope.failed();
  }
}

void Communicator::announce(uint64_t ticket, int64_t count, DType dtype, int to, int tag,
                            const std::function<void(const Enqueued&, const Watch&)>& work, milliseconds timeout) {
  State& s = *state_;
  s.check_root("the receiver", to);
  const int64_t bytes = count * size_of(dtype);
  OperationScope scope(s, call_of(Kind::send, count, dtype, {}, to), s.sent[to], bytes, 0, timeout);
  try {
    s.messages->send(nullptr, bytes, to, tag, ticket, scope.watch);
    work(scope.leave(), scope.watch);
  } catch (const std::exception&) {
    scope.failed();
  }
}

Received Communicator::receive(const std::function<void*()>& place,
                               const std::function<void(const Received&, const Watch&)>& take, int64_t count,
                               DType dtype, int from, int tag, milliseconds timeout) {
  State& s = *state_;
  const bool any = from < 0;
  if (!any) s.check_root("the sender", from);
  const int64_t bytes = count * size_of(dtype);
  Received got;
  got.from = from;
  OperationScope scope(s, call_of(Kind::recv, count, dtype, {}, from), any ? s.any : s.received[from], 0, bytes,
                       timeout);
  try {
    got.ticket = any ? s.messages->recv_any(place, bytes, got.from, tag, scope.watch)
                     : s.messages->recv(place, bytes, from, tag, scope.watch);
    if (!got.ticket) return got;
    if (!take)
      throw Fault(Fault::Cause::mismatch, {got.from, s.config.rank},
                  s.roster.me().name() + " receives into the host's memory what " + s.roster.peers[got.from].name() +
                      " sends from its GPU's. Both sides must give tensors of the same kind of device.");
    got.enqueued = scope.leave();
    got.enqueued.call.root = got.from;
    take(got, scope.watch);
  } catch (const std::exception&) {
    scope.failed();
  }
  return got;
}

void Communicator::recv(void* data, int64_t count, DType dtype, int from, int tag, milliseconds timeout) {
  state_->check_root("the sender", from);
  receive([data] { return data; }, nullptr, count, dtype, from, tag, timeout);
}

int Communicator::recv_any(void* data, int64_t count, DType dtype, int tag, milliseconds timeout) {
  return receive([data] { return data; }, nullptr, count, dtype, -1, tag, timeout).from;
}

}  // namespace hfreduce
