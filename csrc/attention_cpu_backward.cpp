// Backward of attention on the CPU. Probabilities are recomputed from lse, tile by tile, as in Dao et al.,
// "FlashAttention" (NeurIPS 2022). Every sum is over tiles in ascending order, so all passes give the same bits.
#include "attention_cpu.h"

namespace hfnn::attention {

namespace {
template <class W>
struct Queries {  // of queries: q times factor(), and dout
  W *q, *dout;
};
template <class W>
struct Keys {  // of keys: k, and the transposes of k and v
  W *k, *k_turned, *v_turned;
};
template <class W>
struct Pass {
  const Call& call;
  const Grads& grads;
  const Sequence& s;
  Range in;
  W *p, *du, *spare;  // tiles p m and du; a block of rows of v

  Pass(const Call& call_, const Grads& grads_, const Sequence& s_, Scratch& scratch, int64_t b)
      : call(call_), grads(grads_), s(s_), in(bounds(call_, s_, b)) {
    p = scratch.take<W>(kBlock * kBlock);
    du = scratch.take<W>(kBlock * kBlock);
    spare = scratch.take<W>(kBlock * padded(call.E));
  }
  Queries<W> queries(Scratch& scratch) const {
    W* q = scratch.take<W>(kBlock * padded(call.D));
    return {q, scratch.take<W>(kBlock * padded(call.E))};
  }
  Keys<W> keys(Scratch& scratch) const {
    W *k = scratch.take<W>(kBlock * padded(call.D)), *k_turned = scratch.take<W>(kBlock * padded(call.D));
    return {k, k_turned, scratch.take<W>(kBlock * padded(call.E))};
  }
};
}  // namespace

template <class W>
static void load(const Pass<W>& pass, const Queries<W>& queries, int64_t b, int64_t h, int64_t i, int64_t rows) {
  load_rows(pass.call.q, b, h, pass.s.q + i, rows, pass.call.factor(), queries.q);
  load_rows(pass.grads.dout, b, h, pass.s.q + i, rows, 1, queries.dout);
}
template <class W>
static void load(const Pass<W>& pass, const Keys<W>& block, int64_t b, int64_t g, int64_t j, int64_t keys) {
  const Range in = pass.call.uniform ? Range{0, pass.s.keys} : pass.in;
  load_keys(pass.call.k, pass.s, in, b, g, j, keys, block.k);
  transpose(block.k, keys, pass.call.D, block.k_turned);
  load_keys(pass.call.v, pass.s, in, b, g, j, keys, pass.spare);
  transpose(pass.spare, keys, pass.call.E, block.v_turned);
}

// Turns a row of u and one of do . v into p m and du (for dbias: ds, without the softcap's factor).
template <class W>
HFNN_INLINE void grad_row(const Pass<W>& pass, const Tile& t, bool bits, bool for_bias, int64_t row) {
  const Call& call = pass.call;
  const int64_t n = padded(t.keys), at = (t.b * call.H + t.h) * call.T + pass.s.q + t.i + row;
  W *p = pass.p + row * kBlock, *du = pass.du + row * kBlock, capped[kBlock];
  const W lse = pass.grads.lse.template as<W>()[at], delta = pass.grads.delta.template as<W>()[at];
  const bool blind = std::isinf(lse) && lse < 0;  // a query without keys
  const W base = blind ? 0 : lse, share = call.bias ? 1 / pass.grads.sums.template as<W>()[at] : W(1);
  score(call, t, pass.in, bits, row, p, for_bias ? nullptr : capped);
  for (int64_t j = 0; j < n; ++j) p[j] = exp_negative(p[j] - base) * share;
  if (blind && call.uniform && !for_bias) std::fill_n(p, t.keys, W(1) / W(call.S));
  if (call.threshold) {
    const W kept = W(call.kept());
    const uint16_t threshold = uint16_t(call.threshold);
    uint16_t random[kBlock];
    draw(call, t.b, t.h, pass.s.q + t.i + row, t.j, random);
    for (int64_t j = 0; j < n; ++j) {
      const W m = random[j] >= threshold ? kept : 0;
      du[j] = p[j] * (m * du[j] - delta);
      p[j] *= m;
    }
  } else {
    for (int64_t j = 0; j < n; ++j) du[j] = p[j] * (du[j] - delta);
  }
  if (call.softcap > 0 && !for_bias)
    for (int64_t j = 0; j < n; ++j) du[j] *= 1 - capped[j] * capped[j];
}

HFNN_CLONES static void grad_rows(const Pass<float>& pass, const Tile& t, bool bits, bool for_bias) {
  for (int64_t row = 0; row < t.rows; ++row) grad_row(pass, t, bits, for_bias, row);
}
HFNN_CLONES static void grad_rows(const Pass<double>& pass, const Tile& t, bool bits, bool for_bias) {
  for (int64_t row = 0; row < t.rows; ++row) grad_row(pass, t, bits, for_bias, row);
}

// Whether one of `rows` queries from i on sees no key, and so weighs all of them alike.
template <class W>
static bool weighs_alike(const Pass<W>& pass, int64_t b, int64_t h, int64_t i, int64_t rows) {
  if (!pass.call.uniform) return false;
  const W* lse = pass.grads.lse.template as<W>() + (b * pass.call.H + h) * pass.call.T + i;
  return std::any_of(lse, lse + rows, [](W at) { return std::isinf(at) && at < 0; });
}
// The keys of `rows` queries from i on.
template <class W>
static Range all_keys_of(const Pass<W>& pass, int64_t b, int64_t h, int64_t i, int64_t rows) {
  if (weighs_alike(pass, b, h, i, rows)) return {0, pass.s.keys};
  return keys_of(pass.call, pass.in, i, rows);
}

// The tiles p m and du. False if no pair of the tile counts.
template <class W>
static bool grad_tile(const Pass<W>& pass, const Queries<W>& queries, const Keys<W>& keys, const Tile& t,
                      bool for_bias = false) {
  const Call& call = pass.call;
  const Range seen = keys_of(call, pass.in, t.i, t.rows);
  const int kind = seen.begin < t.j + t.keys && seen.end > t.j ? state(call, t) : 0;
  if (kind == 0 && (for_bias || !weighs_alike(pass, t.b, t.h, t.i, t.rows))) return false;
  const int64_t n = padded(t.keys);
  multiply(pass.p, kBlock, queries.q, {padded(call.D), 1}, keys.k_turned, kBlock, t.rows, n, call.D, false);
  multiply(pass.du, kBlock, queries.dout, {padded(call.E), 1}, keys.v_turned, kBlock, t.rows, n, call.E, false);
  grad_rows(pass, t, kind != 2 && call.bits, for_bias);
  return true;
}

template <class W>
static void add_dq(const Pass<W>& pass, const Keys<W>& keys, const Tile& t, W* dq) {
  const int64_t D = padded(pass.call.D);
  multiply(dq, D, pass.du, {kBlock, 1}, keys.k, D, t.rows, D, t.keys, true);
}
template <class W>
static void add_dkv(const Pass<W>& pass, const Queries<W>& queries, const Tile& t, W* dk, W* dv) {
  const int64_t D = padded(pass.call.D), E = padded(pass.call.E);
  if (pass.grads.dk) multiply(dk, D, pass.du, {1, kBlock}, queries.q, D, t.keys, D, t.rows, true);
  if (pass.grads.dv) multiply(dv, E, pass.p, {1, kBlock}, queries.dout, E, t.keys, E, t.rows, true);
}
template <class W>
static void store_dkv(const Pass<W>& pass, int64_t b, int64_t g, int64_t j, int64_t keys, W* dk, W* dv) {
  const double softcap = pass.call.softcap > 0 ? pass.call.softcap : 1;  // q includes scale / softcap
  if (pass.grads.dk) store_rows(pass.grads.dk, b, g, pass.s.k + j, keys, softcap, dk);
  if (pass.grads.dv) store_rows(pass.grads.dv, b, g, pass.s.k + j, keys, 1, dv);
}

template <class W>
static void dq_rows(Pass<W> pass, Scratch& scratch, int64_t b, int64_t h, int64_t i, int64_t rows) {
  const Queries<W> queries = pass.queries(scratch);
  const Keys<W> block = pass.keys(scratch);
  W* dq = scratch.take<W>(kBlock * padded(pass.call.D));
  std::fill_n(dq, rows * padded(pass.call.D), W(0));
  load(pass, queries, b, h, i, rows);
  for_blocks(all_keys_of(pass, b, h, i, rows), pass.s.keys, [&](int64_t j, int64_t keys) {
    const Tile t{b, h, i, rows, j, keys};
    load(pass, block, b, h / (pass.call.H / pass.call.G), j, keys);
    if (grad_tile(pass, queries, block, t)) add_dq(pass, block, t, dq);
  });
  store_rows(pass.grads.dq, b, h, pass.s.q + i, rows, pass.call.scale, dq);
}

template <class W>
static void dkv_rows(Pass<W> pass, Scratch& scratch, int64_t b, int64_t g, int64_t j, int64_t keys) {
  const int64_t group = pass.call.H / pass.call.G, D = padded(pass.call.D), E = padded(pass.call.E);
  const Queries<W> queries = pass.queries(scratch);
  const Keys<W> block = pass.keys(scratch);
  W *dk = scratch.take<W>(kBlock * D), *dv = scratch.take<W>(kBlock * E);
  std::fill_n(dk, keys * D, W(0));
  std::fill_n(dv, keys * E, W(0));
  load(pass, block, b, g, j, keys);
  const Range seeing = pass.call.uniform ? Range{0, pass.s.queries} : queries_of(pass.call, pass.s.queries, j, keys);
  for (int64_t h = g * group; h < (g + 1) * group; ++h)
    for_blocks(seeing, pass.s.queries, [&](int64_t i, int64_t rows) {
      const Tile t{b, h, i, rows, j, keys};
      load(pass, queries, b, h, i, rows);
      if (grad_tile(pass, queries, block, t)) add_dkv(pass, queries, t, dk, dv);
    });
  store_dkv(pass, b, g, j, keys, dk, dv);
}

template <class W>
static void head(Pass<W> pass, Scratch& scratch, int64_t b, int64_t g) {
  const int64_t group = pass.call.H / pass.call.G, D = padded(pass.call.D), E = padded(pass.call.E);
  const int64_t all = up(pass.s.keys, kBlock);
  const Queries<W> queries = pass.queries(scratch);
  const Keys<W> cache{scratch.take<W>(all * D), scratch.take<W>(all * D), scratch.take<W>(all * E)};
  W *dq = scratch.take<W>(kBlock * D), *dk = scratch.take<W>(all * D), *dv = scratch.take<W>(all * E);
  const auto block = [&](int64_t j) {
    return Keys<W>{cache.k + j * D, cache.k_turned + j * D, cache.v_turned + j * E};
  };
  std::fill_n(dk, pass.s.keys * D, W(0));
  std::fill_n(dv, pass.s.keys * E, W(0));
  for_blocks({0, pass.s.keys}, pass.s.keys, [&](int64_t j, int64_t keys) { load(pass, block(j), b, g, j, keys); });
  for (int64_t h = g * group; h < (g + 1) * group; ++h)
    for_blocks({0, pass.s.queries}, pass.s.queries, [&](int64_t i, int64_t rows) {
      std::fill_n(dq, rows * D, W(0));
      load(pass, queries, b, h, i, rows);
      for_blocks(all_keys_of(pass, b, h, i, rows), pass.s.keys, [&](int64_t j, int64_t keys) {
        const Tile t{b, h, i, rows, j, keys};
        if (!grad_tile(pass, queries, block(j), t)) return;
        add_dq(pass, block(j), t, dq);
        add_dkv(pass, queries, t, dk + j * D, dv + j * E);
      });
      store_rows(pass.grads.dq, b, h, pass.s.q + i, rows, pass.call.scale, dq);
    });
  store_dkv(pass, b, g, 0, pass.s.keys, dk, dv);
}

// bias excludes packed sequences. Sums go over batch elements, then heads.
template <class W>
static void dbias_rows(const Call& call, const Grads& grads, Scratch& scratch, int64_t b, int64_t h, int64_t i,
                       int64_t j) {
  const Sequence s = sequence(call, 0);
  const Tensor& dbias = grads.dbias;
  const bool all_b = dbias.shape[0] == 1, all_h = dbias.shape[1] == 1;
  const int64_t rows = std::min(kBlock, call.T - i), keys = std::min(kBlock, call.S - j);
  W* sum = scratch.take<W>(kBlock * kBlock);
  std::fill_n(sum, rows * kBlock, W(0));
  const int64_t mark = scratch.mark();
  for (int64_t bn = all_b ? 0 : b; bn < (all_b ? call.B : b + 1); ++bn)
    for (int64_t hn = all_h ? 0 : h; hn < (all_h ? call.H : h + 1); ++hn) {
      scratch.rewind(mark);
      const Pass<W> pass(call, grads, s, scratch, bn);
      const Queries<W> queries = pass.queries(scratch);
      const Keys<W> block = pass.keys(scratch);
      load(pass, queries, bn, hn, i, rows);
      load(pass, block, bn, hn / (call.H / call.G), j, keys);
      if (!grad_tile(pass, queries, block, {bn, hn, i, rows, j, keys}, true)) continue;
      for (int64_t r = 0; r < rows; ++r)
        for (int64_t n = r * kBlock; n < r * kBlock + keys; ++n) sum[n] += pass.du[n];
    }
  for (int64_t r = 0; r < rows; ++r)
    store_row(dbias, ((b * dbias.shape[1] + h) * call.T + i + r) * call.S + j, keys, W(1), sum + r * kBlock);
}

int64_t backward_scratch(const Call& call, int64_t longest) {
  const int64_t D = padded(call.D), E = padded(call.E);
  return kBlock * (3 * kBlock + 3 * E + 5 * D) + up(longest, kBlock) * (3 * D + 2 * E);
}

void dq_block(const Call& call, const Grads& grads, const Sequence& s, Scratch& scratch, int64_t b, int64_t h,
              int64_t i, int64_t rows) {
  with_wide(call.q.dtype,
            [&](auto wide) { dq_rows(Pass<decltype(wide)>(call, grads, s, scratch, b), scratch, b, h, i, rows); });
}
void dkv_block(const Call& call, const Grads& grads, const Sequence& s, Scratch& scratch, int64_t b, int64_t g,
               int64_t j, int64_t keys) {
  with_wide(call.q.dtype,
            [&](auto wide) { dkv_rows(Pass<decltype(wide)>(call, grads, s, scratch, b), scratch, b, g, j, keys); });
}
void whole_head(const Call& call, const Grads& grads, const Sequence& s, Scratch& scratch, int64_t b, int64_t g) {
  with_wide(call.q.dtype, [&](auto wide) { head(Pass<decltype(wide)>(call, grads, s, scratch, b), scratch, b, g); });
}
void dbias_tile(const Call& call, const Grads& grads, Scratch& scratch, int64_t b, int64_t h, int64_t i, int64_t j) {
  with_wide(call.q.dtype, [&](auto wide) { dbias_rows<decltype(wide)>(call, grads, scratch, b, h, i, j); });
}

}  // namespace hfnn::attention
