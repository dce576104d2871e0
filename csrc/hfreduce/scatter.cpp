// Scatter inside a host: block b of the root's to rank b.
//
// The root copies a piece of each block into its slot, together a slot's worth, all arrive, each of the others copies
// its own out. One step a piece; (n-1) B bytes written by the root, B read by each of the others.
#include "local.h"
#include "slots.h"

namespace hfreduce::local {

void scatter(Team& team, const void* in, void* out, int64_t bytes, int root, const Watch& watch) {
  const int64_t most = piece(team.slot_bytes(), team.size(), 1);
  if (team.rank() == root) copy(out, at(in, root * bytes), bytes);
  int64_t done = 0;
  do {
    const int64_t now = std::min(most, bytes - done);
    for (int b = 0; team.rank() == root && b < team.size(); ++b)
      if (b != root) copy(team.mine() + b * most, at(in, b * bytes + done), now);
    team.arrive(watch);
    if (team.rank() != root) copy(at(out, done), team.slot(root) + team.rank() * most, now);
    team.next();
    done += now;
  } while (done < bytes);
}

}  // namespace hfreduce::local
