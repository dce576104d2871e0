// Hosts simulated in one process, for Hosts::carry: the ranks of a rail meet, and the last one combines the data of
// all.
#pragma once

#include <algorithm>
#include <condition_variable>
#include <mutex>
#include <numeric>
#include <stdexcept>
#include <vector>

#include "collectives/host/slots.h"
#include "collectives/reduce.h"
#include "cuda/staged/staged.h"

namespace hfreduce::gpu {

// The number of ranks of each host.
struct World {
  std::vector<int> sizes;

  int hosts() const { return static_cast<int>(sizes.size()); }
  int ranks() const { return first(hosts()); }
  int first(int host) const { return std::accumulate(sizes.begin(), sizes.begin() + host, 0); }  // its first rank
  int host_of(int rank) const {
    int host = 0;
    while (first(host + 1) <= rank) ++host;
    return host;
  }
  int rails() const { return *std::min_element(sizes.begin(), sizes.end()); }
  bool regular() const { return sizes == std::vector<int>(sizes.size(), sizes[0]); }
};

class Network {
 public:
  explicit Network(World world) : world_(std::move(world)), places_(world_.rails() * Hosts::kLanes) {}

  // Implements Hosts::carry for a rank.
  void carry(int host, int rail, const Call& call, int lane, void* data, int64_t count) {
    std::unique_lock lock(mutex_);
    if (cut_) throw std::runtime_error("the network is cut");
    Place& place = places_.at(rail * Hosts::kLanes + lane);
    if (place.parts.empty()) place.parts.resize(world_.hosts()), place.call = call, place.count = count;
    if (!same(place.call, call) || place.count != count || place.parts[host])
      throw std::logic_error("hosts do not carry the same chunk");
    place.parts[host] = static_cast<char*>(data);
    if (++place.come == world_.hosts()) {
      combine(call, place.parts, count);
      place.parts.clear(), place.come = 0, ++place.met;
      return changed_.notify_all();
    }
    const int met = place.met;
    changed_.wait(lock, [&] { return place.met != met || cut_; });
    if (place.met == met) throw std::runtime_error("the network is cut");
  }
  void cut() {
    std::lock_guard lock(mutex_);
    cut_ = true;
    changed_.notify_all();
  }

 private:
  struct Place {
    std::vector<char*> parts;  // by host
    Call call;
    int64_t count = 0;
    int come = 0, met = 0;
  };

  void combine(const Call& call, const std::vector<char*>& parts, int64_t count) const {
    const int n = world_.hosts();
    const int64_t block = count / n * (call.kind == Kind::reduce_scatter ? size_of(call.dtype) : 1);
    const auto sum = [&](char* out, int64_t byte, int64_t count) {
      std::vector<const void*> inputs;
      for (const char* part : parts) inputs.push_back(part + byte);
      const Op op = call.op == Op::premul_sum ? Op::sum : call.op;
      reduce(out, inputs.data(), nullptr, n, count, call.dtype, op, world_.ranks());
    };
    if (call.kind == Kind::all_reduce) sum(parts[0], 0, count);
    for (int h = 0; h < n; ++h) {
      if (call.kind == Kind::all_reduce) copy(parts[h], parts[0], count * size_of(call.dtype));
      if (call.kind == Kind::reduce_scatter) sum(parts[h] + h * block, h * block, count / n);
      if (call.kind == Kind::broadcast) copy(parts[h], parts[world_.host_of(call.root)], count);
      for (int g = 0; g < n && call.kind == Kind::all_gather; ++g)
        copy(parts[h] + g * block, parts[g] + g * block, block);
    }
  }

  const World world_;
  std::vector<Place> places_;  // where the ranks of a rail meet, one for each lane
  std::mutex mutex_;
  std::condition_variable changed_;
  bool cut_ = false;
};

}  // namespace hfreduce::gpu
