// Rotary position embedding on the CPU.
#include "rope.h"

#include "rope_cpu.h"

namespace hfnn {

namespace {
struct Call {
  Tensor x[2], y[2];  // of the queries, of the keys
  Angles angles;
};
}  // namespace

HFNN_CLONES static void forward_blocks(const Call& call, int64_t begin, int64_t end) {
  const Tensor& q = call.x[0];
  const int64_t rotary = call.angles.rotary, dims = q.shape[3];
  with_runs(q.dtype, call.y[0].dtype, [&](auto in, auto out) HFNN_FLAT {
    using W = Wide<decltype(in)>;
    Runs<decltype(in)> reads[] = {{q, dims}, {call.x[1], dims}};
    Runs<decltype(out)> writes[] = {{call.y[0], dims}, {call.y[1], dims}};
    const std::unique_ptr<W[]> factors(new W[2 * kTokens * rotary]);
    W *own = factors.get(), *other = own + kTokens * rotary;
    for (int64_t block = begin; block < end; ++block) {
      const Tokens tokens(q, block);
      fill_factors(call.angles, tokens, own, other);
      for (int64_t i = 0; i < call.x[0].shape[1] + call.x[1].shape[1]; ++i) {
        const int64_t key = i >= q.shape[1], h = key ? i - q.shape[1] : i;
        for (int64_t s = tokens.first; s < tokens.end; ++s) {
          const int64_t at = (s - tokens.first) * rotary, to = row_of(call.y[key], tokens.batch, h, s);
          const auto* x = reads[key].read(row_of(call.x[key], tokens.batch, h, s), dims);
          rope_turn(x, own + at, other + at, writes[key].open(to), rotary, dims, call.angles.interleaved);
          writes[key].close(to, dims);
        }
      }
    }
  });
}

static void forward(const Tensor& q, const Tensor& k, const Tensor& cos, const Tensor& sin, const Tensor& positions,
                    const Tensor& yq, const Tensor& yk, int64_t rotary, bool interleaved, bool transposed,
                    int64_t threads) {
  const Call call{{q, k}, {yq, yk}, {cos, sin, positions, rotary, interleaved, transposed}};
  expect_heads("q", q, q);
  expect_like_heads("yq", yq, "q", q);
  expect_pair("q", q.dtype, "yq", yq.dtype);
  if (k || yk) {
    expect_heads("k", k, q);
    expect_like_heads("yk", yk, "k", k);
    expect_dtype("k", k, q.dtype);
    expect_dtype("yk", yk, yq.dtype);
  }
  expect_angles(call.angles, q);
  split(count_token_blocks(q), q.numel() + k.numel(), threads,
        [&](int64_t begin, int64_t end) { forward_blocks(call, begin, end); });
}

const Rope rope_cpu = {forward};

}  // namespace hfnn
