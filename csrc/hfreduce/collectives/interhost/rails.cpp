#include "collectives/interhost/rails.h"

#include <algorithm>

#include "transport/tcp.h"

namespace hfreduce {

Outgoing& TcpLinks::to(int rank, int channel, const Watch& watch) {
  std::unique_ptr<Outgoing>& stream = outgoing_[{rank, channel}];
  if (!stream) {
    std::vector<Socket> sockets;
    for (int i = 0; i < streams_; ++i)
      sockets.push_back(mesh_.dial(rank, Purpose::collective, index(channel, i), watch.deadline));
    stream = std::make_unique<TcpOutgoing>(std::move(sockets), roster_.peers[rank]);
  }
  return *stream;
}

// Not for Mesh::take to wait: who does not come by the deadline is told by the watch, with where everybody stands.
Incoming* TcpLinks::from(int rank, int channel, const Watch& watch) {
  std::unique_ptr<Incoming>& stream = incoming_[{rank, channel}];
  if (stream) return stream.get();
  std::vector<Socket> sockets;
  for (int i = 0; i < streams_; ++i)
    if (!mesh_.dialed(rank, Purpose::collective, index(channel, i))) return nullptr;
  for (int i = 0; i < streams_; ++i)
    sockets.push_back(mesh_.take(rank, Purpose::collective, index(channel, i), watch.deadline));
  stream = std::make_unique<TcpIncoming>(std::move(sockets), roster_.peers[rank]);
  return stream.get();
}

Layout::Layout(const Roster& roster)
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
    if (local < rails) rail.push_back(ranks[local]);
  }
  regular = regular && rails == largest;
}

}  // namespace hfreduce
