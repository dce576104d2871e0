// Who takes part, and where: what every rank tells the others before they connect.
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "types.h"

namespace hfreduce {

// Where ranks leave each other notes before they are connected: torch's Store, or a stand-in of a test.
//
// Keys are of one communicator. `find` never blocks: torch's TCPStore serialises its calls, and a blocked one would
// keep other threads of the process from writing what this one waits for.
class Store {
 public:
  virtual ~Store() = default;
  virtual void set(const std::string& key, const std::string& value) = 0;
  virtual std::optional<std::string> find(const std::string& key) = 0;

  // The value, as soon as somebody has set it: see ask_until. Throws std::runtime_error naming the key at the deadline.
  std::string wait(const std::string& key, Deadline deadline);
};

// Asks until the answer is yes: again after 1 ms, then ever more rarely, up to 50 ms. False when it was never yes by
// the deadline.
bool ask_until(Deadline deadline, const std::function<bool()>& answered);

// A rank as the others see it.
struct Peer {
  int rank = -1;         // in this communicator
  int global_rank = -1;  // in the whole job: what messages name
  int host = -1;         // index into Roster::hosts
  int local_rank = -1;   // among the ranks of its host
  int pid = 0;           // in its own process namespace
  int numa_node = -1;    // on which it ran when it joined; -1 where the machine does not say
  int cores = 0;         // that it may run on
  int port = 0;          // TCP
  std::string host_id;   // equal for two ranks exactly when they can share memory: boot id and network namespace
  std::string hostname;
  std::string address;  // of the interface that it listens on, numeric
  std::string socket;   // name of its Unix socket, in the abstract namespace

  std::string name() const;  // "rank 3 (host b, pid 1234)", with the global rank
};

// All ranks, in one order everywhere: hosts in the order of their lowest rank.
struct Roster {
  int rank = -1;
  std::vector<Peer> peers;              // by rank
  std::vector<std::vector<int>> hosts;  // ranks of each host, ascending
  std::string secret;                   // of this communicator; peers must show it
  int cores = 0;  // of the host that has the fewest: one number everywhere, for plans depend on it

  int size() const { return static_cast<int>(peers.size()); }
  const Peer& me() const { return peers[rank]; }
  const std::vector<int>& local() const { return hosts[me().host]; }
  bool one_host() const { return hosts.size() == 1; }

  // Tells the others of `mine`, and learns of them: one key a rank, gathered by rank 0 into one key for all. Keys that
  // an earlier communicator left under the same names do no harm. global_ranks: by rank, for messages; empty: the same.
  // Throws std::runtime_error that names the ranks which have not come by the deadline.
  static Roster meet(Store& store, Peer mine, int size, Deadline deadline, const std::vector<int>& global_ranks = {});

  // The peer that this process is: host, pid, NUMA node. `host_id` overrides the machine's own ("" for none).
  static Peer self(int rank, int global_rank, const std::string& host_id);
};

// So many random bytes of the kernel's, as hexadecimal digits.
std::string random_hex(int bytes);

}  // namespace hfreduce
