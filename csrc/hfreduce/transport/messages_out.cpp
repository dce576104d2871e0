// The writing side of messages: see messages.cpp.
#include <algorithm>
#include <cstring>

#include "transport/messages_state.h"
#include "transport/pipe.h"
#include "transport/tcp.h"

namespace hfreduce {

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
    pair.changed.wait_for(lock, message::kLook);
    lock.unlock();
    watch.check({to});
    lock.lock();
  }
  pair.writing = true;  // and it stays so where something throws: half a frame may be out then
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

// A frame, behind what goes first, when it is this thread's turn.
void Messages::State::write(int to, const Header& header, const void* data, const Watch& watch) {
  begin_writing(to, watch);
  connect_out(to, watch.deadline);
  write_first(to, false, watch);
  const int64_t bytes = header.following();
  if (bytes > message::kTogether) {
    push(to, &header, sizeof(header), watch);
    push(to, data, bytes, watch);
  } else {
    char together[sizeof(header) + message::kTogether];
    std::memcpy(together, &header, sizeof(header));
    if (bytes) std::memcpy(together + sizeof(header), data, bytes);
    push(to, together, sizeof(header) + bytes, watch);
  }
  while (write_first(to, true, watch)) {
  }
}

void Messages::send(const void* data, int64_t size, int to, int tag, uint64_t ticket, const Watch& watch) {
  message::Header header;
  header.bytes = size;
  header.tag = tag;
  header.ticket = ticket;
  header.call = watch.call;
  message::Pair& pair = state_->pairs[to];
  {
    std::lock_guard lock(pair.mutex);
    if (to == state_->roster.rank) {
      message::UnexpectedMessage& kept = pair.unexpected.emplace_back(header);
      if (header.following()) std::memcpy(kept.memory.get(), data, size);
      kept.complete = true;
      pair.changed.notify_all();
      return;
    }
    if (ticket || pair.unasked + header.cost() - pair.known_taken <= message::kEager) {
      pair.unasked += header.cost();
    } else {
      header.sort = message::Sort::ready;
      header.ticket = ++pair.numbered;
    }
  }
  state_->write(to, header, data, watch);
  if (header.sort == message::Sort::eager) return;
  state_->wait(to, nullptr, watch, [&] { return pair.cleared.count(header.ticket) > 0; });
  {
    std::lock_guard lock(pair.mutex);
    pair.cleared.erase(header.ticket);
  }
  header.sort = message::Sort::data;
  for (int64_t done = 0; done < size; done += header.bytes) {
    header.bytes = std::min(message::kPiece, size - done);
    state_->write(to, header, static_cast<const char*>(data) + done, watch);
  }
}

void Messages::drain(Deadline deadline) {
  for (message::Pair& pair : state_->pairs)
    if (pair.out) pair.out->drain(deadline);
}

}  // namespace hfreduce
