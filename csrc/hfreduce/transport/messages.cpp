// Point-to-point messages, matched by tag as MPI's are.
//
// A sender writes frames into the pipe to the receiver: shared memory inside a host, one TCP connection otherwise, made
// at the first message of the pair. A message is *eager* as long as the receiver may be left with it: its header and
// its bytes go at once. What a receiver reads while it waits for another tag is *unexpected*, and kept in order of
// arrival for whoever asks for it. A sender counts the bytes that have not been taken yet, as far as it was told, and
// beyond kEager of them a message goes by *rendezvous*: a header that says it is ready; one back, from whoever receives
// it, that the way is clear (which also tells how much was taken); then the bytes, in pieces, straight into their
// place. So a rank never holds more than kEager of another's messages, and a message that nobody receives yet holds up
// none of another tag.
//
// Eager bytes cost themselves on the wire, or two copies inside a host, and one more when they are kept; a rendezvous
// costs a round trip, and never keeps.
//
// Several threads may wait for one peer: receivers, of a tag each, and senders whose way is not clear. One of them
// reads, for all, and wakes the others; when it has what it wants, another takes over. One thread at a time writes;
// what readers have to say ("clear") goes first, between two frames. Nobody sleeps, or waits for room, with the lock.
#include "transport/messages.h"

#include <cstring>

#include "transport/messages_state.h"
#include "diagnostics/mismatch.h"
#include "transport/pipe.h"
#include "transport/tcp.h"

namespace hfreduce {

using namespace message;

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

// Reads on; false when there is nothing to read.
bool Messages::State::step(int from, PostedReceive* posted, const Done& done) {
  Pair& pair = pairs[from];
  bool moved = false;
  while (!done()) {
    if (!pair.begun) {
      if (posted && match(from, *posted)) {  // what was just kept comes before what follows it
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

// Until `done`, which is asked with the lock; `posted`: what this thread receives.
void Messages::State::wait(int from, PostedReceive* posted, const Watch& watch, const Done& done) {
  Pair& pair = pairs[from];
  Backoff backoff(watch);
  std::unique_lock lock(pair.mutex);
  while (!done()) {
    if (advance(from, posted, watch, done)) {
      backoff.moved();
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
  pair.changed.notify_all();  // another reads now
}

void Messages::State::rest(int from, Backoff& backoff) {
  Pair& pair = pairs[from];
  milliseconds longest = kLook;
  backoff.rest(
      [&](Backoff::Wanted& wanted) {
        std::lock_guard lock(pair.mutex);
        if (!pair.first.empty()) longest = kShared;  // which the pipe had no room for
        if (pair.in)
          wanted.add(*pair.in, from);
        else
          wanted.add(from);
      },
      longest);
}

namespace {

// A posted receive, which others may see until its message is there, or it gives up.
class Wishing {
 public:
  Wishing(std::vector<Pair>& pairs, const PostedReceive& posted) : pairs_(pairs), wish_(posted) {}
  ~Wishing() {
    if (wish_.done) return;
    for (Pair& pair : pairs_) {
      std::lock_guard lock(pair.mutex);
      pair.given_up = pair.given_up || wish_.begun;
    }
  }

 private:
  std::vector<Pair>& pairs_;
  const PostedReceive& wish_;
};

}  // namespace

uint64_t Messages::recv(const Place& place, int64_t bytes, int from, int tag, const Watch& watch) {
  PostedReceive posted{place, bytes, tag, watch};
  const Wishing wishing(state_->pairs, posted);
  state_->wait(from, &posted, watch, [&] { return posted.done; });
  return posted.ticket;
}

uint64_t Messages::recv_any(const Place& place, int64_t bytes, int& source, int tag, const Watch& watch) {
  PostedReceive posted{place, bytes, tag, watch};
  const Wishing wishing(state_->pairs, posted);
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
    // Naps: another sender may dial, or another thread keep a message, while this one sleeps.
    backoff.rest(
        [&](Backoff::Wanted& wanted) {
          for (int from = 0; from < size; ++from)
            if (from != state_->roster.rank) wanted.add(from);
        },
        kShared);
  }
}

}  // namespace hfreduce
