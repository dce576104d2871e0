// Scatter inside a host: block b of the root's to rank b.
//
// The root copies a piece of each block into its slot, together a slot's worth, all arrive, each of the others copies
// its own out. One step a piece; (n-1) B bytes written by the root, B read by each of the others.
#include "collectives/host/local.h"
#include "collectives/host/slots.h"

namespace hfreduce::local {

void scatter(ShmGroup& shm, const void* in, void* out, int64_t bytes, int root, const Watch& watch) {
  const int64_t most = piece(shm.slot_bytes(), shm.size(), 1);
  if (shm.rank() == root) copy(out, at(in, root * bytes), bytes);
  int64_t done = 0;
  do {
    const int64_t now = std::min(most, bytes - done);
    for (int b = 0; shm.rank() == root && b < shm.size(); ++b)
      if (b != root) copy(shm.mine() + b * most, at(in, b * bytes + done), now);
    shm.arrive(watch);
    if (shm.rank() != root) copy(at(out, done), shm.slot(root) + shm.rank() * most, now);
    shm.next();
    done += now;
  } while (done < bytes);
}

}  // namespace hfreduce::local
