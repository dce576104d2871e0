#include "collectives/interhost/stages.h"

namespace hfreduce {

Stages::Stages(const Roster& roster, Mesh& mesh, Health& health, const Layout& layout, int streams)
    : roster_(roster),
      health_(health),
      layout_(layout),
      lanes_{{TcpLinks(roster, mesh, 0, streams), {}}, {TcpLinks(roster, mesh, 1, streams), {}}} {}

void Stages::run(int64_t chunks, const Watch& watch, const Inside& first, const Between& second, const Inside& last) {
  const bool on_rail = !layout_.rail.empty();
  const between::Rail rails[kLanes] = {rail(watch, 0), rail(watch, 1)};
  if (chunks == 1) {
    first(0);
    if (on_rail) second(0, rails[0]);
    return last(0);
  }
  try {
    for (int64_t c = 0; c < chunks + kUnderWay - 1; ++c) {
      if (c < chunks) {
        first(c);
        if (on_rail) lanes_[c % kLanes].thread.submit([&, c] { second(c, rails[c % kLanes]); });
      }
      const int64_t done = c - (kUnderWay - 1);
      if (done < 0) continue;
      if (on_rail) lanes_[done % kLanes].thread.wait();
      last(done);
    }
  } catch (const Fault& fault) {
    fail(fault);
    throw;
  } catch (const std::exception& error) {
    fail(Fault(Fault::Cause::aborted, {roster_.rank}, roster_.me().name() + " failed: " + error.what()));
    throw;
  }
}

// Ends what is under way, which uses what the caller is about to leave.
void Stages::fail(const Fault& fault) {
  health_.fail(fault);
  for (Lane& lane : lanes_) lane.thread.stop();
}

}  // namespace hfreduce
