// Which path a collective on device memory takes, and with how many blocks: a function of what the ranks have, and of
// what was measured.
#pragma once

#include <tuple>
#include <type_traits>
#include <vector>

#include "types.h"

namespace hfreduce::gpu {

// Kernels over peer memory, in small messages' packets or through slots, of one trip over the link or two (peers.h;
// what is no all_reduce is packets or two_shot); mapped and mapped_two_shot: packets, and two_shot, in pinned memory of
// the host; the host-staged reduction; copies: all_gather by copy engines (copies.h), where a row says so; or copied to
// the host, and back. automatic: in a DeviceRow, the default.
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

// What messages of `kind` up to `max_bytes` do. Without rows, or beyond them, there are defaults.
struct DeviceRow {
  Kind kind;
  int64_t max_bytes;  // as Plan::choose counts them
  Path path;
  int32_t blocks, threads, slot;  // of the launch; 0: the default
};
static_assert(std::is_trivially_copyable_v<DeviceRow>);               // it is sent to other ranks as it is
using DeviceRowTuple = std::tuple<int, int64_t, int, int, int, int>;  // the same, as Python has it
std::vector<DeviceRow> rows_of(const std::vector<DeviceRowTuple>&);

// A collective of `bytes` as Plan::choose counts them (all_to_all of parts of several sizes: 0).
struct Message {
  Kind kind;
  int64_t bytes;
  DType dtype = DType::f32;
  Op op = Op::sum;
};

// Bytes a second of HostStaged::rate from which the cores do not hold up the copies.
constexpr double kCoreRate = 20e9;

// What the ranks have.
struct Means {
  int size = 1;  // ranks
  bool peers = false, mapped = false, staged = false, copies = false;
  bool regular = true;  // whether hosts have equally many ranks, one after another
  bool cores = true;    // whether the host's cores add as fast as copies bring (kCoreRate)
};

// The first row that says something of the message, if its path takes it; nullptr: the default.
const DeviceRow* row_of(const std::vector<DeviceRow>&, const Means&, const Message&);
Path path_of(const std::vector<DeviceRow>&, const Means&, const Message&);

// Of a kernel's launch: peers.h.
struct Extent {
  int blocks, threads, slot;
};
Extent extent_of(const std::vector<DeviceRow>&, const Means&, const Message&, Path);

}  // namespace hfreduce::gpu
