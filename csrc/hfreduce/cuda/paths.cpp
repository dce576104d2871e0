#include "cuda/paths.h"

#include <algorithm>
#include <utility>

#include "collectives/reduce.h"
#include "cuda/p2p/peers.h"

namespace hfreduce::gpu {

namespace {

// Bytes that a rank sends in packets, beyond which sending everything to all costs more than a second trip; and, for
// more than two ranks, message bytes up to which two trips of packets are faster than two_shot's steps.
constexpr int64_t kPacketBytes = 512 << 10, kTwoTripBytes = 512 << 10;
// The limit of packets in mapped memory, where each byte crosses PCIe twice, with a flag each time, and polling also
// goes over PCIe: with many pollers, polling saturates the link. Larger messages use slots, up to kMappedLinkBytes over
// a GPU's link in each direction. Beyond, copy engines are used, which take no multiprocessor: DDP's buckets of 25 MiB
// must not slow down the backward. But some hosts' cores add three times as slowly as others', and reduce_scatter by
// copy engines moves n / (n - 1) times the bytes D2H.
constexpr int64_t kMappedBytes = 32 << 10, kMappedLinkBytes = 24 << 20;
// A two_shot block moves at least 16 KiB; with less, its steps cost more than the data. 64 blocks reach 0.95 of the
// bandwidth of 128, which would leave no multiprocessors for the model's kernels: only large messages use 128.
constexpr int64_t kBlockBytes = 16 << 10, kPacketBlockBytes = 4 << 10, kLargeBytes = 64 << 20;
constexpr int kBlocks = 64, kLargeBlocks = 128, kPacketBlocks = 32, kMappedPacketBlocks = 8, kThreads = 512;

bool reduction(Kind kind) { return kind == Kind::all_reduce || kind == Kind::reduce_scatter; }
bool in_blocks(Kind kind) { return kind == Kind::reduce_scatter || kind == Kind::all_gather; }

// The bytes of a message that a rank has for each other rank.
int64_t part(const Means& means, const Message& message) {
  return in_blocks(message.kind) ? message.bytes / means.size : message.bytes;
}

bool takes(Path path, const Means& means, const Message& message) {
  const Kind kind = message.kind;
  const bool ours = kind == Kind::all_gather || kind == Kind::broadcast || reduction(kind);
  const bool sums = !reduction(kind) || supported(message.dtype, message.op);
  switch (path) {
    case Path::packets:
      return means.peers && ours && sums && part(means, message) <= kPackets;
    case Path::packets_two_shot:
      return means.peers && kind == Kind::all_reduce && sums && message.bytes <= packets_two_shot_bytes(means.size);
    case Path::one_shot:
      return means.peers && kind == Kind::all_reduce && sums;
    case Path::two_shot:
      return means.peers && (ours || kind == Kind::all_to_all) && sums;
    case Path::mapped:
      return means.mapped && ours && sums && part(means, message) <= kMapped;
    case Path::mapped_two_shot:
      return means.mapped && (ours || kind == Kind::all_to_all) && sums;
    case Path::staged:
      return means.staged && ours && sums && (means.regular || !in_blocks(kind));
    case Path::copies:
      return means.copies && kind == Kind::all_gather;
    default:
      return path == Path::host;
  }
}

}  // namespace

const char* name(Path path) {
  constexpr const char* names[] = {"packets",         "packets_two_shot", "one_shot", "two_shot", "mapped",
                                   "mapped_two_shot", "assisted",         "copies",   "host",     "automatic"};
  return names[static_cast<int>(path)];
}

std::vector<DeviceRow> rows_of(const std::vector<DeviceRowTuple>& tuples) {
  std::vector<DeviceRow> rows;
  for (const auto& [kind, max_bytes, path, blocks, threads, slot] : tuples)
    rows.push_back({static_cast<Kind>(kind), max_bytes, static_cast<Path>(path), blocks, threads, slot});
  return rows;
}

const DeviceRow* row_of(const std::vector<DeviceRow>& rows, const Means& means, const Message& message) {
  for (const DeviceRow& row : rows) {
    if (row.kind != message.kind || message.bytes > row.max_bytes) continue;
    if (row.path == Path::automatic) return nullptr;
    if (takes(row.path, means, message)) return &row;
  }
  return nullptr;
}

Path path_of(const std::vector<DeviceRow>& rows, const Means& means, const Message& message) {
  if (const DeviceRow* const chosen = row_of(rows, means, message)) return chosen->path;
  const auto [kind, bytes, dtype, op] = message;
  const int64_t n = means.size, sent = part(means, message) * (n - 1);
  const int64_t link = kind == Kind::broadcast    ? bytes  // through slots, in each direction
                       : kind == Kind::all_reduce ? 2 * sent / n
                                                  : bytes / n * (n - 1);
  const std::pair<Path, bool> ways[] = {
      {Path::packets, sent <= kPacketBytes},
      {Path::packets_two_shot, n > 2 && sent <= kTwoTripBytes * (n - 1)},
      {Path::two_shot, true},
      {Path::mapped, sent <= kMappedBytes},
      {Path::mapped_two_shot, link <= kMappedLinkBytes || kind == Kind::reduce_scatter},
      {Path::mapped_two_shot, kind == Kind::all_reduce && !means.cores},
      {Path::staged, true},
      {Path::mapped_two_shot, true}};
  for (const auto& [path, worth] : ways)
    if (worth && takes(path, means, message)) return path;
  return Path::host;
}

Extent extent_of(const std::vector<DeviceRow>& rows, const Means& means, const Message& message, Path path) {
  const DeviceRow* const chosen = row_of(rows, means, message);
  const bool packets = in_packets(path), mapped = in_mapped(path);
  const int limit = path == Path::mapped           ? kMappedPacketBlocks
                    : packets                      ? kPacketBlocks
                    : mapped                       ? kMappedBlocks
                    : message.bytes >= kLargeBytes ? kLargeBlocks
                                                   : kBlocks;
  const int64_t share = packets ? kPacketBlockBytes : kBlockBytes;
  const int64_t all = packets ? part(means, message) : message.bytes;
  Extent extent{static_cast<int>(std::clamp<int64_t>((all + share - 1) / share, 1, limit)), kThreads, kSlot};
  if (chosen && chosen->blocks > 0) extent.blocks = chosen->blocks;
  if (chosen && chosen->threads > 0) extent.threads = std::min<int>(chosen->threads, kMaxThreads) / 32 * 32;
  if (chosen && chosen->slot > 0) extent.slot = std::max(chosen->slot / 256 * 256, 256);
  extent.blocks = std::min(extent.blocks, mapped ? kMappedBlocks : kMaxBlocks);
  extent.slot = std::min(extent.slot, mapped ? kMappedSlot : kSlot);
  return extent;
}

}  // namespace hfreduce::gpu
