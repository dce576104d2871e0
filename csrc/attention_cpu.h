// Shared by the passes of attention on the CPU: the call, its blocks, rows in the dtype of the arithmetic, and scores.
//
// Queries and keys are processed in blocks of kBlock, counted from the start of their sequence. A row of a score tile
// belongs to one query and vectorises over keys. Blocks and the order of sums depend only on shapes, so neither threads
// nor neighbours in a batch change a bit.
#pragma once
#include <atomic>
#include <limits>
#include <vector>

#include "attention.h"
#include "exp_cpu.h"
#include "philox.h"

namespace hfnn::attention {

constexpr int64_t kBlock = 128;  // queries and keys: the tile size of `tiles`

constexpr int64_t up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }
HFNN_INLINE int64_t padded(int64_t n) { return up(n, 16); }  // rows in scratch memory are whole 64-byte vectors

struct Call {
  Tensor q, k, v, bits, tiles, bias, slopes, bounds, starts_q, starts_k;
  double scale = 1, softcap = 0;
  int64_t left = -1, right = -1, shift = 0, threshold = 0;
  bool uniform = false;
  uint64_t seed = 0, offset = 0;
  int64_t B = 0, H = 0, G = 0, T = 0, S = 0, D = 0, E = 0, threads = 1;
  double kept() const { return 1 / (1 - double(threshold) / 65536); }
  double factor() const { return softcap > 0 ? scale / softcap : scale; }  // applied to q in scratch memory
};

// Queries and keys that see each other: one sequence of starts_q and starts_k, or all.
struct Sequence {
  int64_t q, queries, k, keys;  // first and number
};
inline int64_t sequences(const Call& call) { return call.starts_q ? call.starts_q.shape[0] - 1 : 1; }
HFNN_INLINE Sequence sequence(const Call& call, int64_t n) {
  if (!call.starts_q) return {0, call.T, 0, call.S};
  const int32_t *q = call.starts_q.as<int32_t>() + n, *k = call.starts_k.as<int32_t>() + n;
  return {q[0], q[1] - q[0], k[0], k[1] - k[0]};
}

// Rows of queries times columns of keys. i and j count from the start of the sequence.
struct Tile {
  int64_t b, h, i, rows, j, keys;
};

struct Range {
  int64_t begin, end;
};
// The existing keys of a batch element.
HFNN_INLINE Range bounds(const Call& call, const Sequence& s, int64_t b) {
  if (!call.bounds) return {0, s.keys};
  const int32_t* pair = call.bounds.as<int32_t>() + 2 * b;
  return {std::max<int64_t>(pair[0], 0), std::min<int64_t>(pair[1], s.keys)};
}
// Keys seen by any of `rows` queries from i on, and queries that see any of `keys` keys from j on.
HFNN_INLINE Range keys_of(const Call& call, const Range& in, int64_t i, int64_t rows) {
  const int64_t at = i + call.shift;
  return {call.left < 0 ? in.begin : std::max(in.begin, at - call.left),
          call.right < 0 ? in.end : std::min(in.end, at + rows + call.right)};
}
HFNN_INLINE Range queries_of(const Call& call, int64_t queries, int64_t j, int64_t keys) {
  return {call.right < 0 ? 0 : std::max<int64_t>(0, j - call.shift - call.right),
          call.left < 0 ? queries : std::min(queries, j - call.shift + keys + call.left)};
}
// body(begin, length) for the blocks of kBlock that `range` touches, each cut off at `size`.
template <class Body>
HFNN_INLINE void for_blocks(const Range& range, int64_t size, Body body) {
  for (int64_t i = std::max<int64_t>(range.begin, 0) / kBlock * kBlock; i < range.end; i += kBlock)
    body(i, std::min(kBlock, size - i));
}

// The entry of a tile in `tiles`: 0 to skip it, 2 if no bits need to be read.
HFNN_INLINE int state(const Call& call, const Tile& t) {
  if (!call.tiles) return 2;
  const int64_t* s = call.tiles.strides;
  return call.tiles.as<uint8_t>()[t.b * s[0] + t.h * s[1] + t.i / kBlock * s[2] + t.j / kBlock * s[3]];
}

// Rows [begin, begin + rows) of head (b, h) of a tensor with n columns, times `factor`, each padded with zeros to
// padded(n); and back. In attention_cpu.cpp.
void load_rows(const Tensor& t, int64_t b, int64_t h, int64_t begin, int64_t rows, double factor, float* out);
void load_rows(const Tensor& t, int64_t b, int64_t h, int64_t begin, int64_t rows, double factor, double* out);
void store_rows(const Tensor& t, int64_t b, int64_t h, int64_t begin, int64_t rows, double factor, float* in);
void store_rows(const Tensor& t, int64_t b, int64_t h, int64_t begin, int64_t rows, double factor, double* in);
// One row, at the offset `at`.
void store_row(const Tensor& t, int64_t at, int64_t n, float factor, float* in);
void store_row(const Tensor& t, int64_t at, int64_t n, double factor, double* in);

// The same for a block of keys. Rows that do not exist become zeros: their memory may hold anything.
template <class W>
void load_keys(const Tensor& t, const Sequence& s, const Range& in, int64_t b, int64_t g, int64_t j, int64_t keys,
               W* out) {
  const int64_t first = std::min(std::max(in.begin - j, int64_t(0)), keys), n = padded(t.shape[3]);
  const int64_t last = std::max(std::min(in.end - j, keys), first);
  std::fill_n(out, first * n, W(0));
  load_rows(t, b, g, s.k + j + first, last - first, 1, out + first * n);
  std::fill_n(out + last * n, (keys - last) * n, W(0));
}

// c (M, N) = a (M, K) b (K, N), or c += that, each sum in the order of K. N and both row strides are multiples of 16; a
// has any strides. In attention_cpu.cpp.
struct Matrix {
  int64_t row, column;  // strides
};
void multiply(float* c, int64_t c_row, const float* a, Matrix strides, const float* b, int64_t b_row, int64_t M,
              int64_t N, int64_t K, bool add);
void multiply(double* c, int64_t c_row, const double* a, Matrix strides, const double* b, int64_t b_row, int64_t M,
              int64_t N, int64_t K, bool add);
// out (n padded, kBlock): the transpose of in (rows, n padded). Missing rows count as zeros.
void transpose(const float* in, int64_t rows, int64_t n, float* out);
void transpose(const double* in, int64_t rows, int64_t n, double* out);

// The random numbers of query i (counted over all of T) and kBlock keys from j on.
HFNN_INLINE void draw(const Call& call, int64_t b, int64_t h, int64_t i, int64_t j, uint16_t* out) {
  const uint64_t counter = call.offset + uint64_t((b * call.H + h) * call.T + i) * uint64_t((call.S + 7) / 8) + j / 8;
  const uint32_t low = uint32_t(call.seed), high = uint32_t(call.seed >> 32);
  uint32_t words[kBlock / 2];
  for (int n = 0; n < kBlock / 8; ++n) {
    const uint64_t c = counter + n;
    const Words four = philox({uint32_t(c), uint32_t(c >> 32), 0u, 0x68666e61u}, low, high);
    words[4 * n] = four.a;
    words[4 * n + 1] = four.b;
    words[4 * n + 2] = four.c;
    words[4 * n + 3] = four.d;
  }
  for (int n = 0; n < kBlock / 2; ++n) {
    out[2 * n] = uint16_t(words[n]);
    out[2 * n + 1] = uint16_t(words[n] >> 16);
  }
}

template <class W>
HFNN_INLINE void add_bias(const Call& call, const Tile& t, int64_t row, W* s) {
  const int64_t* strides = call.bias.strides;
  const int64_t at = t.b * strides[0] + t.h * strides[1] + (t.i + row) * strides[2] + t.j * strides[3];
  const int64_t step = strides[3];
  with_dtype(call.bias.dtype, [&](auto stored) HFNN_FLAT {
    const auto* bias = call.bias.as<decltype(stored)>() + at;
    if (step == 1)
      for (int64_t j = 0; j < t.keys; ++j) s[j] += W(load(bias[j]));
    else
      for (int64_t j = 0; j < t.keys; ++j) s[j] += W(load(bias[j * step]));
  });
}

// Sets pairs that do not count to -inf.
template <class W>
HFNN_INLINE void mask(const Call& call, const Tile& t, const Range& in, bool bits, int64_t row, W* s) {
  constexpr W kNone = -std::numeric_limits<W>::infinity();
  const Range keys = keys_of(call, in, t.i + row, 1);
  const int64_t n = padded(t.keys), end = std::max(std::min(keys.end - t.j, t.keys), int64_t(0));
  for (int64_t j = 0; j < std::min(keys.begin - t.j, n); ++j) s[j] = kNone;
  for (int64_t j = end; j < n; ++j) s[j] = kNone;
  if (!bits) return;
  const int64_t* strides = call.bits.strides;
  const uint8_t* byte = call.bits.as<uint8_t>() + t.b * strides[0] + t.h * strides[1] + (t.i + row) * strides[2];
  for (int64_t j = 0; j < t.keys; j += 8) {
    const uint32_t eight = byte[(t.j + j) / 8 * strides[3]];
    for (int l = 0; l < 8; ++l) s[j + l] = eight >> l & 1 ? s[j + l] : kNone;
  }
}

// Turns a row of u / softcap (u without softcap) into scores. `capped`, if given, keeps the tanh for backward.
template <class W>
HFNN_INLINE void score(const Call& call, const Tile& t, const Range& in, bool bits, int64_t row, W* s, W* capped) {
  const int64_t n = padded(t.keys);
  if (call.softcap > 0) {
    const W softcap = W(call.softcap);
    for (int64_t j = 0; j < n; ++j) s[j] = tanh_of(s[j]);
    if (capped) std::copy_n(s, n, capped);
    for (int64_t j = 0; j < n; ++j) s[j] *= softcap;
  }
  if (call.bias) add_bias(call, t, row, s);
  if (call.slopes) {
    const W slope = W(call.slopes.as<float>()[t.b * call.slopes.strides[0] + t.h * call.slopes.strides[1]]);
    const int32_t distance = int32_t(t.i + row + call.shift - t.j);
    for (int32_t j = 0; j < int32_t(n); ++j) s[j] -= slope * W(std::abs(distance - j));
  }
  mask(call, t, in, bits, row, s);
}

// Memory of one thread, handed out in pieces aligned to 64 bytes.
class Scratch {
 public:
  explicit Scratch(int64_t bytes) : memory_(new char[bytes + 2048]) {}
  template <class W>
  W* take(int64_t elements) {
    next_ = up(next_ + int64_t(reinterpret_cast<uintptr_t>(memory_.get()) % 64), 64) -
            int64_t(reinterpret_cast<uintptr_t>(memory_.get()) % 64);
    W* begin = reinterpret_cast<W*>(memory_.get() + next_);
    next_ += elements * int64_t(sizeof(W));
    return begin;
  }
  int64_t mark() const { return next_; }
  void rewind(int64_t mark) { next_ = mark; }

 private:
  std::unique_ptr<char[]> memory_;
  int64_t next_ = 0;
};

// What a pass writes, and what it reads from forward.
struct Out {
  Tensor o, lse, sums, sinks;
};
struct Grads {
  Tensor lse, sums, dout, delta, dq, dk, dv, dbias;
};
// The elements of scratch memory that a pass needs, and the pass for one work item. In attention_cpu_forward.cpp:
// `rows` queries from i on.
int64_t forward_scratch(const Call& call);
void forward_block(const Call& call, const Out& out, const Sequence& s, Scratch& scratch, int64_t b, int64_t h,
                   int64_t i, int64_t rows);
// In attention_cpu_backward.cpp: dq of `rows` queries; dk and dv of some keys; all three of a sequence and a key head,
// with five products instead of seven; dbias of a tile, summed over dimensions of size 1.
int64_t backward_scratch(const Call& call, int64_t longest);
void dq_block(const Call& call, const Grads& grads, const Sequence& s, Scratch& scratch, int64_t b, int64_t h,
              int64_t i, int64_t rows);
void dkv_block(const Call& call, const Grads& grads, const Sequence& s, Scratch& scratch, int64_t b, int64_t g,
               int64_t j, int64_t keys);
void whole_head(const Call& call, const Grads& grads, const Sequence& s, Scratch& scratch, int64_t b, int64_t g);
void dbias_tile(const Call& call, const Grads& grads, Scratch& scratch, int64_t b, int64_t h, int64_t i, int64_t j);

// body(item, scratch memory of the thread) for every item, in any order. Threads take the next item when they are free,
// because windows and ragged batches make items unequal.
template <class Body>
void share(const Call& call, int64_t items, int64_t elements, Body body) {
  const int64_t pairs = call.B * call.H * call.T * call.S;
  const int64_t parts = pairs < 4096 ? 1 : std::max<int64_t>(1, std::min(call.threads, items));
  const int64_t bytes = elements * int64_t(call.q.dtype == Dtype::float64 ? sizeof(double) : sizeof(float));
  std::vector<Scratch> scratch;
  for (int64_t part = 0; part < parts; ++part) scratch.emplace_back(bytes);
  std::atomic<int64_t> next{0};
  split(parts, pairs * 8, parts, [&](int64_t begin, int64_t end) {
    for (int64_t part = begin; part < end; ++part)
      for (int64_t item = next++; item < items; item = next++) {
        scratch[part].rewind(0);
        body(item, scratch[part]);
      }
  });
}

}  // namespace hfnn::attention
