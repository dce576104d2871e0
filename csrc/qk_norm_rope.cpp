// RMS norm of each head, then rotary position embedding, on the CPU. norm_cpu.h has the gradient of a row.
#include "qk_norm_rope.h"

#include "norm_cpu.h"
#include "rope_cpu.h"

namespace hfnn {

namespace {
// Pairs: queries, keys. In backward, y is dy.
struct Call {
  Tensor x[2], y[2], dx[2], rstd[2];
  const Vector* weight[2];
  Angles angles;
  Tensor partials;
  double eps;
  bool rebuild;

  int64_t heads() const { return x[0].shape[1] + x[1].shape[1]; }
  // The index of the statistic of token s of head h.
  int64_t statistic(int64_t key, int64_t b, int64_t h, int64_t s) const {
    return (b * x[key].shape[2] + s) * x[key].shape[1] + h;
  }
};
}  // namespace

HFNN_CLONES static void forward_blocks(const Call& call, int64_t begin, int64_t end) {
  const int64_t dims = call.x[0].shape[3];
  turn_blocks(call, begin, end, [&](auto* x, int64_t key, int64_t b, int64_t h, int64_t s, auto* normed) HFNN_FLAT {
    using W = std::remove_pointer_t<decltype(normed)>;
    const W* weight = call.weight[key]->as<W>();
    W* at = call.rstd[key].as<W>();
    if (at) at += call.statistic(key, b, h, s);
    W rstd;
    if (call.rebuild) {
      rstd = *at;
    } else {
      const W squares = sum<W>(dims, [=](int64_t c) HFNN_FLAT { return load(x[c]) * load(x[c]); });
      rstd = 1 / std::sqrt(squares / W(dims) + W(call.eps));
      if (at) *at = rstd;
    }
#pragma omp simd
    for (int64_t c = 0; c < dims; ++c) normed[c] = load(x[c]) * rstd * weight[c];
    return normed;
  });
}

// A token adds all its heads, so sums get long sooner than in a norm: more chunks, of at least 32 tokens, at most 1024.
static int64_t count_chunks(int64_t batch, int64_t sequence, int64_t) {
  return std::clamp<int64_t>(batch * sequence / 32, 1, 1024);
}

// dx, and one row of each plane of partials per chunk. Without weight gradients, the rows are discarded.
HFNN_CLONES static void backward_chunks(const Call& call, int64_t begin, int64_t end) {
  const Tensor& q = call.x[0];
  const int64_t rotary = call.angles.rotary, dims = q.shape[3];
  const int64_t chunks = count_chunks(q.shape[0], q.shape[2], dims), blocks = count_token_blocks(q);
  with_runs(q.dtype, call.y[0].dtype, [&](auto in, auto out) HFNN_FLAT {
    using W = Wide<decltype(in)>;
    Runs<decltype(in)> reads[] = {{q, dims}, {call.x[1], dims}}, writes[] = {{call.dx[0], dims}, {call.dx[1], dims}};
    Runs<decltype(out)> gradients[] = {{call.y[0], dims}, {call.y[1], dims}};
    const std::unique_ptr<W[]> memory(new W[2 * kTokens * rotary + 4 * dims]);
    W *own = memory.get(), *other = own + kTokens * rotary, *turned = other + kTokens * rotary, *thrown = turned + dims;
    W* head = thrown + 2 * dims;  // sums of one head's tokens: short sums first limit the rounding error
    for (int64_t chunk = begin; chunk < end; ++chunk) {
      W* rows = call.partials.as<W>();
      W* dweights[] = {rows ? rows + chunk * dims : thrown, rows ? rows + (chunks + chunk) * dims : thrown + dims};
      for (W* dweight : dweights) std::fill_n(dweight, dims, W(0));
      for (int64_t block = blocks * chunk / chunks; block < blocks * (chunk + 1) / chunks; ++block) {
        const Tokens tokens(q, block);
        fill_factors(call.angles, tokens, own, other);
        for (int64_t i = 0; i < call.heads(); ++i) {
          const int64_t key = i >= q.shape[1], h = key ? i - q.shape[1] : i;
          const W *weight = call.weight[key]->as<W>(), *rstds = call.rstd[key].as<W>();
          std::fill_n(head, dims, W(0));
          for (int64_t s = tokens.first; s < tokens.end; ++s) {
            const auto* dy = gradients[key].read(row_of(call.y[key], tokens.batch, h, s), dims);
            const auto* x = reads[key].read(row_of(call.x[key], tokens.batch, h, s), dims);
            const int64_t turn = (s - tokens.first) * rotary, to = row_of(call.dx[key], tokens.batch, h, s);
            const W rstd = rstds[call.statistic(key, tokens.batch, h, s)];
            rope_turn(dy, own + turn, other + turn, turned, rotary, dims, call.angles.interleaved);
            norm_gradients<false, true, true>(turned, x, weight, W(0), rstd, writes[key], to, head, head, dims);
          }
#pragma omp simd
          for (int64_t c = 0; c < dims; ++c) dweights[key][c] += head[c];
        }
      }
    }
  });
}

static void check_weight(const char* name, const Tensor& weight, const Tensor& q) {
  expect_shape(name, weight, {q.shape[3]});
  expect_floating(name, weight.dtype);
}

// offset + weight, if there is one. Its length is checked first.
static Vector weights(const char* name, const Tensor& weight, const Tensor& q, double offset) {
  expect_heads("q", q, q);
  if (weight) check_weight(name, weight, q);
  return Vector(weight, wide(q.dtype), weight.shape[0], 1, offset);
}

static void check_statistics(const char* name, const Tensor& rstd, const Tensor& x) {
  expect_shape(name, rstd, {x.shape[0], x.shape[2], x.shape[1]});
  expect_dtype(name, rstd, wide(x.dtype));
}

// Common to all three calls. Without keys, k and its tensors are absent.
static void check(const Call& call, const Tensor& wq, const Tensor& wk, const char* yq_name, const char* yk_name) {
  const Tensor &q = call.x[0], &k = call.x[1];
  expect_like_heads(yq_name, call.y[0], "q", q);
  expect_pair("q", q.dtype, yq_name, call.y[0].dtype);
  check_weight("wq", wq, q);
  expect_angles(call.angles, q);
  if (call.rstd[0]) check_statistics("rstd_q", call.rstd[0], q);
  if (!k) return;
  expect_heads("k", k, q);
  expect_dtype("k", k, q.dtype);
  expect_like_heads(yk_name, call.y[1], "k", k);
  expect_dtype(yk_name, call.y[1], call.y[0].dtype);
  check_weight("wk", wk, q);
  if (call.rstd[1]) check_statistics("rstd_k", call.rstd[1], k);
}

static void run(void (*range)(const Call&, int64_t, int64_t), const Call& call, int64_t count, int64_t threads) {
  split(count, call.x[0].numel() + call.x[1].numel(), threads,
        [&](int64_t begin, int64_t end) { range(call, begin, end); });
}

static void forward(const Tensor& q, const Tensor& k, const Tensor& wq, const Tensor& wk, const Tensor& cos,
                    const Tensor& sin, const Tensor& positions, const Tensor& yq, const Tensor& yk,
                    const Tensor& rstd_q, const Tensor& rstd_k, double eps, double offset, int64_t rotary,
                    bool interleaved, int64_t threads) {
  const Vector q_weight = weights("wq", wq, q, offset), k_weight = weights("wk", wk, q, offset);
  const Angles angles{cos, sin, positions, rotary, interleaved, false};
  const Call call{{q, k}, {yq, yk}, {}, {rstd_q, rstd_k}, {&q_weight, &k_weight}, angles, {}, eps, false};
  check(call, wq, wk, "yq", "yk");
  run(forward_blocks, call, count_token_blocks(q), threads);
}

static void rebuild(const Tensor& q, const Tensor& wq, const Tensor& rstd_q, const Tensor& cos, const Tensor& sin,
                    const Tensor& positions, const Tensor& yq, double offset, int64_t rotary, bool interleaved,
                    int64_t threads) {
  const Vector weight = weights("wq", wq, q, offset);
  const Angles angles{cos, sin, positions, rotary, interleaved, false};
  const Call call{{q, {}}, {yq, {}}, {}, {rstd_q, {}}, {&weight, &weight}, angles, {}, 0, true};
  check_statistics("rstd_q", rstd_q, q);
  check(call, wq, {}, "yq", "yk");
  run(forward_blocks, call, count_token_blocks(q), threads);
}

static void backward(const Tensor& dyq, const Tensor& dyk, const Tensor& q, const Tensor& k, const Tensor& wq,
                     const Tensor& wk, const Tensor& rstd_q, const Tensor& rstd_k, const Tensor& cos, const Tensor& sin,
                     const Tensor& positions, const Tensor& dq, const Tensor& dk, const Tensor& dwq, const Tensor& dwk,
                     const Tensor& partials, double offset, int64_t rotary, bool interleaved, int64_t threads) {
  const Vector q_weight = weights("wq", wq, q, offset), k_weight = weights("wk", wk, q, offset);
  const Angles angles{cos, sin, positions, rotary, interleaved, true};
  const Call call{
      {q, k}, {dyq, dyk}, {dq, dk}, {rstd_q, rstd_k}, {&q_weight, &k_weight}, angles, dwq ? partials : Tensor(),
      0,      false};
  check_statistics("rstd_q", rstd_q, q);
  check(call, wq, wk, "dyq", "dyk");
  expect_like_heads("dq", dq, "q", q);
  expect_dtype("dq", dq, q.dtype);
  if (k) {
    check_statistics("rstd_k", rstd_k, k);
    expect_like_heads("dk", dk, "k", k);
    expect_dtype("dk", dk, q.dtype);
  }
  const int64_t dims = q.shape[3], chunks = count_chunks(q.shape[0], q.shape[2], dims);
  if (dwq) {
    expect_shape("partials", partials, {2, chunks, dims});
    expect_dtype("partials", partials, wide(q.dtype));
    check_weight("dwq", dwq, q);
    if (k) check_weight("dwk", dwk, q);
  }
  run(backward_chunks, call, chunks, threads);
  if (dwq) norm_sum_partials(partials, 0, dwq, threads);
  if (dwk) norm_sum_partials(partials, 1, dwk, threads);
}

const QkNormRope qk_norm_rope_cpu = {count_chunks, forward, rebuild, backward};

}  // namespace hfnn
