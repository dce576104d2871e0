// What messages are made of; for messages.cpp, which reads, and messages_out.cpp, which writes.
#pragma once

#include <condition_variable>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "transport/messages.h"

namespace hfreduce {

namespace message {

enum class Sort : uint32_t { eager, ready, clear, data };

struct Header {
  int64_t bytes = 0;  // of the message; data: of this piece; clear: that were taken, see Pair
  int32_t tag = 0;
  Sort sort = Sort::eager;
  uint64_t ticket = 0;  // eager: as it was given; otherwise the message's number among the sender's that wait
  Call call;            // of the sender

  int64_t following() const { return sort == Sort::data ? bytes : sort == Sort::eager && !ticket ? bytes : 0; }
  int64_t cost() const { return following() + static_cast<int64_t>(sizeof(Header)); }  // to who keeps it
};
static_assert(sizeof(Header) == sizeof(Call) + 24);

constexpr int64_t kEager = 1 << 20;     // bytes of one sender's messages that a receiver may have to keep
constexpr int64_t kTogether = 8 << 10;  // up to this size, header and bytes are written at once
constexpr int64_t kPiece = 512 << 10;   // of a message that waited: between two of them others get their turn
constexpr milliseconds kLook{20};       // the longest sleep: a fault wakes nobody
constexpr milliseconds kShared{1};      // where something may have to be done that wakes nobody

struct UnexpectedMessage {
  explicit UnexpectedMessage(const Header& header) : header(header), memory(new char[header.following()]) {}
  Header header;
  std::unique_ptr<char[]> memory;
  bool complete = false;
};

// What a receiver waits for.
struct PostedReceive {
  const Messages::Place& place;
  int64_t bytes;
  int tag;
  const Watch& watch;
  bool begun = false, done = false;
  uint64_t ticket = 0;
  char* memory = nullptr;  // by rendezvous: where its bytes go
  int64_t got = 0;
};

// Messages between this rank and another. All is of the mutex but for `out`, which is of whoever writes.
struct Pair {
  std::mutex mutex;
  std::condition_variable changed;

  std::unique_ptr<Incoming> in;    // none yet, or from this rank itself
  bool reading = false;            // whether a thread reads, or sleeps until there is something to read
  bool given_up = false;           // whether a receiver has left in the middle of its message: after a fault
  Header header;                   // of the frame that is coming in
  size_t header_bytes = 0;         // of it, that have come
  bool begun = false;              // whether it is known where its bytes go
  PostedReceive* owner = nullptr;  // whose memory that is; none: the last of the unexpected
  char* into = nullptr;
  int64_t bytes = 0;  // that have come
  std::list<UnexpectedMessage> unexpected;
  std::map<uint64_t, PostedReceive*> landing;  // receivers whose way was told to be clear, by the sender's number
  int64_t taken = 0;  // what messages cost that did not wait and that receivers have, all of them ever

  std::unique_ptr<Outgoing> out;
  bool writing = false;
  std::string first;                     // what is to be written before anything else
  uint64_t numbered = 0;                 // messages that had to wait
  std::set<uint64_t> cleared;            // numbers of those whose way is clear, and that have not gone on yet
  int64_t unasked = 0, known_taken = 0;  // what messages have cost that did not wait; as `taken` of the other side
};

}  // namespace message

struct Messages::State {
  using Header = message::Header;
  using Pair = message::Pair;
  using PostedReceive = message::PostedReceive;
  using Done = std::function<bool()>;  // asked with the mutex

  State(const Roster& roster, Mesh& mesh, ShmGroup& shm) : roster(roster), mesh(mesh), shm(shm), pairs(roster.size()) {}

  bool local(int rank) const { return roster.peers[rank].host == roster.me().host; }
  void connect_out(int rank, Deadline deadline);  // `out` is this thread's
  bool connect_in(int rank);                      // whether messages from this rank could be read

  // These have the mutex of the pair.
  bool match(int from, PostedReceive& posted);  // with what is kept; whether that was anything
  void clear(int from, PostedReceive& posted, const Header& ready);
  bool flush(int to, Deadline deadline);  // what is to be written first, unless somebody writes anyway
  void begin(int from, PostedReceive* posted);
  void finish(Pair& pair);
  // Moves what can be moved without waiting, and says whether that was anything.
  bool advance(int from, PostedReceive* posted, const Watch& watch, const Done& done);
  bool step(int from, PostedReceive* posted, const Done& done);

  void wait(int from, PostedReceive* posted, const Watch& watch, const Done& done);
  void rest(int from, Backoff& backoff);
  void begin_writing(int to, const Watch& watch);
  bool write_first(int to, bool then_end, const Watch& watch);  // whether there was anything; if not, it may be the end
  void write(int to, const Header& header, const void* data, const Watch& watch);
  void push(int to, const void* data, size_t bytes, const Watch& watch);

  const Roster& roster;
  Mesh& mesh;
  ShmGroup& shm;
  std::vector<Pair> pairs;  // by the other's rank
};

}  // namespace hfreduce
