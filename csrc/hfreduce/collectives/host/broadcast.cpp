// Broadcast inside a host.
//
// The root copies a slot's worth into its slot, all arrive, the others copy it out while the root writes the next into
// its other slot. One step a piece; N bytes written by the root, N read by each of the others.
#include "collectives/host/local.h"
#include "collectives/host/slots.h"

namespace hfreduce::local {

void broadcast(ShmGroup& shm, void* data, int64_t bytes, int root, const Watch& watch) {
  const int64_t most = piece(shm.slot_bytes(), 1, 1);
  int64_t done = 0;
  do {
    const int64_t now = std::min(most, bytes - done);
    if (shm.rank() == root) copy(shm.mine(), at(data, done), now);
    shm.arrive(watch);
    if (shm.rank() != root) copy(at(data, done), shm.slot(root), now);
    shm.next();
    done += now;
  } while (done < bytes);
}

}  // namespace hfreduce::local
