// All-gather inside a host.
//
// A slot's worth of each rank's block: each rank copies it into its slot, all arrive, each copies the slots of the
// others out. One step a piece; with blocks of B bytes a rank writes B into its slot and reads (n-1) B. Its own block
// goes straight to its place, unless it is there already.
#include "collectives/host/local.h"
#include "collectives/host/slots.h"

namespace hfreduce::local {

void all_gather(ShmGroup& shm, const void* in, void* out, int64_t stride, int64_t bytes, const Watch& watch) {
  const int64_t most = piece(shm.slot_bytes(), 1, 1);
  copy(at(out, shm.rank() * stride), in, bytes);
  int64_t done = 0;
  do {
    const int64_t now = std::min(most, bytes - done);
    copy(shm.mine(), at(in, done), now);
    shm.arrive(watch);
    for (int b = 0; b < shm.size(); ++b)
      if (b != shm.rank()) copy(at(out, b * stride + done), shm.slot(b), now);
    shm.next();
    done += now;
  } while (done < bytes);
}

}  // namespace hfreduce::local
