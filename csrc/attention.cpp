// Attention on the CPU: checks, and how the passes are split into work items.
#include "attention.h"

#include "attention_cpu.h"

namespace hfnn {
namespace attention {

// Checks a CPU tensor with contiguous rows and any other strides.
static void expect_rows(const char* tensor, const Tensor& t, std::initializer_list<int64_t> shape) {
  if (!t) refuse(tensor, "be a tensor", "None");
  if (t.dims != int(shape.size()) || !std::equal(shape.begin(), shape.end(), t.shape))
    refuse(tensor, "have the shape " + text(shape.begin(), int(shape.size())), text(t.shape, t.dims));
  if (t.device != -1) refuse(tensor, "be on the CPU", "one on cuda:" + std::to_string(t.device));
  if (t.strides[t.dims - 1] != 1 && t.shape[t.dims - 1] > 1 && t.numel() > 0)
    refuse(tensor, "have the last stride 1", "the strides " + text(t.strides, t.dims));
}
static void expect_rows(const char* tensor, const Tensor& t, std::initializer_list<int64_t> shape, Dtype dtype) {
  expect_rows(tensor, t, shape);
  expect_dtype(tensor, t, dtype);
}
// The same with any last stride.
static void expect_strided(const char* tensor, Tensor t, std::initializer_list<int64_t> shape, Dtype dtype) {
  if (t.dims > 0) t.strides[t.dims - 1] = 1;
  expect_rows(tensor, t, shape, dtype);
}

static void check_starts(const char* tensor, const Tensor& t, int64_t sequences, int64_t all) {
  expect_shape(tensor, t, {sequences + 1});
  expect_dtype(tensor, t, Dtype::int32);
  const int32_t* starts = t.as<int32_t>();
  bool ascend = starts[0] >= 0 && starts[sequences] <= all;
  for (int64_t n = 0; n < sequences; ++n) ascend = ascend && starts[n] <= starts[n + 1];
  if (!ascend) refuse(tensor, "ascend from 0 on to at most " + std::to_string(all), "other numbers");
}

static void check_masks(const Call& call) {
  const int64_t B = call.B, H = call.H, T = call.T, S = call.S;
  if (bool(call.bits) != bool(call.tiles)) refuse("tiles", "come with bits", call.bits ? "None" : "tiles alone");
  if (call.bits) {
    expect_strided("bits", call.bits, {B, H, T, (S + 7) / 8}, Dtype::uint8);
    expect_strided("tiles", call.tiles, {B, H, up(T, kBlock) / kBlock, up(S, kBlock) / kBlock}, Dtype::uint8);
  }
  if (call.bias)
    expect_strided("bias", call.bias, {B, H, T, S}, call.bias.dtype == Dtype::float32 ? Dtype::float32 : call.q.dtype);
  if (call.uniform && call.starts_q) refuse("uniform", "come without starts", "both");
  if (call.slopes) expect_strided("slopes", call.slopes, {B, H}, Dtype::float32);
  if (call.bounds) {
    expect_shape("bounds", call.bounds, {B, 2});
    expect_dtype("bounds", call.bounds, Dtype::int32);
  }
  if (bool(call.starts_q) != bool(call.starts_k))
    refuse("starts_q and starts_k", "come together", call.starts_q ? "starts_q alone" : "starts_k alone");
  if (!call.starts_q) return;
  if (B != 1) refuse("q", "have one batch element where there are starts", std::to_string(B));
  if (call.bits || call.bias || call.bounds) refuse("starts", "come without bits, bias and bounds", "both");
  if (call.starts_q.dims != 1 || call.starts_q.shape[0] < 1)
    refuse("starts_q", "have the shape (n + 1,)", text(call.starts_q.shape, call.starts_q.dims));
  check_starts("starts_q", call.starts_q, sequences(call), T);
  check_starts("starts_k", call.starts_k, sequences(call), S);
}

static void check(const Call& call) {
  const Tensor &q = call.q, &k = call.k;
  if (q.dims != 4) refuse("q", "have the shape (B, H, T, D)", text(q.shape, q.dims));
  if (k.dims != 4) refuse("k", "have the shape (B, G, S, D)", text(k.shape, k.dims));
  if (call.v.dims != 4) refuse("v", "have the shape (B, G, S, E)", text(call.v.shape, call.v.dims));
  expect_floating("q", q.dtype);
  expect_rows("q", q, {call.B, call.H, call.T, call.D});
  expect_rows("k", k, {call.B, call.G, call.S, call.D}, q.dtype);
  expect_rows("v", call.v, {call.B, call.G, call.S, call.E}, q.dtype);
  if (call.G < 1 ? call.H > 0 : call.H % call.G)
    refuse("the heads of q", "be a multiple of those of k, " + std::to_string(call.G), std::to_string(call.H));
  HFNN_CHECK(call.threshold >= 0);
  HFNN_CHECK(call.threshold < 65536);
  check_masks(call);
}

static void expect_sums(const Call& call, const Tensor& sums) {
  if (bool(sums) != bool(call.bias)) refuse("sums", "come with bias", sums ? "sums alone" : "bias alone");
  if (!sums) return;
  expect_shape("sums", sums, {call.B, call.H, call.T});
  expect_dtype("sums", sums, wide(call.q.dtype));
}

static Call call_of(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& bits, const Tensor& tiles,
                    const Tensor& bias, const Tensor& slopes, const Tensor& bounds, const Tensor& starts_q,
                    const Tensor& starts_k, double scale, double softcap, int64_t left, int64_t right, int64_t shift,
                    bool uniform, int64_t threshold, int64_t seed, int64_t offset, const Tensor& pair,
                    int64_t threads) {
  Call call;
  call.q = q, call.k = k, call.v = v, call.scale = scale, call.softcap = softcap;
  call.bits = bits, call.tiles = tiles, call.bias = bias, call.slopes = slopes, call.bounds = bounds;
  call.starts_q = starts_q, call.starts_k = starts_k;
  constexpr int64_t kFar = int64_t(1) << 40;  // beyond any sequence, and sums do not overflow
  call.left = std::min(left, kFar);
  call.right = std::min(right, kFar);
  call.shift = shift;
  call.uniform = uniform;
  call.threshold = threshold;
  if (pair) {
    expect_shape("pair", pair, {2});
    expect_dtype("pair", pair, Dtype::int64);
    seed = pair.as<int64_t>()[0];
    offset = pair.as<int64_t>()[1];
  }
  call.seed = uint64_t(seed);
  call.offset = uint64_t(offset);
  call.B = q.shape[0], call.H = q.shape[1], call.T = q.shape[2], call.D = q.shape[3];
  call.G = k.shape[1], call.S = k.shape[2], call.E = v.shape[3];
  call.threads = std::max<int64_t>(threads, 1);
  check(call);
  return call;
}

namespace {
struct Part {  // a block of queries or keys of a sequence
  Sequence s;
  int64_t begin, length;
};
}  // namespace

static std::vector<Part> parts(const Call& call, int64_t Sequence::* size) {
  std::vector<Part> all;
  for (int64_t n = 0; n < sequences(call); ++n) {
    const Sequence s = sequence(call, n);
    for_blocks({0, s.*size}, s.*size, [&](int64_t begin, int64_t length) { all.push_back({s, begin, length}); });
  }
  return all;
}

// body(part, b, h, scratch) for every part, batch element and head.
template <class Body>
static void share_parts(const Call& call, const std::vector<Part>& parts, int64_t heads, int64_t elements, Body body) {
  const int64_t n = int64_t(parts.size());
  share(call, call.B * heads * n, elements,
        [&](int64_t item, Scratch& scratch) { body(parts[item % n], item / n / heads, item / n % heads, scratch); });
}

static void forward(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& o, const Tensor& lse,
                    const Tensor& sums, const Tensor& bits, const Tensor& tiles, const Tensor& bias,
                    const Tensor& slopes, const Tensor& sinks, const Tensor& bounds, const Tensor& starts_q,
                    const Tensor& starts_k, double scale, double softcap, int64_t left, int64_t right, int64_t shift,
                    bool uniform, int64_t threshold, int64_t seed, int64_t offset, const Tensor& pair,
                    int64_t threads) {
  const Call call = call_of(q, k, v, bits, tiles, bias, slopes, bounds, starts_q, starts_k, scale, softcap, left, right,
                            shift, uniform, threshold, seed, offset, pair, threads);
  expect_rows("o", o, {call.B, call.H, call.T, call.E}, q.dtype);
  expect_shape("lse", lse, {call.B, call.H, call.T});
  expect_dtype("lse", lse, wide(q.dtype));
  expect_sums(call, sums);
  if (sinks) {
    expect_shape("sinks", sinks, {call.H});
    expect_dtype("sinks", sinks, Dtype::float32);
  }
  const Out out{o, lse, sums, sinks};
  share_parts(call, parts(call, &Sequence::queries), call.H, forward_scratch(call),
              [&](const Part& part, int64_t b, int64_t h, Scratch& scratch) {
                forward_block(call, out, part.s, scratch, b, h, part.begin, part.length);
              });
}

template <class W>
HFNN_INLINE void products(const Tensor& o, const Tensor& dout, const Tensor& delta, int64_t begin, int64_t end) {
  const int64_t H = o.shape[1], T = o.shape[2], E = o.shape[3];
  const std::unique_ptr<W[]> rows(new W[2 * padded(E)]);
  W *x = rows.get(), *y = x + padded(E);
  for (int64_t row = begin; row < end; ++row) {
    const int64_t b = row / T / H, h = row / T % H, i = row % T;
    load_rows(o, b, h, i, 1, 1, x);
    load_rows(dout, b, h, i, 1, 1, y);
    delta.as<W>()[row] = sum<W>(E, [=](int64_t e) HFNN_FLAT { return x[e] * y[e]; });
  }
}
HFNN_CLONES static void delta_rows(const Tensor& o, const Tensor& dout, const Tensor& delta, int64_t begin,
                                   int64_t end) {
  with_wide(o.dtype, [&](auto wide) HFNN_FLAT { products<decltype(wide)>(o, dout, delta, begin, end); });
}
static void delta(const Tensor& o, const Tensor& dout, const Tensor& delta, int64_t threads) {
  if (o.dims != 4) refuse("o", "have the shape (B, H, T, E)", text(o.shape, o.dims));
  expect_floating("o", o.dtype);
  const int64_t B = o.shape[0], H = o.shape[1], T = o.shape[2], E = o.shape[3];
  expect_rows("o", o, {B, H, T, E});
  expect_rows("dout", dout, {B, H, T, E}, o.dtype);
  expect_shape("delta", delta, {B, H, T});
  expect_dtype("delta", delta, wide(o.dtype));
  split(B * H * T, o.numel(), threads, [&](int64_t begin, int64_t end) { delta_rows(o, dout, delta, begin, end); });
}

static void check_grads(const Call& call, const Grads& grads) {
  const Dtype dtype = call.q.dtype;
  expect_shape("lse", grads.lse, {call.B, call.H, call.T});
  expect_dtype("lse", grads.lse, wide(dtype));
  expect_sums(call, grads.sums);
  expect_shape("delta", grads.delta, {call.B, call.H, call.T});
  expect_dtype("delta", grads.delta, wide(dtype));
  expect_rows("dout", grads.dout, {call.B, call.H, call.T, call.E}, dtype);
  if (grads.dq) expect_rows("dq", grads.dq, {call.B, call.H, call.T, call.D}, dtype);
  if (grads.dk) expect_rows("dk", grads.dk, {call.B, call.G, call.S, call.D}, dtype);
  if (grads.dv) expect_rows("dv", grads.dv, {call.B, call.G, call.S, call.E}, dtype);
  const Tensor& d = grads.dbias;
  if (!d) return;
  if (!call.bias) refuse("dbias", "come with bias", "dbias alone");
  if (d.dims != 4) refuse("dbias", "have the shape (B or 1, H or 1, T, S)", text(d.shape, d.dims));
  expect_shape("dbias", d, {d.shape[0] == 1 ? 1 : call.B, d.shape[1] == 1 ? 1 : call.H, call.T, call.S});
  expect_dtype("dbias", d, call.bias.dtype);
}

// Computes dq, dk and dv in one pass of five products per tile if the heads keep enough threads busy, else in two
// passes of seven products together. Both give the same bits.
static void gradients(const Call& call, const Grads& grads) {
  int64_t longest = 0;
  for (int64_t n = 0; n < sequences(call); ++n) longest = std::max(longest, sequence(call, n).keys);
  const int64_t heads = call.B * call.G, items = heads * sequences(call), threads = call.threads;
  if (grads.dq && grads.dk && grads.dv && 5 * up(items, threads) <= 7 * items)
    return share(call, items, backward_scratch(call, longest), [&](int64_t item, Scratch& scratch) {
      const int64_t b = item % heads / call.G, g = item % call.G;
      whole_head(call, grads, sequence(call, item / heads), scratch, b, g);
    });
  if (grads.dq)
    share_parts(call, parts(call, &Sequence::queries), call.H, backward_scratch(call, 0),
                [&](const Part& part, int64_t b, int64_t h, Scratch& scratch) {
                  dq_block(call, grads, part.s, scratch, b, h, part.begin, part.length);
                });
  if (grads.dk || grads.dv)
    share_parts(call, parts(call, &Sequence::keys), call.G, backward_scratch(call, 0),
                [&](const Part& part, int64_t b, int64_t g, Scratch& scratch) {
                  dkv_block(call, grads, part.s, scratch, b, g, part.begin, part.length);
                });
}

static void backward(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& lse, const Tensor& sums,
                     const Tensor& dout, const Tensor& delta, const Tensor& dq, const Tensor& dk, const Tensor& dv,
                     const Tensor& dbias, const Tensor& bits, const Tensor& tiles, const Tensor& bias,
                     const Tensor& slopes, const Tensor& bounds, const Tensor& starts_q, const Tensor& starts_k,
                     double scale, double softcap, int64_t left, int64_t right, int64_t shift, bool uniform,
                     int64_t threshold, int64_t seed, int64_t offset, const Tensor& pair, int64_t threads) {
  const Call call = call_of(q, k, v, bits, tiles, bias, slopes, bounds, starts_q, starts_k, scale, softcap, left, right,
                            shift, uniform, threshold, seed, offset, pair, threads);
  const Grads grads{lse, sums, dout, delta, dq, dk, dv, dbias};
  check_grads(call, grads);
  gradients(call, grads);
  if (!dbias) return;
  const int64_t rows = up(call.T, kBlock) / kBlock, columns = up(call.S, kBlock) / kBlock;
  share(call, dbias.shape[0] * dbias.shape[1] * rows * columns, backward_scratch(call, 0),
        [&](int64_t item, Scratch& scratch) {
          const int64_t head = item / columns / rows, i = item / columns % rows, j = item % columns;
          dbias_tile(call, grads, scratch, head / dbias.shape[1], head % dbias.shape[1], i * kBlock, j * kBlock);
        });
}

}  // namespace attention

const Attention attention_cpu = {attention::forward, attention::delta, attention::backward};

}  // namespace hfnn
