// Which ranks carry what between hosts, and the TCP streams that they do it over.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "collectives/interhost/between.h"
#include "bootstrap/mesh.h"
#include "bootstrap/roster.h"

namespace hfreduce {

// TCP connections to other ranks, made by whoever sends; so many side by side, in every stream.
class TcpLinks : public between::Links {
 public:
  // Of two lanes between the same ranks, for two threads, none shares connections with the other.
  TcpLinks(const Roster& roster, Mesh& mesh, int lane, int streams)
      : roster_(roster), mesh_(mesh), lane_(lane), streams_(streams) {}
  Outgoing& to(int rank, int channel, const Watch& watch) override;
  Incoming* from(int rank, int channel, const Watch& watch) override;
  std::string name(int rank) const override { return roster_.peers[rank].name(); }
  int rank() const override { return roster_.rank; }

 private:
  int index(int channel, int stream) const { return (lane_ * 2 + channel) * streams_ + stream; }

  using Key = std::pair<int, int>;  // rank, channel
  const Roster& roster_;
  Mesh& mesh_;
  const int lane_, streams_;
  std::map<Key, std::unique_ptr<Outgoing>> outgoing_;
  std::map<Key, std::unique_ptr<Incoming>> incoming_;
};

// How the ranks lie on the hosts.
struct Layout {
  explicit Layout(const Roster& roster);

  int hosts, host;        // how many, and this rank's
  int size;               // ranks of this host
  int rails;              // as many as the smallest host has ranks
  int largest;            // ranks of the largest host
  int local;              // this rank among those of its host, and its rail where it is below `rails`
  bool regular;           // hosts have equally many ranks, host h those from h * rails on
  std::vector<int> rail;  // the ranks of this rank's rail, by host; empty when it has none
};

}  // namespace hfreduce
