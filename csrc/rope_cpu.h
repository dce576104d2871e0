// Shared by rope.cpp and qk_norm_rope.cpp: the factors of a token, the rotation of a row, and checks.
//
// A block of work is kTokens tokens of one batch element, with all heads. Its factors are computed once, and in both
// layouts of the heads a few rows are contiguous. W is the dtype of the arithmetic.
#pragma once
#include "cpu.h"

namespace hfnn {

constexpr int64_t kTokens = 8;

// Where a token's factors come from.
struct Angles {
  Tensor cos, sin, positions;
  int64_t rotary;
  bool interleaved, transposed;

  HFNN_INLINE int64_t row(int64_t b, int64_t s) const {
    const int64_t batch = cos.shape[0] == 1 ? 0 : b;
    const int64_t of =
        positions ? positions.as<int64_t>()[(positions.shape[0] == 1 ? 0 : b) * positions.shape[1] + s] : s;
    return (batch * cos.shape[1] + of) * cos.shape[2];
  }
};

// A block's batch element and its tokens [first, end).
struct Tokens {
  int64_t batch, first, end;
  HFNN_INLINE Tokens(const Tensor& q, int64_t block) {
    const int64_t blocks = (q.shape[2] + kTokens - 1) / kTokens;
    batch = block / blocks;
    first = block % blocks * kTokens;
    end = std::min(q.shape[2], first + kTokens);
  }
};

// own and other (tokens, R) of a block, such that y[j] = x[j] own[j] + x[partner of j] other[j].
template <class W>
HFNN_INLINE void rope_factors(const Angles& angles, const Tokens& tokens, W* own, W* other) {
  const int64_t half = angles.rotary / 2;
  const bool narrow = angles.cos.shape[2] == half, pairs = angles.interleaved, transposed = angles.transposed;
  with_dtype(angles.cos.dtype, [&](auto stored) HFNN_FLAT {
    for (int64_t s = tokens.first; s < tokens.end; ++s, own += angles.rotary, other += angles.rotary) {
      const int64_t row = angles.row(tokens.batch, s);
      const auto* cos = angles.cos.as<decltype(stored)>() + row;
      const auto* sin = angles.sin.as<decltype(stored)>() + row;
      for (int64_t i = 0; i < half; ++i) {
        const int64_t a = pairs ? 2 * i : i, p = pairs ? 2 * i + 1 : i + half;
        const W sin_a = W(load(sin[narrow ? i : a])), sin_p = W(load(sin[narrow ? i : p]));
        own[a] = W(load(cos[narrow ? i : a]));
        own[p] = W(load(cos[narrow ? i : p]));
        other[a] = transposed ? sin_p : -sin_a;
        other[p] = transposed ? -sin_a : sin_p;
      }
    }
  });
}
// Separate from the loops over heads, which are compiled for every pair of dtypes.
HFNN_CLONES static void fill_factors(const Angles& angles, const Tokens& tokens, float* own, float* other) {
  rope_factors(angles, tokens, own, other);
}
HFNN_CLONES static void fill_factors(const Angles& angles, const Tokens& tokens, double* own, double* other) {
  rope_factors(angles, tokens, own, other);
}

// y of a row x with `dims` columns, of which the first `rotary` are rotated.
template <class X, class Y, class W>
HFNN_INLINE void rope_turn(const X* x, const W* own, const W* other, Y* y, int64_t rotary, int64_t dims, bool pairs) {
  const int64_t half = rotary / 2;
  if (pairs) {
#pragma omp simd
    for (int64_t i = 0; i < half; ++i) {
      const W a = load(x[2 * i]), b = load(x[2 * i + 1]);
      store(y[2 * i], a * own[2 * i] + b * other[2 * i]);
      store(y[2 * i + 1], b * own[2 * i + 1] + a * other[2 * i + 1]);
    }
  } else {
#pragma omp simd
    for (int64_t i = 0; i < half; ++i) {
      const W a = load(x[i]), b = load(x[i + half]);
      store(y[i], a * own[i] + b * other[i]);
      store(y[i + half], b * own[i + half] + a * other[i + half]);
    }
  }
#pragma omp simd
  for (int64_t i = rotary; i < dims; ++i) store(y[i], W(load(x[i])));
}

// The first element of a row of a tensor (B, H, S, D).
HFNN_INLINE int64_t row_of(const Tensor& t, int64_t b, int64_t h, int64_t s) {
  return b * t.strides[0] + h * t.strides[1] + s * t.strides[2];
}

// y of the tokens of blocks, all heads: rows from row(x, key, b, h, s, scratch), rotated. call has x[2] and y[2], of
// queries and keys, and angles. scratch has room for one row.
template <class Call, class Row>
HFNN_INLINE void turn_blocks(const Call& call, int64_t begin, int64_t end, Row row) {
  const Tensor& q = call.x[0];
  const int64_t rotary = call.angles.rotary, dims = q.shape[3];
  with_runs(q.dtype, call.y[0].dtype, [&](auto in, auto out) HFNN_FLAT {
    using W = Wide<decltype(in)>;
    Runs<decltype(in)> reads[] = {{q, dims}, {call.x[1], dims}};
    Runs<decltype(out)> writes[] = {{call.y[0], dims}, {call.y[1], dims}};
    const std::unique_ptr<W[]> memory(new W[2 * kTokens * rotary + dims]);
    W *own = memory.get(), *other = own + kTokens * rotary, *scratch = other + kTokens * rotary;
    for (int64_t block = begin; block < end; ++block) {
      const Tokens tokens(q, block);
      fill_factors(call.angles, tokens, own, other);
      for (int64_t i = 0; i < q.shape[1] + call.x[1].shape[1]; ++i) {
        const int64_t key = i >= q.shape[1], h = key ? i - q.shape[1] : i;
        for (int64_t s = tokens.first; s < tokens.end; ++s) {
          const auto* x = reads[key].read(row_of(call.x[key], tokens.batch, h, s), dims);
          const int64_t at = (s - tokens.first) * rotary, to = row_of(call.y[key], tokens.batch, h, s);
          rope_turn(row(x, key, tokens.batch, h, s, scratch), own + at, other + at, writes[key].open(to), rotary, dims,
                    call.angles.interleaved);
          writes[key].close(to, dims);
        }
      }
    }
  });
}

inline int64_t count_token_blocks(const Tensor& q) { return q.shape[0] * ((q.shape[2] + kTokens - 1) / kTokens); }

// Checks for (B, any heads, S, D) on the CPU with last stride 1.
inline void expect_heads(const char* tensor, const Tensor& t, const Tensor& q) {
  if (!t) refuse(tensor, "be a tensor", "None");
  if (t.dims != 4 || t.shape[3] < 1 || t.shape[0] != q.shape[0] || t.shape[2] != q.shape[2] || t.shape[3] != q.shape[3])
    refuse(tensor, "have q's shape (B, H, S, D) with D > 0, but for H: " + text(q.shape, q.dims),
           text(t.shape, t.dims));
  if (t.device != -1) refuse(tensor, "be on the CPU", "one on cuda:" + std::to_string(t.device));
  if (t.strides[3] != 1 && t.shape[3] != 1 && t.numel())
    refuse(tensor, "have a last stride of 1", "the strides " + text(t.strides, t.dims));
  expect_floating(tensor, t.dtype);
}

// Checks a result or gradient for the heads of x.
inline void expect_like_heads(const char* tensor, const Tensor& t, const char* of, const Tensor& x) {
  expect_heads(tensor, t, x);
  if (t.shape[1] != x.shape[1]) refuse(tensor, std::string("have as many heads as ") + of, text(t.shape, t.dims));
}

inline void expect_angles(const Angles& angles, const Tensor& q) {
  const Tensor &cos = angles.cos, &positions = angles.positions;
  const int64_t batch = q.shape[0], sequence = q.shape[2], rotary = angles.rotary;
  if (rotary < 2 || rotary % 2 || rotary > q.shape[3])
    refuse("rotary", "be even, and from 2 to D = " + std::to_string(q.shape[3]), std::to_string(rotary));
  if (!cos || cos.dims != 3 || (cos.shape[0] != 1 && cos.shape[0] != batch) ||
      (cos.shape[2] != rotary && cos.shape[2] != rotary / 2))
    refuse("cos", "have the shape (B or 1, P, R or R / 2)", text(cos.shape, cos.dims));
  expect_shape("cos", cos, {cos.shape[0], cos.shape[1], cos.shape[2]});
  expect_floating("cos", cos.dtype);
  expect_alike("sin", angles.sin, cos);
  if (!positions) {
    if (cos.shape[1] < sequence)
      refuse("cos", "have a row for each of " + std::to_string(sequence) + " tokens", text(cos.shape, cos.dims));
    return;
  }
  expect_dtype("positions", positions, Dtype::int64);
  expect_shape("positions", positions, {positions.shape[0] == 1 ? 1 : batch, sequence});
  const auto* at = positions.as<int64_t>();
  for (int64_t i = 0; i < positions.numel(); ++i)
    if (at[i] < 0 || at[i] >= cos.shape[1])
      refuse("positions", "be from 0 to " + std::to_string(cos.shape[1] - 1), std::to_string(at[i]));
}

}  // namespace hfnn
