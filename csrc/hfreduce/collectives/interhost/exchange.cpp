// Exchange: messages between any pairs of ranks of different hosts, all at the same time, each straight to its
// receiver.
#include "collectives/interhost/between.h"

namespace hfreduce::between {

namespace {

// A message on its way: how much of it has been moved.
template <class End>
struct Moving {
  End end;
  char* data;
  int64_t bytes, done;

  bool finished() { return end.begun() && done == bytes; }
};

template <class End>
void want(std::vector<Moving<End>>& all, Backoff::Wanted& wanted) {
  for (Moving<End>& one : all) {
    if (!one.finished()) one.end.want(wanted);
  }
}

}  // namespace

void exchange(const Rail& rail, const std::vector<Parcel>& out, const std::vector<Parcel>& in) {
  std::vector<Moving<Sender>> senders;
  std::vector<Moving<Receiver>> receivers;
  for (const Parcel& parcel : out)
    senders.push_back({Sender(rail, parcel.rank, 0, parcel.bytes), static_cast<char*>(parcel.data), parcel.bytes, 0});
  for (const Parcel& parcel : in)
    receivers.push_back(
        {Receiver(rail, parcel.rank, 0, parcel.bytes), static_cast<char*>(parcel.data), parcel.bytes, 0});
  Backoff backoff(rail.watch);
  while (true) {
    bool moved = false, finished = true;
    for (Moving<Sender>& one : senders) {
      const int64_t now = one.end.write(one.data + one.done, one.bytes - one.done);
      one.done += now;
      moved |= now > 0;
      finished = one.finished() && finished;
    }
    for (Moving<Receiver>& one : receivers) {
      const int64_t now = one.end.read(one.data + one.done, one.bytes - one.done);
      one.done += now;
      moved |= now > 0;
      finished = one.finished() && finished;
    }
    if (finished) return;
    if (moved)
      backoff.moved();
    else
      backoff.rest([&](Backoff::Wanted& wanted) {
        want(senders, wanted);
        want(receivers, wanted);
      });
  }
}

}  // namespace hfreduce::between
