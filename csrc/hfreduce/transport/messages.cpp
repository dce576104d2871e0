// Point-to-point messages, matched by tag as in MPI.
//
// A sender writes frames into the pipe to the receiver: shared memory inside a host, otherwise one TCP connection, made
// at the first message of the pair. An *eager* message sends its header and payload at once. What a receiver reads
// while it waits for another tag is *unexpected*: it is kept, in order of arrival, until it is asked for. A sender
// counts the bytes that, as far as it knows, were not taken yet. Beyond kEager of them, a message uses the *rendezvous*
// protocol: a header says that it is ready; a header back from the receiver clears it (and says how much was taken);
// then the payload goes in pieces, directly to its destination. So a rank never holds more than kEager of another
// rank's messages, and a message that is not received yet does not block those of other tags.
//
// An eager payload costs its bytes on the wire, or two copies inside a host, and one more copy if it is unexpected. A
// rendezvous costs a round trip and never needs that copy.
//
// Several threads may wait for one peer: receivers of different tags, and senders that are not cleared yet. One of them
// reads for all and wakes the others; when it has what it wants, another takes over. One thread at a time writes.
// Replies of readers ("clear") go first, between two frames. No thread sleeps or waits for room with the lock held.
#include "transport/messages.h"

#include <algorithm>
#include <condition_variable>
#include <cstring>
#include <list>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <vector>

namespace hfreduce {

namespace {

enum class Sort : uint32_t { eager, ready, clear, data };

struct Header {
  int64_t bytes = 0;  // of the message; data: of this piece; clear: taken so far, see Pair::taken
  int32_t tag = 0;
  Sort sort = Sort::eager;
  uint64_t ticket = 0;  // eager: the sender's; otherwise the number of the message among the sender's rendezvous
  Call call;            // of the sender

  int64_t following() const { return sort == Sort::data ? bytes : sort == Sort::eager && !ticket ? bytes : 0; }
  int64_t cost() const { return following() + static_cast<int64_t>(sizeof(Header)); }  // for the side that keeps it
};
static_assert(sizeof(Header) == sizeof(Call) + 24);

constexpr int64_t kEager = 1 << 20;     // bytes of one sender's messages that a receiver may have to keep
constexpr int64_t kTogether = 8 << 10;  // up to this size, header and payload are written in one call
constexpr int64_t kPiece = 512 << 10;   // of a rendezvous message: other frames may go between two pieces
constexpr milliseconds kLook{20};       // the longest sleep: a fault does not wake sleepers
constexpr milliseconds kShared{1};      // the longest sleep where work may arrive without a wake-up

struct UnexpectedMessage {
  explicit UnexpectedMessage(const Header& header) : header(header), memory(new char[header.following()]) {}
  Header header;
  std::unique_ptr<char[]> memory;
  bool complete = false;
};

// A receive that a thread waits for.
struct PostedReceive {
  const Messages::Place& place;
  int64_t bytes;
  int tag;
  const Watch& watch;
  bool begun = false, done = false;
  uint64_t ticket = 0;
  char* memory = nullptr;  // rendezvous: the destination of the payload
  int64_t got = 0;
};

// Messages between this rank and another. The mutex guards everything but `out`, which belongs to the writing thread.
struct Pair {
  std::mutex mutex;
  std::condition_variable changed;

  std::unique_ptr<Incoming> in;    // null: not connected yet, or the peer is this rank itself
  bool reading = false;            // whether a thread reads, or sleeps until there is something to read
  bool given_up = false;           // whether a receiver has left in the middle of its message, after a fault
  Header header;                   // of the frame that is being read
  size_t header_bytes = 0;         // bytes of it read so far
  bool begun = false;              // whether the destination of its payload is known
  PostedReceive* owner = nullptr;  // the receive with that destination; null: the last unexpected message
  char* into = nullptr;
  int64_t bytes = 0;  // of the payload, read so far
  std::list<UnexpectedMessage> unexpected;
  std::map<uint64_t, PostedReceive*> landing;  // cleared receives, by the sender's number
  int64_t taken = 0;                           // total cost of the eager messages that receivers have taken

  std::unique_ptr<Outgoing> out;
  bool writing = false;
  std::string first;                     // to be written before anything else
  uint64_t numbered = 0;                 // rendezvous messages so far
  std::set<uint64_t> cleared;            // numbers of those that are cleared, but not being sent yet
  int64_t unasked = 0, known_taken = 0;  // total cost of the eager messages sent; of those, what the peer has taken
};

}  // namespace

struct Messages::State {
  using Done = std::function<bool()>;  // called with the mutex held

  State(const Roster& roster, Mesh& mesh, ShmGroup& shm) : roster(roster), mesh(mesh), shm(shm), pairs(roster.size()) {}

  bool local(int rank) const { return roster.peers[rank].host == roster.me().host; }
  void connect_out(int rank, Deadline deadline);  // only by the writing thread
  bool connect_in(int rank);                      // whether messages from this rank can be read

  // Called with the pair's mutex held.
  bool match(int from, PostedReceive& posted);  // against the kept messages; whether one was used
  void clear(int from, PostedReceive& posted, const Header& ready);
  bool flush(int to, Deadline deadline);  // writes `first`, unless a thread is writing
  void begin(int from, PostedReceive* posted);
  void finish(Pair& pair);
  // Does all it can without waiting. Returns whether that was anything.
  bool advance(int from, PostedReceive* posted, const Watch& watch, const Done& done);
  bool step(int from, PostedReceive* posted, const Done& done);

  void wait(int from, PostedReceive* posted, const Watch& watch, const Done& done);
  void rest(int from, Backoff& backoff);
  void begin_writing(int to, const Watch& watch);
  bool write_first(int to, bool then_end, const Watch& watch);  // whether there was any; if not, may end the writing
  void write(int to, const Header& header, const void* data, const Watch& watch);
  void push(int to, const void* data, size_t bytes, const Watch& watch);

  const Roster& roster;
  Mesh& mesh;
  ShmGroup& shm;
  std::vector<Pair> pairs;  // by peer rank
};

namespace {

[[noreturn]] void refuse(const Header& theirs, const PostedReceive& posted, const Peer& sender, const Peer& me) {
  const auto size = [](const Call& call, int64_t bytes) {
    return std::to_string(call.count) + " " + name(call.dtype) + " (" + std::to_string(bytes) + " bytes)";
  };
  throw Fault(Fault::Cause::mismatch, {sender.rank, me.rank},
              "recv with tag " + std::to_string(posted.tag) + ": " + me.name() + " expects " +
                  size(posted.watch.call, posted.bytes) + ", " + sender.name() + " sent " +
                  size(theirs.call, theirs.bytes) + ". Both sides must give the same dtype and number of elements.");
}

}  // namespace

Messages::Messages(const Roster& roster, Mesh& mesh, ShmGroup& shm, Health&)
    : state_(std::make_unique<State>(roster, mesh, shm)) {}
Messages::~Messages() = default;

bool Messages::State::connect_in(int rank) {
  std::unique_ptr<Incoming>& stream = pairs[rank].in;
  const Peer& peer = roster.peers[rank];
  if (stream || rank == roster.rank) return stream != nullptr;
  if (local(rank)) {
    stream = std::make_unique<PipeIncoming>(shm.pipe(peer.local_rank, shm.rank()), ShmGroup::kPipe);
  } else if (mesh.dialed(rank, Purpose::message, 0)) {
    std::vector<Socket> sockets;
    sockets.push_back(mesh.take(rank, Purpose::message, 0, Clock::now()));
    stream = std::make_unique<TcpIncoming>(std::move(sockets), peer);
  }
  return stream != nullptr;
}

bool Messages::State::match(int from, PostedReceive& posted) {
  Pair& pair = pairs[from];
  for (auto kept = pair.unexpected.begin(); !posted.begun && kept != pair.unexpected.end(); ++kept) {
    const Header& header = kept->header;
    if (header.tag != posted.tag) continue;
    if (!kept->complete) return false;
    if (header.bytes != posted.bytes || header.call.dtype != posted.watch.call.dtype)
      refuse(header, posted, roster.peers[from], roster.me());
    if (header.sort == Sort::ready) {
      clear(from, posted, header);
    } else {
      posted.ticket = header.ticket;
      if (header.following()) std::memcpy(posted.place(), kept->memory.get(), posted.bytes);
      pair.taken += header.cost();
      posted.begun = posted.done = true;
    }
    pair.unexpected.erase(kept);
    return true;
  }
  return false;
}

void Messages::State::clear(int from, PostedReceive& posted, const Header& ready) {
  Pair& pair = pairs[from];
  posted.memory = static_cast<char*>(posted.place());
  posted.begun = true;
  pair.landing[ready.ticket] = &posted;
  Header header;
  header.sort = Sort::clear;
  header.ticket = ready.ticket;
  header.bytes = pair.taken;
  pair.first.append(reinterpret_cast<const char*>(&header), sizeof(header));
}

void Messages::State::begin(int from, PostedReceive* posted) {
  Pair& pair = pairs[from];
  const Header& header = pair.header;
  const bool wanted = posted && !posted->begun && header.tag == posted->tag;
  pair.owner = nullptr;
  switch (header.sort) {
    case Sort::clear:
      pair.known_taken = std::max(pair.known_taken, header.bytes);
      pair.cleared.insert(header.ticket);
      pair.changed.notify_all();
      return;
    case Sort::data:
      pair.owner = pair.landing.at(header.ticket);
      pair.into = pair.owner->memory + pair.owner->got;
      return;
    case Sort::ready:
    case Sort::eager:
      break;
  }
  if (wanted && (header.bytes != posted->bytes || header.call.dtype != posted->watch.call.dtype))
    refuse(header, *posted, roster.peers[from], roster.me());
  if (!wanted) {
    pair.into = pair.unexpected.emplace_back(header).memory.get();
  } else if (header.sort == Sort::ready) {
    clear(from, *posted, header);
  } else {
    posted->ticket = header.ticket;
    pair.into = header.following() ? static_cast<char*>(posted->place()) : nullptr;
    posted->begun = true;
    pair.owner = posted;
  }
}

void Messages::State::finish(Pair& pair) {
  const Header& header = pair.header;
  const bool kept = !pair.unexpected.empty() && !pair.unexpected.back().complete;
  if (header.sort == Sort::data) {
    pair.owner->got += header.bytes;
    pair.owner->done = pair.owner->got == pair.owner->bytes;
    if (pair.owner->done) pair.landing.erase(header.ticket);
  } else if (pair.owner) {
    pair.owner->done = true;
    pair.taken += header.cost();
  } else if (kept) {
    pair.unexpected.back().complete = true;
  }
  pair.changed.notify_all();
  pair.begun = false;
  pair.owner = nullptr;
  pair.header_bytes = 0;
  pair.bytes = 0;
}

// Reads as far as possible. Returns whether anything was read.
bool Messages::State::step(int from, PostedReceive* posted, const Done& done) {
  Pair& pair = pairs[from];
  bool moved = false;
  while (!done()) {
    if (!pair.begun) {
      if (posted && match(from, *posted)) {  // kept messages come before those that follow
        moved = true;
        continue;
      }
      char* const header = reinterpret_cast<char*>(&pair.header);
      const size_t now = pair.in->read(header + pair.header_bytes, sizeof(Header) - pair.header_bytes);
      pair.header_bytes += now;
      moved |= now > 0;
      if (now == 0) return moved;
      if (pair.header_bytes < sizeof(Header)) continue;
      begin(from, posted);
      pair.begun = true;
    }
    const int64_t left = pair.header.following() - pair.bytes;
    const size_t now = left ? pair.in->read(pair.into + pair.bytes, left) : 0;
    pair.bytes += static_cast<int64_t>(now);
    moved |= now > 0;
    if (static_cast<int64_t>(now) == left)
      finish(pair);
    else if (now == 0)
      return moved;
  }
  return true;
}

bool Messages::State::advance(int from, PostedReceive* posted, const Watch& watch, const Done& done) {
  Pair& pair = pairs[from];
  if (pair.given_up) return false;
  bool moved = posted && match(from, *posted);
  if (!pair.reading && !done() && connect_in(from)) moved |= step(from, posted, done);
  return flush(from, watch.deadline) || moved;
}

// Waits until `done`, which is called with the lock held. `posted`: what this thread receives.
void Messages::State::wait(int from, PostedReceive* posted, const Watch& watch, const Done& done) {
  Pair& pair = pairs[from];
  Backoff backoff(watch);
  std::unique_lock lock(pair.mutex);
  while (!done()) {
    if (advance(from, posted, watch, done)) {
      backoff.moved();
    } else if (posted && !posted->begun && watch.health.dropping) {
      throw Dropped(roster.rank, roster.me().name());
    } else if (pair.reading) {
      pair.changed.wait_for(lock, kLook);
      lock.unlock();
      watch.check({from});
      lock.lock();
    } else {
      pair.reading = true;
      lock.unlock();
      try {
        rest(from, backoff);
      } catch (...) {
        lock.lock();
        pair.reading = false;
        pair.changed.notify_all();
        throw;
      }
      lock.lock();
      pair.reading = false;
    }
  }
  pair.changed.notify_all();  // another thread takes over reading
}

void Messages::State::rest(int from, Backoff& backoff) {
  Pair& pair = pairs[from];
  milliseconds longest = kLook;
  backoff.rest(
      [&](Backoff::Wanted& wanted) {
        std::lock_guard lock(pair.mutex);
        if (!pair.first.empty()) longest = kShared;  // the pipe had no room for it
        if (pair.in)
          wanted.add(*pair.in, from);
        else
          wanted.add(from);
      },
      longest);
}

namespace {

// The lifetime of a posted receive. If that ends in the middle of a message, all pairs are given up.
class PostedScope {
 public:
  PostedScope(std::vector<Pair>& pairs, const PostedReceive& posted) : pairs_(pairs), posted_(posted) {}
  ~PostedScope() {
    if (posted_.done) return;
    for (Pair& pair : pairs_) {
      std::lock_guard lock(pair.mutex);
      pair.given_up = pair.given_up || posted_.begun;
    }
  }

 private:
  std::vector<Pair>& pairs_;
  const PostedReceive& posted_;
};

}  // namespace

uint64_t Messages::recv(const Place& place, int64_t bytes, int from, int tag, const Watch& watch) {
  PostedReceive posted{place, bytes, tag, watch};
  const PostedScope scope(state_->pairs, posted);
  state_->wait(from, &posted, watch, [&] { return posted.done; });
  return posted.ticket;
}

uint64_t Messages::recv_any(const Place& place, int64_t bytes, int& source, int tag, const Watch& watch) {
  PostedReceive posted{place, bytes, tag, watch};
  const PostedScope scope(state_->pairs, posted);
  const auto begun = [&] { return posted.begun; };
  Backoff backoff(watch);
  const int size = state_->roster.size();
  while (true) {
    bool moved = false;
    for (int from = 0; from < size; ++from) {
      {
        std::lock_guard lock(state_->pairs[from].mutex);
        moved |= state_->advance(from, &posted, watch, begun);
      }
      if (!posted.begun) continue;
      state_->wait(from, &posted, watch, [&] { return posted.done; });
      return source = from, posted.ticket;
    }
    if (moved) {
      backoff.moved();
      continue;
    }
    if (watch.health.dropping) throw Dropped(state_->roster.rank, state_->roster.me().name());
    // Short sleeps: another sender may dial, or another thread may keep a message, without waking this thread.
    backoff.rest(
        [&](Backoff::Wanted& wanted) {
          for (int from = 0; from < size; ++from)
            if (from != state_->roster.rank) wanted.add(from);
        },
        kShared);
  }
}

// The writing side.

void Messages::State::connect_out(int rank, Deadline deadline) {
  std::unique_ptr<Outgoing>& stream = pairs[rank].out;
  const Peer& peer = roster.peers[rank];
  if (stream) return;
  if (local(rank)) {
    stream = std::make_unique<PipeOutgoing>(shm.pipe(shm.rank(), peer.local_rank), ShmGroup::kPipe);
    return;
  }
  std::vector<Socket> sockets;
  sockets.push_back(mesh.dial(rank, Purpose::message, 0, deadline));
  stream = std::make_unique<TcpOutgoing>(std::move(sockets), peer);
}

bool Messages::State::flush(int to, Deadline deadline) {
  Pair& pair = pairs[to];
  if (pair.first.empty() || pair.writing) return false;
  connect_out(to, deadline);
  const size_t now = pair.out->write(pair.first.data(), pair.first.size());
  pair.first.erase(0, now);
  return now > 0;
}

void Messages::State::push(int to, const void* data, size_t bytes, const Watch& watch) {
  Outgoing& stream = *pairs[to].out;
  Backoff backoff(watch);
  for (size_t done = 0; done < bytes;) {
    const size_t now = stream.write(static_cast<const char*>(data) + done, bytes - done);
    done += now;
    if (now)
      backoff.moved();
    else
      backoff.rest([&](Backoff::Wanted& wanted) { wanted.add(stream, to); });
  }
}

void Messages::State::begin_writing(int to, const Watch& watch) {
  Pair& pair = pairs[to];
  std::unique_lock lock(pair.mutex);
  while (pair.writing) {
    pair.changed.wait_for(lock, kLook);
    lock.unlock();
    watch.check({to});
    lock.lock();
  }
  pair.writing = true;  // stays set if something throws: half a frame may have been written
}

bool Messages::State::write_first(int to, bool then_end, const Watch& watch) {
  Pair& pair = pairs[to];
  std::string bytes;
  {
    std::lock_guard lock(pair.mutex);
    bytes.swap(pair.first);
    if (bytes.empty() && then_end) {
      pair.writing = false;
      pair.changed.notify_all();
    }
  }
  push(to, bytes.data(), bytes.size(), watch);
  return !bytes.empty();
}

// Writes a frame, after `first`, when it is this thread's turn.
void Messages::State::write(int to, const Header& header, const void* data, const Watch& watch) {
  begin_writing(to, watch);
  connect_out(to, watch.deadline);
  write_first(to, false, watch);
  const int64_t bytes = header.following();
  if (bytes > kTogether) {
    push(to, &header, sizeof(header), watch);
    push(to, data, bytes, watch);
  } else {
    char together[sizeof(header) + kTogether];
    std::memcpy(together, &header, sizeof(header));
    if (bytes) std::memcpy(together + sizeof(header), data, bytes);
    push(to, together, sizeof(header) + bytes, watch);
  }
  while (write_first(to, true, watch)) {
  }
}

void Messages::send(const void* data, int64_t size, int to, int tag, uint64_t ticket, const Watch& watch) {
  Header header{.bytes = size, .tag = tag, .ticket = ticket, .call = watch.call};
  Pair& pair = state_->pairs[to];
  {
    std::lock_guard lock(pair.mutex);
    if (to == state_->roster.rank) {
      UnexpectedMessage& kept = pair.unexpected.emplace_back(header);
      if (header.following()) std::memcpy(kept.memory.get(), data, size);
      kept.complete = true;
      pair.changed.notify_all();
      return;
    }
    if (ticket || pair.unasked + header.cost() - pair.known_taken <= kEager) {
      pair.unasked += header.cost();
    } else {
      header.sort = Sort::ready;
      header.ticket = ++pair.numbered;
    }
  }
  state_->write(to, header, data, watch);
  if (header.sort == Sort::eager) return;
  state_->wait(to, nullptr, watch, [&] { return pair.cleared.count(header.ticket) > 0; });
  {
    std::lock_guard lock(pair.mutex);
    pair.cleared.erase(header.ticket);
  }
  header.sort = Sort::data;
  for (int64_t done = 0; done < size; done += header.bytes) {
    header.bytes = std::min(kPiece, size - done);
    state_->write(to, header, static_cast<const char*>(data) + done, watch);
  }
}

void Messages::drain(Deadline deadline) {
  for (Pair& pair : state_->pairs)
    if (pair.out) pair.out->drain(deadline);
}

}  // namespace hfreduce
