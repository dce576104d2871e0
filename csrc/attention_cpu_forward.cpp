// Forward of attention on the CPU. A block of queries visits its keys with a running maximum and sum, as in Milakov and
// Gimelshein, "Online normalizer calculation for softmax" (2018), and Dao et al., "FlashAttention" (NeurIPS 2022).
#include "attention_cpu.h"

namespace hfnn::attention {

namespace {
template <class W>
struct Block {  // of queries: scores, and running results
  const Call& call;
  const Sequence& s;
  Range in;
  W *q, *keys, *turned, *scores, *o, *largest, *sum, *alike;
};
}  // namespace

// Turns a row of u into scores, then into exp(score - maximum) times dropout's 0 or 1. Rescales the row's running
// results to the new maximum.
template <class W>
HFNN_INLINE void soften(const Block<W>& block, const Tile& t, bool bits, int64_t row) {
  const int64_t n = padded(t.keys);
  W *s = block.scores + row * kBlock, &largest = block.largest[row];
  score(block.call, t, block.in, bits, row, s, static_cast<W*>(nullptr));
  W lanes[16];
  for (int l = 0; l < 16; ++l) lanes[l] = s[l];
  for (int64_t j = 16; j < n; j += 16)
    for (int l = 0; l < 16; ++l) lanes[l] = s[j + l] > lanes[l] ? s[j + l] : lanes[l];
  W most = largest;
  for (int l = 0; l < 16; ++l) most = lanes[l] > most ? lanes[l] : most;
  const W base = std::isinf(most) && most < 0 ? 0 : most;  // no key so far: every term is 0
  for (int64_t j = 0; j < n; ++j) s[j] = exp_negative(s[j] - base);
  W sums[16] = {};
  for (int64_t j = 0; j < n; j += 16)
    for (int l = 0; l < 16; ++l) sums[l] += s[j + l];
  for (int half = 8; half; half /= 2)
    for (int l = 0; l < half; ++l) sums[l] += sums[l + half];
  if (most != largest) {
    const W shrink = exp_negative(largest - base);
    W* o = block.o + row * padded(block.call.E);
    for (int64_t e = 0; e < padded(block.call.E); ++e) o[e] *= shrink;
    block.sum[row] *= shrink;
    largest = most;
  }
  block.sum[row] += sums[0];
  if (!block.call.threshold) return;
  uint16_t random[kBlock];
  draw(block.call, t.b, t.h, block.s.q + t.i + row, t.j, random);
  const uint16_t threshold = uint16_t(block.call.threshold);
  for (int64_t j = 0; j < n; ++j) s[j] = random[j] >= threshold ? s[j] : 0;
}

HFNN_CLONES static void soften_rows(const Block<float>& block, const Tile& t, bool bits) {
  for (int64_t row = 0; row < t.rows; ++row) soften(block, t, bits, row);
}
HFNN_CLONES static void soften_rows(const Block<double>& block, const Tile& t, bool bits) {
  for (int64_t row = 0; row < t.rows; ++row) soften(block, t, bits, row);
}

template <class W>
static void visit(const Block<W>& block, const Tile& t) {
  const Call& call = block.call;
  const int kind = state(call, t);
  if (kind == 0) return;
  const int64_t D = padded(call.D), E = padded(call.E), g = t.h / (call.H / call.G);
  load_keys(call.k, block.s, block.in, t.b, g, t.j, t.keys, block.keys);
  transpose(block.keys, t.keys, call.D, block.turned);
  multiply(block.scores, kBlock, block.q, {D, 1}, block.turned, kBlock, t.rows, padded(t.keys), call.D, false);
  soften_rows(block, t, kind != 2);
  load_keys(call.v, block.s, block.in, t.b, g, t.j, t.keys, block.keys);
  multiply(block.o, E, block.scores, {kBlock, 1}, block.keys, E, t.rows, E, t.keys, true);
}

template <class W>
static bool sees_none(W lse) {
  return std::isinf(lse) && lse < 0;
}

// The queries of `uniform` that see no key: each weighs all keys alike. Without dropout, one row serves all of them.
template <class W>
static void weigh_alike(const Block<W>& block, int64_t b, int64_t h, int64_t i, int64_t rows) {
  const Call& call = block.call;
  const int64_t E = padded(call.E), g = h / (call.H / call.G);
  int64_t blind[kBlock], n = 0;
  for (int64_t row = 0; row < rows; ++row)
    if (sees_none(block.largest[row])) blind[n++] = row;
  const int64_t different = call.threshold ? n : std::min<int64_t>(n, 1);
  if (!n || !call.S) return;
  std::fill_n(block.alike, different * E, W(0));
  for_blocks({0, call.S}, call.S, [&](int64_t j, int64_t keys) {
    load_keys(call.v, block.s, {0, call.S}, b, g, j, keys, block.keys);
    for (int64_t r = 0; r < different; ++r) {
      W* weights = block.scores + r * kBlock;
      std::fill_n(weights, kBlock, W(1));
      if (!call.threshold) continue;
      uint16_t random[kBlock];
      draw(call, b, h, i + blind[r], j, random);
      for (int64_t k = 0; k < keys; ++k) weights[k] = int64_t(random[k]) >= call.threshold ? 1 : 0;
    }
    multiply(block.alike, E, block.scores, {kBlock, 1}, block.keys, E, different, E, keys, true);
  });
  for (int64_t r = 0; r < n; ++r) {
    std::copy_n(block.alike + std::min(r, different - 1) * E, E, block.o + blind[r] * E);
    block.sum[blind[r]] = W(call.S);
  }
}

// Adds the sink to the sum, and writes the block's rows.
template <class W>
static void finish(const Block<W>& block, const Out& out, int64_t b, int64_t h, int64_t i, int64_t rows) {
  const Call& call = block.call;
  const int64_t first = (b * call.H + h) * call.T + block.s.q + i;
  W *lse = out.lse.as<W>() + first, *sums = out.sums ? out.sums.as<W>() + first : nullptr;
  const int64_t base = b * out.o.strides[0] + h * out.o.strides[1];
  for (int64_t row = 0; row < rows; ++row) {
    W largest = block.largest[row], sum = block.sum[row], shrink = 1;
    if (out.sinks) {
      const W sink = W(out.sinks.as<float>()[h]);
      if (sink > largest) {
        shrink = std::exp(largest - sink);
        largest = sink;
      }
      if (!std::isinf(sink) || sink > 0) sum = sum * shrink + std::exp(sink - largest);
    }
    const bool none = sees_none(largest);
    lse[row] = none || sums ? largest : largest + std::log(sum);
    if (sums) sums[row] = none ? 1 : sum;
    const W factor = sum == 0 ? W(0) : shrink / sum * W(call.kept());
    store_row(out.o, base + (block.s.q + i + row) * out.o.strides[2], call.E, factor, block.o + row * padded(call.E));
  }
}

template <class W>
static void forward(const Call& call, const Out& out, const Sequence& s, Scratch& scratch, int64_t b, int64_t h,
                    int64_t i, int64_t rows) {
  const int64_t D = padded(call.D), E = padded(call.E);
  Block<W> block{call, s, bounds(call, s, b), nullptr, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr};
  block.q = scratch.take<W>(kBlock * D);
  block.keys = scratch.take<W>(kBlock * std::max(D, E));
  block.turned = scratch.take<W>(kBlock * D);
  block.scores = scratch.take<W>(kBlock * kBlock);
  block.o = scratch.take<W>(kBlock * E);
  block.largest = scratch.take<W>(kBlock);
  block.sum = scratch.take<W>(kBlock);
  if (call.uniform) block.alike = scratch.take<W>(kBlock * E);
  load_rows(call.q, b, h, s.q + i, rows, call.factor(), block.q);
  std::fill_n(block.o, rows * E, W(0));
  std::fill_n(block.sum, rows, W(0));
  std::fill_n(block.largest, rows, -std::numeric_limits<W>::infinity());
  for_blocks(keys_of(call, block.in, i, rows), s.keys,
             [&](int64_t j, int64_t keys) { visit(block, {b, h, i, rows, j, keys}); });
  if (call.uniform && !out.sinks) weigh_alike(block, b, h, i, rows);
  finish(block, out, b, h, i, rows);
}

int64_t forward_scratch(const Call& call) {
  const int64_t D = padded(call.D), E = padded(call.E);
  return kBlock * (2 * D + std::max(D, E) + kBlock + E + 2 + (call.uniform ? E : 0));
}

void forward_block(const Call& call, const Out& out, const Sequence& s, Scratch& scratch, int64_t b, int64_t h,
                   int64_t i, int64_t rows) {
  with_wide(call.q.dtype, [&](auto wide) { forward<decltype(wide)>(call, out, s, scratch, b, h, i, rows); });
}

}  // namespace hfnn::attention
