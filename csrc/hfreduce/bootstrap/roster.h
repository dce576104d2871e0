// The ranks and where they are: what ranks exchange before they connect.
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "types.h"

namespace hfreduce {

// Where ranks exchange keys before they are connected: torch's Store, or a test's.
//
// Keys belong to one communicator. `find` never blocks: torch's TCPStore serializes its calls, and a blocked one would
// prevent other threads of the process from writing the key that this one waits for.
class Store {
 public:
  virtual ~Store() = default;
  virtual void set(const std::string& key, const std::string& value) = 0;
  virtual std::optional<std::string> find(const std::string& key) = 0;

  // The value, once it is set: see ask_until. At the deadline, throws std::runtime_error with the key.
  std::string wait(const std::string& key, Deadline deadline);
};

// Calls `answered` until it returns true: after 1 ms, then at growing intervals of up to 50 ms. Returns false at the
// deadline.
bool ask_until(Deadline deadline, const std::function<bool()>& answered);

// A rank, as the others see it.
struct Peer {
  int rank = -1;         // in this communicator
  int global_rank = -1;  // in the whole job; used in messages
  int host = -1;         // index into Roster::hosts
  int local_rank = -1;   // index among the ranks of its host
  int pid = 0;           // in its own PID namespace
  int numa_node = -1;    // where it ran when it joined; -1 if unknown
  int cores = 0;         // in its affinity mask
  int port = 0;          // TCP
  std::string host_id;   // ranks can share memory if it is equal: boot id and network namespace
  std::string hostname;
  std::string address;   // numeric, of the interface that it listens on
  std::string socket;    // name of its Unix socket, in the abstract namespace
  std::string switches;  // those above its host, as SLURM_TOPOLOGY_ADDR names them; "": unknown

  std::string name() const;  // "rank 3 (host b, pid 1234)", with the global rank
};

// An order of hosts, and where it is from.
struct HostOrder {
  std::vector<int> hosts;  // empty: in the order of their lowest ranks
  std::string source;
};

// The order of hosts, of which each has a name and Peer::switches.
using SortHosts = std::function<HostOrder(const std::vector<std::pair<std::string, std::string>>& hosts)>;

// All ranks. The order is the same everywhere: hosts by their lowest rank.
struct Roster {
  int rank = -1;
  std::vector<Peer> peers;              // by rank
  std::vector<std::vector<int>> hosts;  // ranks of each host, ascending
  std::string secret;                   // of this communicator; peers must send it
  int cores = 0;                        // of the host with the fewest: equal on all ranks, since plans depend on it
  std::vector<int> order, places;       // hosts in the order in which they are neighbours, and its inverse
  std::string order_source;             // "": by their lowest ranks

  int size() const { return static_cast<int>(peers.size()); }
  const Peer& me() const { return peers[rank]; }
  const std::vector<int>& local() const { return hosts[me().host]; }
  bool one_host() const { return hosts.size() == 1; }
  int place() const { return places[me().host]; }
  std::string neighbours() const;  // the order and its source, for a reader; "" by rank
  // Throws std::invalid_argument unless it has each host once.
  void sort(std::vector<int> hosts_in_order);

  // Exchanges the ranks' Peers: each rank writes one key, and rank 0 gathers them into one. Keys of an earlier
  // communicator with the same names do no harm. global_ranks: by rank, for messages; empty: equal to the ranks. Throws
  // std::runtime_error with the ranks that are missing at the deadline. sorted: rank 0's decides for all.
  static Roster meet(Store& store, Peer mine, int size, Deadline deadline, const std::vector<int>& global_ranks = {},
                     const SortHosts& sorted = nullptr);

  // This process as a Peer: host, pid, NUMA node. `host_id` overrides the machine's own; "": does not.
  static Peer self(int rank, int global_rank, const std::string& host_id);

 private:
  void agree(Store& store, Deadline deadline, const SortHosts& sorted);
};

// Random bytes from the kernel, as hexadecimal digits.
std::string random_hex(int bytes);

}  // namespace hfreduce
