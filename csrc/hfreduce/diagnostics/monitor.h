// The liveness channel: one thread, one connection to every peer. Notices within a second that a process has died,
// and within ten that a host is cut off; tells the others, asks and answers where everybody stands.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "bootstrap/mesh.h"
#include "diagnostics/recorder.h"

namespace hfreduce {

class Monitor {
 public:
  // What Python does just now ("file:line in function"). Called on a thread of its own, for it may have to wait for the
  // interpreter: no thread that holds the interpreter may call leave(). May be null.
  using Where = std::function<std::string()>;
  // The last collective of a peer as far as this process can see it (in shared memory); sequence 0 where it cannot. May
  // be null.
  using Last = std::function<Call(int rank)>;

  // sockets: by group rank; this rank's own is empty.
  Monitor(const Roster& roster, std::vector<Socket> sockets, Health& health, const Recorder& recorder, Where where,
          Last last = nullptr);
  ~Monitor();  // as leave()

  // Where every rank stands, by rank, within `patience`. Returns at once when a fault arrives meanwhile.
  std::vector<RankStatus> ask(milliseconds patience);

  // Tells every peer of a fault of ours.
  void tell(const Fault& fault);

  // Says goodbye, so that the end of this process is no death, and joins the threads; idempotent. why: see
  // Communicator::shutdown.
  void leave(const std::string& why = "");

 private:
  struct State;
  std::unique_ptr<State> state_;
};

// The sentence and the table of a timeout: which ranks are missing from `call`, where everybody is. waited_for: of whom
// this rank knows that it waits for them; the statuses may show that these wait for others.
Fault timed_out(const Roster& roster, const Call& call, const std::vector<int>& waited_for,
                const std::vector<RankStatus>& statuses, milliseconds waited);

}  // namespace hfreduce
