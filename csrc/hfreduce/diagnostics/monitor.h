// The liveness channel: one thread, and one connection to every peer. Detects within a second that a process has died,
// and within ten that a host is cut off. Tells the others, and exchanges where ranks are.
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
  // Where Python is ("file:line in function"). Called on a separate thread, because it may wait for the GIL: a thread
  // that holds the GIL must not call leave(). May be null.
  using Where = std::function<std::string()>;
  // The last collective of a peer, if this process can see it (in shared memory); otherwise sequence 0. May be null.
  using Last = std::function<Call(int rank)>;

  // sockets: by group rank; this rank's own is empty.
  Monitor(const Roster& roster, std::vector<Socket> sockets, Health& health, const Recorder& recorder, Where where,
          Last last = nullptr);
  ~Monitor();  // calls leave()

  // Where every rank is, by rank, within `patience`. Returns at once if a fault arrives meanwhile.
  std::vector<RankStatus> ask(milliseconds patience);

  // Tells every peer of a fault of this rank.
  void tell(const Fault& fault);

  // Says goodbye, so that the end of this process is not reported as a death, and joins the threads. Idempotent. why:
  // see Communicator::shutdown.
  void leave(const std::string& why = "");

 private:
  struct State;
  std::unique_ptr<State> state_;
};

// The message of a timeout: which ranks are missing from `call`, and a table of where all ranks are. waited_for: the
// ranks that this rank waits for; the statuses may show that these wait for others.
Fault timed_out(const Roster& roster, const Call& call, const std::vector<int>& waited_for,
                const std::vector<RankStatus>& statuses, milliseconds waited);

}  // namespace hfreduce
