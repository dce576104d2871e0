#include "collectives/interhost/rail.h"

#include <algorithm>

namespace hfreduce::interhost {

Outgoing& HostStreams::to(int rank, int channel, const Watch& watch) {
  std::unique_ptr<Outgoing>& stream = outgoing_[{rank, channel}];
  if (!stream) {
    std::vector<Socket> sockets;
    for (int i = 0; i < connections_; ++i)
      sockets.push_back(mesh_.dial(rank, Purpose::collective, index(channel, i), watch.deadline));
    stream = std::make_unique<TcpOutgoing>(std::move(sockets), roster_.peers[rank]);
  }
  return *stream;
}

// Does not wait in Mesh::take: if a peer is late, the watch's error says where all ranks are.
Incoming* HostStreams::from(int rank, int channel, const Watch& watch) {
  std::unique_ptr<Incoming>& stream = incoming_[{rank, channel}];
  if (stream) return stream.get();
  std::vector<Socket> sockets;
  for (int i = 0; i < connections_; ++i)
    if (!mesh_.dialed(rank, Purpose::collective, index(channel, i))) return nullptr;
  for (int i = 0; i < connections_; ++i)
    sockets.push_back(mesh_.take(rank, Purpose::collective, index(channel, i), watch.deadline));
  stream = std::make_unique<TcpIncoming>(std::move(sockets), roster_.peers[rank]);
  return stream.get();
}

HostLayout::HostLayout(const Roster& roster)
    : hosts(static_cast<int>(roster.hosts.size())),
      host(roster.me().host),
      size(static_cast<int>(roster.local().size())),
      rails(static_cast<int>(roster.hosts[0].size())),
      largest(0),
      local(roster.me().local_rank),
      regular(true) {
  for (const std::vector<int>& ranks : roster.hosts) {
    rails = std::min(rails, static_cast<int>(ranks.size()));
    largest = std::max(largest, static_cast<int>(ranks.size()));
  }
  for (int h = 0; h < hosts; ++h) {
    const std::vector<int>& ranks = roster.hosts[h];
    for (size_t i = 0; i < ranks.size(); ++i) regular = regular && ranks[i] == h * largest + static_cast<int>(i);
  }
  for (int h : roster.order)
    if (local < rails) rail.push_back(roster.hosts[h][local]);
  regular = regular && rails == largest;
}

Sender::Sender(const Rail& rail, int rank, int channel, int64_t bytes)
    : stream_(rail.streams.to(rank, channel, rail.watch)), header_{rail.watch.call, bytes}, rank_(rank) {
  begun();
}

bool Sender::begun() {
  while (sent_ < sizeof(Header)) {
    const size_t now = stream_.write(reinterpret_cast<const char*>(&header_) + sent_, sizeof(Header) - sent_);
    if (now == 0) return false;
    sent_ += now;
  }
  return true;
}

int64_t Sender::write(const void* data, int64_t bytes) {
  return begun() && bytes > 0 ? static_cast<int64_t>(stream_.write(data, bytes)) : 0;
}

void Sender::want(Backoff::Wanted& wanted) const { wanted.add(stream_, rank_); }

bool Receiver::begun() {
  if (!stream_) stream_ = rail_.streams.from(rank_, channel_, rail_.watch);
  while (stream_ && got_ < sizeof(Header)) {
    const size_t now = stream_->read(reinterpret_cast<char*>(&header_) + got_, sizeof(Header) - got_);
    if (now == 0) return false;
    got_ += now;
    if (got_ == sizeof(Header)) compare();
  }
  return got_ == sizeof(Header);
}

void Receiver::want(Backoff::Wanted& wanted) const {
  if (stream_)
    wanted.add(*stream_, rank_);
  else
    wanted.add(rank_);
}

int64_t Receiver::read(void* data, int64_t bytes) {
  return begun() && bytes > 0 ? static_cast<int64_t>(stream_->read(data, bytes)) : 0;
}

void Receiver::compare() const {
  const Roster& roster = rail_.streams.roster();
  const auto name = [&](int rank) { return roster.peers[rank].name(); };
  const Call& mine = rail_.watch.call;
  const int me = roster.rank;
  if (!same(header_.call, mine)) {
    if (me < rank_) throw mismatch({me, rank_}, {name(me), name(rank_)}, {mine, header_.call});
    throw mismatch({rank_, me}, {name(rank_), name(me)}, {header_.call, mine});
  }
  if (header_.bytes != bytes_)
    throw Fault(Fault::Cause::mismatch, {rank_, me},
                told(mine) + ": " + name(rank_) + " sends " + std::to_string(header_.bytes) + " bytes to " + name(me) +
                    ", which expects " + std::to_string(bytes_) + ".");
}

void all_reduce(Between how, const Rail& rail, void* data, int64_t count, const Sum& sum, Part part) {
  if (how == Between::tree && part == Part::both) return tree_all_reduce(rail, data, count, sum);
  (how == Between::ring ? ring : direct)(rail, data, count, sum, part);
}

namespace {

// A message in flight, and how much of it has been moved.
template <class End>
struct Moving {
  End end;
  char* data;
  int64_t bytes, done;

  bool finished() { return end.begun() && done == bytes; }
};

template <class End>
void want(std::vector<Moving<End>>& all, Backoff::Wanted& wanted) {
  for (Moving<End>& one : all) {
    if (!one.finished()) one.end.want(wanted);
  }
}

}  // namespace

void exchange(const Rail& rail, const std::vector<Transfer>& out, const std::vector<Transfer>& in) {
  std::vector<Moving<Sender>> senders;
  std::vector<Moving<Receiver>> receivers;
  for (const Transfer& transfer : out)
    senders.push_back(
        {Sender(rail, transfer.rank, 0, transfer.bytes), static_cast<char*>(transfer.data), transfer.bytes, 0});
  for (const Transfer& transfer : in)
    receivers.push_back(
        {Receiver(rail, transfer.rank, 0, transfer.bytes), static_cast<char*>(transfer.data), transfer.bytes, 0});
  Backoff backoff(rail.watch);
  while (true) {
    bool moved = false, finished = true;
    for (Moving<Sender>& one : senders) {
      const int64_t now = one.end.write(one.data + one.done, one.bytes - one.done);
      one.done += now;
      moved |= now > 0;
      finished = one.finished() && finished;
    }
    for (Moving<Receiver>& one : receivers) {
      const int64_t now = one.end.read(one.data + one.done, one.bytes - one.done);
      one.done += now;
      moved |= now > 0;
      finished = one.finished() && finished;
    }
    if (finished) return;
    if (moved)
      backoff.moved();
    else
      backoff.rest([&](Backoff::Wanted& wanted) {
        want(senders, wanted);
        want(receivers, wanted);
      });
  }
}

}  // namespace hfreduce::interhost
