// Gather inside a host: blocks of all ranks to the root.
//
// Each rank copies a slot's worth of its block into its slot, all arrive, the root copies the slots out. One step a
// piece; B bytes written by each rank but the root, (n-1) B read by the root.
#include "collectives/host/local.h"
#include "collectives/host/slots.h"

namespace hfreduce::local {

void gather(ShmGroup& shm, const void* in, void* out, int64_t bytes, int root, const Watch& watch) {
  const int64_t most = piece(shm.slot_bytes(), 1, 1);
  if (shm.rank() == root) copy(at(out, root * bytes), in, bytes);
  int64_t done = 0;
  do {
    const int64_t now = std::min(most, bytes - done);
    if (shm.rank() != root) copy(shm.mine(), at(in, done), now);
    shm.arrive(watch);
    for (int b = 0; shm.rank() == root && b < shm.size(); ++b)
      if (b != root) copy(at(out, b * bytes + done), shm.slot(b), now);
    shm.next();
    done += now;
  } while (done < bytes);
}

}  // namespace hfreduce::local
