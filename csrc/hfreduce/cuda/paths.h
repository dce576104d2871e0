// Chooses the path of a collective on device memory and the number of blocks, from what the ranks have and what was
// measured.
#pragma once

#include <tuple>
#include <type_traits>
#include <vector>

#include "types.h"

namespace hfreduce::gpu {

// Kernels over peer memory: small messages as packets, others through slots, in one trip over the link or two (peers.h;
// collectives other than all_reduce: packets or two_shot). mapped, mapped_two_shot: packets and two_shot in pinned host
// memory. staged: the host-staged reduction. copies: all_gather by copy engines (copies.h), if a row asks for it. host:
// copied to the host and back. automatic: in a DeviceRow, the default.
enum class Path : uint8_t {
  packets,
  packets_two_shot,
  one_shot,
  two_shot,
  mapped,
  mapped_two_shot,
  staged,
  copies,
  host,
  automatic
};
const char* name(Path);

inline bool in_packets(Path path) { return path <= Path::packets_two_shot || path == Path::mapped; }
inline bool in_mapped(Path path) { return path == Path::mapped || path == Path::mapped_two_shot; }

// The path of messages of `kind` of up to `max_bytes`. Messages that no row covers use the defaults.
struct DeviceRow {
  Kind kind;
  int64_t max_bytes;  // as Plan::choose counts them
  Path path;
  int32_t blocks, threads, slot;  // of the launch; 0: the default
};
static_assert(std::is_trivially_copyable_v<DeviceRow>);               // sent to other ranks as raw bytes
using DeviceRowTuple = std::tuple<int, int64_t, int, int, int, int>;  // the same, for Python
std::vector<DeviceRow> rows_of(const std::vector<DeviceRowTuple>&);

// A collective, with its bytes as Plan::choose counts them (all_to_all with parts of different sizes: 0).
struct Message {
  Kind kind;
  int64_t bytes;
  DType dtype = DType::f32;
  Op op = Op::sum;
};

// Minimum of HostStaged::rate, in bytes/s, at which the cores do not slow down the copies.
constexpr double kCoreRate = 20e9;

// What the ranks can use.
struct Means {
  int size = 1;  // ranks
  bool peers = false, mapped = false, staged = false, copies = false;
  bool regular = true;  // whether hosts have equally many ranks, with consecutive numbers
  bool cores = true;    // whether the host's cores add as fast as copies arrive (kCoreRate)
};

// The first row for this message, if its path supports it; nullptr: use the default.
const DeviceRow* row_of(const std::vector<DeviceRow>&, const Means&, const Message&);
Path path_of(const std::vector<DeviceRow>&, const Means&, const Message&);

// Of a kernel's launch: see peers.h.
struct Extent {
  int blocks, threads, slot;
};
Extent extent_of(const std::vector<DeviceRow>&, const Means&, const Message&, Path);

}  // namespace hfreduce::gpu
