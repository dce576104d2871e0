// Rotary position embedding on the CPU.
#include "rope.h"

#include "rope_cpu.h"

namespace hfnn {

namespace {
struct Call {
  Tensor x[2], y[2];  // of queries, of keys
  Angles angles;
};
}  // namespace

HFNN_CLONES static void forward_blocks(const Call& call, int64_t begin, int64_t end) {
  turn_blocks(call, begin, end, [](auto* x, int64_t, int64_t, int64_t, int64_t, auto*) HFNN_FLAT { return x; });
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
