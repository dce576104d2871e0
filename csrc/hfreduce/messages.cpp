// Point-to-point messages.
//
// A sender writes a header and the bytes into the pipe to the receiver: shared memory inside a host, one TCP connection
// otherwise, made at the first message of the pair. A receiver reads the header; when the tag is the one it waits for,
// the bytes go straight into its memory, otherwise into memory of their own, kept in order of arrival for whoever asks
// for them. So N bytes cost N on the wire, or two copies of N inside a host, and one more when they are kept.
//
// Several threads may read one inbox, recv and recv_any: whoever holds its lock moves what has come, for itself or to
// be kept, and leaves a message alone that another thread has begun. Nobody sleeps with a lock.
#include "messages.h"

#include <atomic>
#include <cstring>
#include <list>
#include <mutex>
#include <vector>

#include "mismatch.h"
#include "pipe.h"
#include "tcp.h"

namespace hfreduce {

namespace {

struct Header {
  int64_t bytes = 0;
  int32_t tag = 0;
  int32_t unused = 0;
  uint64_t ticket = 0;
  Call call;  // of the sender

  int64_t following() const { return ticket ? 0 : bytes; }
};
static_assert(sizeof(Header) == sizeof(Call) + 24);

constexpr int64_t kTogether = 8 << 10;          // up to this size, header and bytes are written at once
constexpr milliseconds kAlone{20}, kShared{1};  // the longest sleep on an inbox: what another thread did wakes
                                                // nobody

struct Kept {
  explicit Kept(const Header& header) : header(header), memory(new char[header.following()]) {}
  Header header;
  std::unique_ptr<char[]> memory;
  bool complete = false;
};

// What a receiver waits for.
struct Wish {
  const Messages::Place& place;
  int64_t bytes;
  int tag;
  const Watch& watch;
  bool begun = false, done = false;
  uint64_t ticket = 0;
};

[[noreturn]] void refuse(const Header& theirs, const Wish& wish, const Peer& sender, const Peer& me) {
  const auto size = [](const Call& call, int64_t bytes) {
    return std::to_string(call.count) + " " + name(call.dtype) + " (" + std::to_string(bytes) + " bytes)";
  };
  throw Fault(Fault::Cause::mismatch, {sender.rank, me.rank},
              "recv with tag " + std::to_string(wish.tag) + ": " + me.name() + " expects " +
                  size(wish.watch.call, wish.bytes) + ", " + sender.name() + " sent " +
                  size(theirs.call, theirs.bytes) + ". Both sides must give the same dtype and number of elements.");
}

// Messages from one rank.
class Inbox {
 public:
  std::mutex mutex;
  std::unique_ptr<Incoming> stream;  // none yet, or from this rank itself
  std::atomic<int> readers{0};

  // Moves what can be moved without waiting, and says whether that was anything. The mutex is held.
  bool advance(Wish& wish, const Peer& sender, const Peer& me);
  void keep(const Header& header, const void* data);  // a message to oneself

 private:
  bool take_kept(Wish& wish, const Peer& sender, const Peer& me);
  bool read_header();
  void begin(Wish& wish, const Peer& sender, const Peer& me);
  bool read_bytes();
  void finish(Wish& wish);

  Header header_;                // of the message that is coming in
  size_t header_bytes_ = 0;      // of it, that have come
  bool begun_ = false;           // whether it is known where its bytes go
  const Wish* owner_ = nullptr;  // whose memory that is; none: the last of the kept
  char* into_ = nullptr;
  int64_t bytes_ = 0;  // that have come
  std::list<Kept> kept_;
};

bool Inbox::advance(Wish& wish, const Peer& sender, const Peer& me) {
  bool moved = false;
  while (!wish.done) {
    if (!wish.begun && take_kept(wish, sender, me)) return true;
    if (!stream || (begun_ && owner_ && owner_ != &wish)) return moved;
    if (!begun_) {
      const size_t before = header_bytes_;
      const bool complete = read_header();
      moved |= header_bytes_ != before;
      if (!complete) return moved;
      begin(wish, sender, me);
    }
    if (bytes_ < header_.following()) {
      if (!read_bytes()) return moved;
      moved = true;
    }
    if (bytes_ == header_.following()) finish(wish);
  }
  return moved;
}

void Inbox::keep(const Header& header, const void* data) {
  Kept& kept = kept_.emplace_back(header);
  if (header.following()) std::memcpy(kept.memory.get(), data, header.bytes);
  kept.complete = true;
}

bool Inbox::take_kept(Wish& wish, const Peer& sender, const Peer& me) {
  for (auto kept = kept_.begin(); kept != kept_.end(); ++kept) {
    if (!kept->complete || kept->header.tag != wish.tag) continue;
    if (kept->header.bytes != wish.bytes || kept->header.call.dtype != wish.watch.call.dtype)
      refuse(kept->header, wish, sender, me);
    wish.ticket = kept->header.ticket;
    if (kept->header.following()) std::memcpy(wish.place(), kept->memory.get(), wish.bytes);
    kept_.erase(kept);
    return wish.begun = wish.done = true;
  }
  return false;
}

bool Inbox::read_header() {
  while (header_bytes_ < sizeof(Header)) {
    const size_t now = stream->read(reinterpret_cast<char*>(&header_) + header_bytes_, sizeof(Header) - header_bytes_);
    if (now == 0) return false;
    header_bytes_ += now;
  }
  return true;
}

void Inbox::begin(Wish& wish, const Peer& sender, const Peer& me) {
  if (!wish.begun && header_.tag == wish.tag) {
    if (header_.bytes != wish.bytes || header_.call.dtype != wish.watch.call.dtype) refuse(header_, wish, sender, me);
    wish.ticket = header_.ticket;
    into_ = header_.following() ? static_cast<char*>(wish.place()) : nullptr;
    wish.begun = true;
    owner_ = &wish;
  } else {
    owner_ = nullptr;
    into_ = kept_.emplace_back(header_).memory.get();
  }
  begun_ = true;
}

bool Inbox::read_bytes() {
  const size_t now = stream->read(into_ + bytes_, header_.following() - bytes_);
  bytes_ += static_cast<int64_t>(now);
  return now > 0;
}

void Inbox::finish(Wish& wish) {
  if (owner_)
    wish.done = true;
  else
    kept_.back().complete = true;
  begun_ = false;
  owner_ = nullptr;
  header_bytes_ = 0;
  bytes_ = 0;
}

// Counts a thread that reads inboxes, as long as it does.
class Reading {
 public:
  explicit Reading(std::vector<Inbox*> inboxes) : inboxes_(std::move(inboxes)) {
    for (Inbox* inbox : inboxes_) inbox->readers.fetch_add(1, std::memory_order_relaxed);
  }
  ~Reading() {
    for (Inbox* inbox : inboxes_) inbox->readers.fetch_sub(1, std::memory_order_relaxed);
  }

 private:
  std::vector<Inbox*> inboxes_;
};

}  // namespace

struct Messages::State {
  State(const Roster& roster, Mesh& mesh, Team& team)
      : roster(roster), mesh(mesh), team(team), inboxes(roster.size()), outgoing(roster.size()) {}

  bool local(int rank) const { return roster.peers[rank].host == roster.me().host; }
  Outgoing& to(int rank, const Watch& watch);
  bool connected(int rank);  // whether messages from this rank could be read;
                             // its inbox is locked
  bool advance(int from, Wish& wish);

  const Roster& roster;
  Mesh& mesh;
  Team& team;
  std::vector<Inbox> inboxes;                       // by sender
  std::vector<std::unique_ptr<Outgoing>> outgoing;  // by receiver
};

Messages::Messages(const Roster& roster, Mesh& mesh, Team& team, Health&)
    : state_(std::make_unique<State>(roster, mesh, team)) {}
Messages::~Messages() = default;

Outgoing& Messages::State::to(int rank, const Watch& watch) {
  std::unique_ptr<Outgoing>& stream = outgoing[rank];
  const Peer& peer = roster.peers[rank];
  if (!stream && local(rank))
    stream = std::make_unique<PipeOutgoing>(team.pipe(team.rank(), peer.local_rank), Team::kPipe);
  if (!stream) {
    std::vector<Socket> sockets;
    sockets.push_back(mesh.dial(rank, Purpose::message, 0, watch.deadline));
    stream = std::make_unique<TcpOutgoing>(std::move(sockets), peer);
  }
  return *stream;
}

bool Messages::State::connected(int rank) {
  std::unique_ptr<Incoming>& stream = inboxes[rank].stream;
  const Peer& peer = roster.peers[rank];
  if (stream || rank == roster.rank) return true;
  if (local(rank)) {
    stream = std::make_unique<PipeIncoming>(team.pipe(peer.local_rank, team.rank()), Team::kPipe);
  } else if (mesh.dialed(rank, Purpose::message, 0)) {
    std::vector<Socket> sockets;
    sockets.push_back(mesh.take(rank, Purpose::message, 0, Clock::now()));
    stream = std::make_unique<TcpIncoming>(std::move(sockets), peer);
  }
  return stream != nullptr;
}

bool Messages::State::advance(int from, Wish& wish) {
  std::lock_guard lock(inboxes[from].mutex);
  return connected(from) && inboxes[from].advance(wish, roster.peers[from], roster.me());
}

namespace {

void push(Outgoing& stream, const void* data, size_t bytes, int to, const Watch& watch) {
  Patience patience(watch);
  for (size_t done = 0; done < bytes;) {
    const size_t now = stream.write(static_cast<const char*>(data) + done, bytes - done);
    done += now;
    if (now)
      patience.moved();
    else
      patience.rest([&](Patience::Wanted& wanted) { wanted.add(stream, to); });
  }
}

}  // namespace

void Messages::send(const void* data, int64_t size, int to, int tag, uint64_t ticket, const Watch& watch) {
  Header header;
  header.bytes = size;
  header.tag = tag;
  header.ticket = ticket;
  header.call = watch.call;
  const int64_t bytes = header.following();
  if (to == state_->roster.rank) {
    Inbox& inbox = state_->inboxes[to];
    std::lock_guard lock(inbox.mutex);
    return inbox.keep(header, data);
  }
  Outgoing& stream = state_->to(to, watch);
  if (bytes > kTogether) {
    push(stream, &header, sizeof(header), to, watch);
    push(stream, data, bytes, to, watch);
    return;
  }
  char together[sizeof(header) + kTogether];
  std::memcpy(together, &header, sizeof(header));
  if (bytes) std::memcpy(together + sizeof(header), data, bytes);
  push(stream, together, sizeof(header) + bytes, to, watch);
}

uint64_t Messages::recv(const Place& place, int64_t bytes, int from, int tag, const Watch& watch) {
  Wish wish{place, bytes, tag, watch};
  Inbox& inbox = state_->inboxes[from];
  const Reading reading({&inbox});
  Patience patience(watch);
  while (!wish.done) {
    if (state_->advance(from, wish))
      patience.moved();
    else
      patience.rest(
          [&](Patience::Wanted& wanted) {
            std::lock_guard lock(inbox.mutex);
            if (inbox.stream)
              wanted.add(*inbox.stream, from);
            else
              wanted.add(from);
          },
          inbox.readers.load(std::memory_order_relaxed) > 1 ? kShared : kAlone);
  }
  return wish.ticket;
}

uint64_t Messages::recv_any(const Place& place, int64_t bytes, int& source, int tag, const Watch& watch) {
  Wish wish{place, bytes, tag, watch};
  std::vector<Inbox*> inboxes;
  for (Inbox& inbox : state_->inboxes) inboxes.push_back(&inbox);
  const Reading reading(inboxes);
  Patience patience(watch);
  const int size = state_->roster.size();
  int only = -1;  // whose message has begun
  while (true) {
    bool moved = false;
    for (int from = 0; from < size; ++from) {
      if (only >= 0 && from != only) continue;
      moved |= state_->advance(from, wish);
      if (wish.done) return source = from, wish.ticket;
      if (wish.begun) only = from;
    }
    if (moved) {
      patience.moved();
      continue;
    }
    // Naps: another sender may dial while this thread sleeps on the streams that there are.
    patience.rest(
        [&](Patience::Wanted& wanted) {
          for (int from = 0; from < size; ++from)
            if (from != state_->roster.rank && (only < 0 || from == only)) wanted.add(from);
        },
        kShared);
  }
}

void Messages::drain(Deadline deadline) {
  for (const std::unique_ptr<Outgoing>& stream : state_->outgoing)
    if (stream) stream->drain(deadline);
}

}  // namespace hfreduce
