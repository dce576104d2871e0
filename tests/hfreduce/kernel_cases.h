// One call of a kernel over peer memory, drawn at random: what is in each rank's memory before, and what must be there
// after it, by the CPU's arithmetic. For kernels on threads (kernels.cpp) and on GPUs.
#pragma once

#include <cmath>
#include <cstdio>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "collectives/floats.h"
#include "collectives/reduce.h"
#include "cuda/p2p/peers.h"

namespace cases {
using namespace hfreduce;

enum class Kernel {
  packets,
  packets_two_shot,
  reduce_scatter_packets,
  all_gather_packets,
  broadcast_packets,  // the last one of packets
  one_shot,
  two_shot,
  reduce_scatter,
  all_gather,
  broadcast,
  all_to_all
};
constexpr int kKernels = 11, kOfPackets = 5;
constexpr const char* kNames[kKernels] = {
    "packets",   "packets_two_shot", "reduce_scatter_packets", "all_gather_packets", "broadcast_packets",
    "one_shot",  "two_shot",         "reduce_scatter",         "all_gather",         "broadcast",
    "all_to_all"};
constexpr Kind kKinds[kKernels] = {Kind::all_reduce, Kind::all_reduce, Kind::reduce_scatter, Kind::all_gather,
                                   Kind::broadcast,  Kind::all_reduce, Kind::all_reduce,     Kind::reduce_scatter,
                                   Kind::all_gather, Kind::broadcast,  Kind::all_to_all};
constexpr int kDTypes = 12, kOps = 9;

struct Case {
  Kernel kernel;
  DType dtype;
  Op op;
  int64_t count;  // elements of a rank's input, or of a block; all_to_all: the maximum of a range
  int root, in_shift, out_shift;
  bool in_place, wild;  // wild: any bits, including NaNs and infinities
  gpu::Launch launch;
  unsigned seed;

  Kind kind() const { return kKinds[int(kernel)]; }
  bool sums() const { return kind() == Kind::all_reduce || kind() == Kind::reduce_scatter; }
  int64_t bytes() const { return count * size_of(dtype); }
  std::string text() const {
    char line[256];
    std::snprintf(line, sizeof(line),
                  "%s %s %s count %lld root %d shifts %d %d%s%s, %d blocks x %d threads, slot %d, seed %u",
                  kNames[int(kernel)], name(dtype), name(op), static_cast<long long>(count), root, in_shift, out_shift,
                  in_place ? " in place" : "", wild ? " wild" : "", launch.blocks, launch.threads, launch.slot, seed);
    return line;
  }
};

inline unsigned mix(unsigned a, unsigned b, unsigned c) {
  const std::seed_seq seeds{a, b, c};
  unsigned out[1];
  const_cast<std::seed_seq&>(seeds).generate(out, out + 1);
  return out[0];
}

// Bytes from one rank to another.
inline int64_t range(const Case& c, int from, int to) {
  return mix(c.seed, from, 100 + to) % 4 == 0 ? 0 : mix(c.seed, from, to) % (c.bytes() + 1);
}

// A rank's memory: guard, input, guard, output, guard.
struct Memory {
  std::vector<char> bytes;
  int64_t in, out, written;  // where input and output begin, and the length of the output
};

template <class T>
void put_small_numbers(char* to, int64_t count, std::mt19937& random) {
  for (int64_t i = 0; i < count; ++i) {
    const float x = static_cast<float>(static_cast<int>(random() % 257) - 128) / 8;
    T y;
    if constexpr (std::is_arithmetic_v<T>)
      y = static_cast<T>(x);
    else
      store(y, x);
    std::memcpy(to + i * sizeof(T), &y, sizeof(T));
  }
}

inline void fill(const Case& c, char* to, int64_t bytes, int rank) {
  std::mt19937 random(mix(c.seed, rank, 7));
  const int64_t count = bytes / size_of(c.dtype);
  if (!c.wild && c.dtype == DType::f32) return put_small_numbers<float>(to, count, random);
  if (!c.wild && c.dtype == DType::bf16) return put_small_numbers<BFloat16>(to, count, random);
  if (!c.wild && c.dtype == DType::f16) return put_small_numbers<Float16>(to, count, random);
  int64_t i = 0;
  for (; i + 4 <= bytes; i += 4) {
    const uint32_t word = random();
    std::memcpy(to + i, &word, 4);
  }
  for (; i < bytes; ++i) to[i] = static_cast<char>(random());
  if (c.dtype == DType::boolean)
    for (i = 0; i < bytes; ++i) to[i] &= 1;
}

inline std::vector<char> input(const Case& c, int rank, int size) {
  int64_t bytes = c.bytes();
  if (c.kind() == Kind::reduce_scatter) bytes *= size;
  if (c.kind() == Kind::all_to_all) {
    bytes = 0;
    for (int i = 0; i < size; ++i) bytes += range(c, rank, i);
  }
  std::vector<char> in(bytes);
  fill(c, in.data(), bytes, rank);
  return in;
}

inline Memory before(const Case& c, int rank, int size) {
  constexpr int64_t kGuard = 64;
  const std::vector<char> in = input(c, rank, size);
  Memory m;
  m.written = c.bytes() * (c.kind() == Kind::all_gather ? size : 1);
  if (c.kind() == Kind::all_to_all) {
    m.written = 0;
    for (int i = 0; i < size; ++i) m.written += range(c, i, rank);
  }
  const auto rounded = [](int64_t bytes) { return (bytes + 127) / 128 * 128; };
  m.in = kGuard + c.in_shift;
  m.out = 2 * kGuard + rounded(static_cast<int64_t>(in.size()) + m.in) + kGuard + c.out_shift;
  m.bytes.assign(m.out + m.written + 2 * kGuard, static_cast<char>(0xa5));
  if (c.in_place || c.kind() == Kind::broadcast) {
    if (c.kind() == Kind::all_gather)
      m.in = m.out + rank * c.bytes();
    else
      m.out = m.in + (c.kind() == Kind::reduce_scatter ? rank * c.bytes() : 0);
  }
  std::copy(in.begin(), in.end(), m.bytes.begin() + m.in);
  return m;
}

inline double factor(int rank) { return 0.3 + 0.7 * rank; }

inline std::vector<char> after(const Case& c, int rank, int size) {
  Memory m = before(c, rank, size);
  std::vector<std::vector<char>> in;
  for (int i = 0; i < size; ++i) in.push_back(input(c, i, size));
  char* out = m.bytes.data() + m.out;
  if (c.sums()) {
    std::vector<const void*> terms;
    std::vector<double> factors;
    for (int i = 0; i < size; ++i) {
      terms.push_back(in[i].data() + (c.kind() == Kind::reduce_scatter ? rank * c.bytes() : 0));
      factors.push_back(factor(i));
    }
    reduce(out, terms.data(), c.op == Op::premul_sum ? factors.data() : nullptr, size, c.count, c.dtype, c.op,
           c.op == Op::avg ? size : 1);
    return m.bytes;
  }
  if (c.kind() == Kind::broadcast) {
    std::copy(in[c.root].begin(), in[c.root].end(), out);
    return m.bytes;
  }
  for (int i = 0; i < size; ++i) {
    int64_t begin = 0, bytes = c.bytes();
    if (c.kind() == Kind::all_to_all) {
      for (int k = 0; k < rank; ++k) begin += range(c, i, k);
      bytes = range(c, i, rank);
    }
    out = std::copy_n(in[i].begin() + begin, bytes, out);
  }
  return m.bytes;
}

inline void run(const Case& c, const gpu::Links& links, char* memory, const Memory& m, gpu::Stream stream) {
  const int n = links.size, me = links.rank;
  gpu::Launch launch = c.launch;
  launch.stream = stream, launch.slot = std::min(launch.slot, links.slot);
  const char* in = memory + m.in;
  char* out = memory + m.out;
  const Reduction reduction{c.op, factor(me)};
  switch (c.kernel) {
    case Kernel::packets:
      return gpu::all_reduce_packets(links, in, out, c.count, c.dtype, reduction, launch);
    case Kernel::packets_two_shot:
      return gpu::all_reduce_packets_two_shot(links, in, out, c.count, c.dtype, reduction, launch);
    case Kernel::reduce_scatter_packets:
      return gpu::reduce_scatter_packets(links, in, out, c.count, c.dtype, reduction, launch);
    case Kernel::all_gather_packets:
      return gpu::all_gather_packets(links, in, out, c.bytes(), launch);
    case Kernel::broadcast_packets:
      return gpu::broadcast_packets(links, out, c.bytes(), c.root, launch);
    case Kernel::one_shot:
      return gpu::all_reduce_one_shot(links, in, out, c.count, c.dtype, reduction, launch);
    case Kernel::two_shot:
      return gpu::all_reduce(links, in, out, c.count, c.dtype, reduction, launch);
    case Kernel::reduce_scatter:
      return gpu::reduce_scatter(links, in, out, c.count, c.dtype, reduction, launch);
    case Kernel::all_gather:
      return gpu::all_gather(links, in, out, c.bytes(), launch);
    case Kernel::broadcast:
      return gpu::broadcast(links, out, c.bytes(), c.root, launch);
    case Kernel::all_to_all: {
      gpu::Ranges ranges{};
      int64_t most = 0, in_at = 0, out_at = 0;
      for (int i = 0; i < n; ++i) {
        ranges.in_offsets[i] = in_at, in_at += ranges.in_sizes[i] = range(c, me, i);
        ranges.out_offsets[i] = out_at, out_at += ranges.out_sizes[i] = range(c, i, me);
        for (int k = 0; k < n; ++k) most = std::max(most, range(c, i, k));
      }
      return gpu::all_to_all(links, in, out, ranges, most, launch);
    }
  }
}

inline bool is_nan(DType dtype, const char* x) {
  uint16_t half;
  float f32;
  double f64;
  switch (dtype) {
    case DType::f32:
      return std::memcpy(&f32, x, 4), std::isnan(f32);
    case DType::f64:
      return std::memcpy(&f64, x, 8), std::isnan(f64);
    case DType::f16:
      return std::memcpy(&half, x, 2), std::isnan(load(Float16{half}));
    case DType::bf16:
      return std::memcpy(&half, x, 2), std::isnan(load(BFloat16{half}));
    case DType::e4m3:
      return std::isnan(load(E4M3{static_cast<uint8_t>(*x)}));
    case DType::e5m2:
      return std::isnan(load(E5M2{static_cast<uint8_t>(*x)}));
    default:
      return false;
  }
}

// "" if a rank's memory is correct; otherwise where it differs. In sums all NaNs are equal.
inline std::string differences(const Case& c, int rank, int size, const std::vector<char>& got) {
  const Memory m = before(c, rank, size);
  const std::vector<char> want = after(c, rank, size);
  int64_t wrong = 0, first = -1;
  const int64_t unit = size_of(c.dtype);
  const auto look = [&](int64_t at, int64_t bytes, bool element) {
    if (!std::memcmp(&got[at], &want[at], bytes)) return;
    if (element && c.sums() && is_nan(c.dtype, &got[at]) && is_nan(c.dtype, &want[at])) return;
    if (wrong++ == 0) first = at;
  };
  for (int64_t i = 0; i < m.out; ++i) look(i, 1, false);
  for (int64_t i = 0; i < m.written / unit; ++i) look(m.out + i * unit, unit, true);
  for (int64_t i = m.out + m.written / unit * unit; i < static_cast<int64_t>(got.size()); ++i) look(i, 1, false);
  if (!wrong) return "";
  char line[400];
  const bool inside = first >= m.out && first < m.out + m.written;
  std::snprintf(line, sizeof(line), "rank %d of %d: %s: %lld wrong, the first at byte %lld %s:", rank, size,
                c.text().c_str(), static_cast<long long>(wrong), static_cast<long long>(inside ? first - m.out : first),
                inside ? "of the output" : "OUTSIDE the output");
  std::string text = line;
  for (const auto* side : {&got, &want}) {
    text += side == &got ? " got" : " for";
    for (int64_t i = first; i < std::min<int64_t>(first + 8, side->size()); ++i) {
      std::snprintf(line, sizeof(line), " %02x", static_cast<unsigned char>((*side)[i]));
      text += line;
    }
  }
  return text;
}

struct Limits {
  int64_t bytes;
  int blocks, threads, thread_unit;
  int kernels = kKernels;  // kOfPackets: only those of packets
};

inline Case draw(std::mt19937& random, int size, const Limits& limits) {
  const auto below = [&](int64_t n) { return static_cast<int64_t>(random() % static_cast<uint64_t>(n)); };
  Case c{};
  c.kernel = static_cast<Kernel>(below(limits.kernels));
  do {
    c.dtype = static_cast<DType>(below(kDTypes)), c.op = static_cast<Op>(below(kOps));
    if (below(3) == 0) c.dtype = below(2) ? DType::bf16 : DType::f32, c.op = Op::sum;
  } while (!supported(c.dtype, c.op));
  c.count = below(4) ? below(limits.bytes / size_of(c.dtype) + 1) : below(40);
  c.root = static_cast<int>(below(size));
  const int unit = c.kind() == Kind::all_to_all ? 1 : static_cast<int>(size_of(c.dtype));
  if (below(3) == 0) c.in_shift = static_cast<int>(below(16 / unit)) * unit;
  if (below(3) == 0) c.out_shift = static_cast<int>(below(16 / unit)) * unit;
  c.in_place = below(2) && c.kind() != Kind::all_to_all;
  c.wild = below(2);
  c.launch.blocks = static_cast<int>(1 + below(limits.blocks));
  c.launch.threads = static_cast<int>(1 + below(limits.threads / limits.thread_unit)) * limits.thread_unit;
  c.launch.slot = 256 << below(9);
  c.seed = static_cast<unsigned>(random());
  c.launch.fingerprint = c.seed | 1;
  return c;
}

}  // namespace cases
