#include "collectives/interhost/between.h"

#include "diagnostics/mismatch.h"

namespace hfreduce::between {

Sender::Sender(const Rail& rail, int rank, int channel, int64_t bytes)
    : stream_(rail.links.to(rank, channel, rail.watch)), header_{rail.watch.call, bytes}, rank_(rank) {
  begun();
}

bool Sender::begun() {
  while (sent_ < sizeof(Header)) {
    const size_t now = stream_.write(reinterpret_cast<const char*>(&header_) + sent_, sizeof(Header) - sent_);
    if (now == 0) return false;
    sent_ += now;
  }
  return true;
}

int64_t Sender::write(const void* data, int64_t bytes) {
  return begun() && bytes > 0 ? static_cast<int64_t>(stream_.write(data, bytes)) : 0;
}

void Sender::want(Backoff::Wanted& wanted) const { wanted.add(stream_, rank_); }

bool Receiver::begun() {
  if (!stream_) stream_ = rail_.links.from(rank_, channel_, rail_.watch);
  while (stream_ && got_ < sizeof(Header)) {
    const size_t now = stream_->read(reinterpret_cast<char*>(&header_) + got_, sizeof(Header) - got_);
    if (now == 0) return false;
    got_ += now;
    if (got_ == sizeof(Header)) compare();
  }
  return got_ == sizeof(Header);
}

void Receiver::want(Backoff::Wanted& wanted) const {
  if (stream_)
    wanted.add(*stream_, rank_);
  else
    wanted.add(rank_);
}

int64_t Receiver::read(void* data, int64_t bytes) {
  return begun() && bytes > 0 ? static_cast<int64_t>(stream_->read(data, bytes)) : 0;
}

void Receiver::compare() const {
  const Links& links = rail_.links;
  const Call& mine = rail_.watch.call;
  const int me = links.rank();
  if (!same(header_.call, mine)) {
    if (me < rank_) throw mismatch({me, rank_}, {links.name(me), links.name(rank_)}, {mine, header_.call});
    throw mismatch({rank_, me}, {links.name(rank_), links.name(me)}, {header_.call, mine});
  }
  if (header_.bytes != bytes_)
    throw Fault(Fault::Cause::mismatch, {rank_, me},
                told(mine) + ": " + links.name(rank_) + " sends " + std::to_string(header_.bytes) + " bytes to " +
                    links.name(me) + ", which expects " + std::to_string(bytes_) + ".");
}

void all_reduce(Between how, const Rail& rail, void* data, int64_t count, const Sum& sum) {
  if (how == Between::tree) return tree_all_reduce(rail, data, count, sum);
  (how == Between::ring ? ring : direct)(rail, data, count, sum, Part::both);
}

void half(Between how, const Rail& rail, void* data, int64_t count, const Sum& sum, Part part) {
  (how == Between::ring ? ring : direct)(rail, data, count, sum, part);
}

}  // namespace hfreduce::between
