// The rendezvous. Rank 0 writes a new random number under "invitation". Every other rank replies under that number
// ("<number>/rank/<rank>"). Rank 0 gathers the replies and writes them, with the secret, under "<number>/roster". A
// store may still hold keys of an earlier communicator of the same name (torchrun's store outlives
// destroy_process_group). A rank that replies to an old invitation finds a roster without its own entry, and waits for
// the new invitation.
#include "bootstrap/roster.h"

#include <sched.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <iomanip>
#include <map>
#include <numeric>
#include <sstream>
#include <stdexcept>
#include <system_error>
#include <thread>

namespace hfreduce {
namespace {

// The version of everything that ranks exchange: ranks of different versions refuse to connect.
constexpr int kProtocol = 3;

// ASCII's separators, which must not be part of a name.
constexpr char kUnit = '\x1f', kRecord = '\x1e';

std::vector<std::string> split(const std::string& text, char separator) {
  std::vector<std::string> parts;
  std::istringstream stream(text);
  for (std::string part; std::getline(stream, part, separator);) parts.push_back(part);
  return parts;
}

std::string encode(const Peer& peer) {
  std::ostringstream text;
  text << kProtocol;
  for (int number : {peer.rank, peer.global_rank, peer.pid, peer.numa_node, peer.cores, peer.port})
    text << kUnit << number;
  for (const std::string* word : {&peer.hostname, &peer.host_id, &peer.address, &peer.socket, &peer.switches}) {
    if (std::any_of(word->begin(), word->end(), [](unsigned char c) { return c < ' '; }))
      throw std::invalid_argument("hfreduce: a name with control characters in it, '" + *word +
                                  "': give a host_id and an interface of printable characters");
    text << kUnit << *word;
  }
  return text.str() + kUnit;
}

Peer decode(const std::string& text) {
  const std::vector<std::string> parts = split(text, kUnit);
  const std::string protocol = std::to_string(kProtocol);
  if (parts.empty() || parts[0] != protocol)
    throw std::runtime_error("hfreduce: ranks of different versions: this one speaks protocol " + protocol +
                             ", another says '" + text.substr(0, 80) + "'; install the same hfreduce on every host");
  if (parts.size() != 12) throw std::runtime_error("hfreduce: the store gave back a damaged entry: '" + text + "'");
  Peer peer;
  int* numbers[] = {&peer.rank, &peer.global_rank, &peer.pid, &peer.numa_node, &peer.cores, &peer.port};
  std::string* words[] = {&peer.hostname, &peer.host_id, &peer.address, &peer.socket, &peer.switches};
  for (size_t i = 0; i < 6; ++i) *numbers[i] = std::stoi(parts[1 + i]);
  for (size_t i = 0; i < 5; ++i) *words[i] = parts[7 + i];
  return peer;
}

Roster arrange(int rank, std::vector<Peer> peers, const std::string& secret) {
  Roster roster;
  roster.rank = rank;
  roster.secret = secret;
  std::map<std::string, int> host_of;
  std::vector<int> cores;
  for (Peer& peer : peers) {
    const auto [found, fresh] = host_of.try_emplace(peer.host_id, static_cast<int>(roster.hosts.size()));
    if (fresh) roster.hosts.emplace_back(), cores.push_back(0);
    peer.host = found->second;
    peer.local_rank = static_cast<int>(roster.hosts[peer.host].size());
    roster.hosts[peer.host].push_back(peer.rank);
    cores[peer.host] = std::max(cores[peer.host], peer.cores);
  }
  roster.cores = *std::min_element(cores.begin(), cores.end());
  roster.peers = std::move(peers);
  std::vector<int> order(roster.hosts.size());
  std::iota(order.begin(), order.end(), 0);
  roster.sort(std::move(order));
  return roster;
}

Roster read(int rank, const std::string& value) {
  std::vector<std::string> entries = split(value, kRecord);
  std::vector<Peer> peers;
  for (size_t i = 1; i < entries.size(); ++i) peers.push_back(decode(entries[i]));
  return arrange(rank, std::move(peers), entries[0]);
}

// One rank's part in the rendezvous.
class Meeting {
 public:
  Meeting(Store& store, const Peer& mine, int size, Deadline deadline, const std::vector<int>& global_ranks)
      : store_(store), mine_(mine), size_(size), deadline_(deadline), global_ranks_(global_ranks) {}
  // For rank 0.
  Roster gather() {
    const std::string invitation = random_hex(8);
    store_.set("invitation", invitation);
    std::vector<std::string> entries(size_);
    entries[0] = encode(mine_);
    std::vector<int> absent;
    for (int rank = 1; rank < size_; ++rank) {
      std::optional<std::string> entry;
      if (ask_until(deadline_, [&] { return (entry = store_.find(key(invitation, rank))).has_value(); }))
        entries[rank] = *entry;
      else
        absent.push_back(rank);
    }
    if (!absent.empty()) missing(absent);
    std::string value = random_hex(32);
    for (const std::string& entry : entries) value += kRecord + entry;
    store_.set(invitation + "/roster", value);
    return read(0, value);
  }
  // For the other ranks.
  Roster answer() {
    const std::string entry = encode(mine_);
    std::string invitation;
    std::optional<std::string> roster;
    const bool met = ask_until(deadline_, [&] {
      const std::optional<std::string> newest = store_.find("invitation");
      if (newest && *newest != invitation) {
        invitation = *newest;
        store_.set(key(invitation, mine_.rank), entry);
      }
      if (invitation.empty()) return false;
      roster = store_.find(invitation + "/roster");
      if (!roster) return false;
      const std::vector<std::string> entries = split(*roster, kRecord);
      return entries.size() == size_t(size_) + 1 && entries[1 + mine_.rank] == entry;
    });
    if (!met) give_up(invitation, roster);
    return read(mine_.rank, *roster);
  }

 private:
  static std::string key(const std::string& invitation, int rank) {
    return invitation + "/rank/" + std::to_string(rank);
  }
  std::string waited() const {
    const double seconds = std::chrono::duration<double>(Clock::now() - begun_).count();
    std::ostringstream text;
    text << std::fixed << std::setprecision(1) << "hfreduce: " << mine_.name() << " has waited " << seconds
         << " s for ";
    return text.str();
  }
  [[noreturn]] void missing(const std::vector<int>& absent) const {
    std::ostringstream text;
    text << waited() << absent.size() << " of " << size_ << " ranks, which have not come:";
    for (size_t i = 0; i < absent.size() && i < 32; ++i)
      text << (i ? ", " : " ") << (global_ranks_.empty() ? absent[i] : global_ranks_[absent[i]]);
    if (absent.size() > 32) text << ", ...";
    text << ". Look at whether they were started, and at how they ended; a larger timeout gives slow ones more time";
    throw std::runtime_error(text.str());
  }
  // The error of a rank other than 0 at the deadline. `roster`: of the last invitation, if any.
  [[noreturn]] void give_up(const std::string& invitation, const std::optional<std::string>& roster) {
    if (invitation.empty()) missing({0});
    if (roster) {
      const Roster other = read(0, *roster);
      if (other.size() != size_)
        throw std::runtime_error(waited() + std::to_string(size_) + " ranks, but rank 0 for " +
                                 std::to_string(other.size()) + ": give all ranks the same world size");
      throw std::runtime_error(waited() + "a place in the roster, which has " + other.peers[mine_.rank].name() +
                               " there: two processes were started with this rank, or rank 0 has not come again");
    }
    std::vector<int> absent;
    for (int rank = 1; rank < size_; ++rank)
      if (!store_.find(key(invitation, rank))) absent.push_back(rank);
    if (absent.empty()) absent.push_back(0);  // it has left while gathering
    missing(absent);
  }

  Store& store_;
  const Peer& mine_;
  const int size_;
  const Deadline begun_ = Clock::now(), deadline_;
  const std::vector<int>& global_ranks_;
};

std::string machine_id() {
  std::string boot;
  std::ifstream("/proc/sys/kernel/random/boot_id") >> boot;
  struct stat network{};
  if (boot.empty() || stat("/proc/self/ns/net", &network) != 0)
    throw std::runtime_error(
        "hfreduce: /proc does not tell this machine's boot id or network namespace; mount it, or "
        "give a host_id that is equal for the ranks of one machine");
  return boot + "/" + std::to_string(network.st_ino);
}

}  // namespace

bool ask_until(Deadline deadline, const std::function<bool()>& answered) {
  const Clock::duration longest = milliseconds(50);
  for (Clock::duration pause = milliseconds(1);; pause = std::min(pause * 3 / 2, longest)) {
    if (answered()) return true;
    const Clock::duration left = deadline - Clock::now();
    if (left <= Clock::duration::zero()) return false;
    std::this_thread::sleep_for(std::min(pause, left));
  }
}

void Roster::sort(std::vector<int> hosts_in_order) {
  places.assign(hosts.size(), -1);
  for (size_t i = 0; i < hosts_in_order.size(); ++i) {
    const size_t host = static_cast<size_t>(hosts_in_order[i]);
    if (host >= hosts.size() || places[host] >= 0 || hosts_in_order.size() != hosts.size())
      throw std::invalid_argument("hfreduce: an order of hosts must have each of the " + std::to_string(hosts.size()) +
                                  " hosts once");
    places[host] = static_cast<int>(i);
  }
  order = std::move(hosts_in_order);
}

std::string Store::wait(const std::string& key, Deadline deadline) {
  std::optional<std::string> value;
  if (ask_until(deadline, [&] { return (value = find(key)).has_value(); })) return *std::move(value);
  throw std::runtime_error("hfreduce: nobody has set the key '" + key + "' in the store by the deadline");
}

std::string random_hex(int bytes) {
  std::string random(bytes, '\0'), digits;
  // getrandom fills up to 256 bytes in one call, or fails.
  if (getrandom(random.data(), random.size(), 0) != bytes)
    throw std::system_error(errno, std::generic_category(), "hfreduce: getrandom");
  for (unsigned char byte : random) digits += "0123456789abcdef"[byte >> 4], digits += "0123456789abcdef"[byte & 15];
  return digits;
}

std::string Peer::name() const {
  return "rank " + std::to_string(global_rank) + " (host " + hostname + ", pid " + std::to_string(pid) + ")";
}

Peer Roster::self(int rank, int global_rank, const std::string& host_id) {
  Peer peer;
  peer.rank = rank;
  peer.global_rank = global_rank;
  peer.pid = getpid();
  unsigned cpu = 0, node = 0;
  if (getcpu(&cpu, &node) == 0) peer.numa_node = static_cast<int>(node);
  // On machines with more than 1024 cores the call fails, because this set is too small.
  cpu_set_t cores;
  peer.cores = sched_getaffinity(0, sizeof cores, &cores) == 0 ? CPU_COUNT(&cores) : int(sysconf(_SC_NPROCESSORS_ONLN));
  char hostname[256] = {};
  gethostname(hostname, sizeof hostname - 1);
  peer.hostname = hostname;
  if (const char* switches = std::getenv("SLURM_TOPOLOGY_ADDR")) peer.switches = switches;
  peer.host_id = host_id.empty() ? machine_id() : host_id;
  return peer;
}

// Rank 0 decides: hosts may have other files, but must agree.
void Roster::agree(Store& store, Deadline deadline, const SortHosts& sorted) {
  const std::string key = "order " + secret;
  if (rank == 0) {
    std::vector<std::pair<std::string, std::string>> names;
    for (const std::vector<int>& ranks : hosts) names.emplace_back(peers[ranks[0]].hostname, peers[ranks[0]].switches);
    HostOrder found;
    if (sorted) found = sorted(names);
    if (!found.hosts.empty()) sort(found.hosts), order_source = found.source;
    std::string text;
    for (int host : order) text += std::to_string(host) + ' ';
    return store.set(key, text + '\n' + order_source);
  }
  std::istringstream text(store.wait(key, deadline));
  std::vector<int> given(hosts.size(), -1);
  for (int& host : given) text >> host;
  sort(std::move(given));
  text.ignore(2, '\n');
  std::getline(text, order_source);
}

std::string Roster::neighbours() const {
  if (order_source.empty()) return "";
  std::string text = ", hosts in the order of " + order_source + ":";
  for (int host : order) text += " " + peers[hosts[host][0]].hostname;
  return text;
}

Roster Roster::meet(Store& store, Peer mine, int size, Deadline deadline, const std::vector<int>& global_ranks,
                    const SortHosts& sorted) {
  if (size == 1) return arrange(0, {mine}, random_hex(32));
  Meeting meeting(store, mine, size, deadline, global_ranks);
  Roster roster = mine.rank == 0 ? meeting.gather() : meeting.answer();
  if (!roster.one_host()) roster.agree(store, deadline, sorted);
  return roster;
}

}  // namespace hfreduce
