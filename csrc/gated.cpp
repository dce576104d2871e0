// Gated products on the CPU: one pass over gate and up, whose rows may have gaps between them.
#include "gated.h"

#include "activation_cpu.h"

namespace hfnn {

namespace {
enum Kind : int64_t { silu, gelu_erf, gelu_tanh, relu, sigmoid, quick_gelu, kinds };

// f(x) and f'(x). An unused one costs nothing.
template <class T>
struct Curve {
  T value, slope;
};

struct Call {
  Tensor gate, up, y;     // forward
  Tensor dy, dgate, dup;  // backward
  int64_t rows, cols;     // one long row if no tensor has gaps
  int64_t run_count() const { return rows * count_runs(cols); }
};

using Work = void (*)(const Call&, int64_t begin, int64_t end);
}  // namespace

// x s and its derivative, with s = sigmoid(factor x).
template <class T>
HFNN_INLINE Curve<T> swish(T x, T factor) {
  const T e = exp_minus(factor * x), s = 1 / (1 + e);
  return {x / (1 + e), s + factor * x * s * (x > 0 ? e * s : 1 - s)};  // 1 - s without cancellation
}

template <int64_t kKind, class T>
HFNN_INLINE Curve<T> curve(T x) {
  if constexpr (kKind == silu) return swish(x, T(1));
  if constexpr (kKind == quick_gelu) return swish(x, T(1.702));
  if constexpr (kKind == relu) return {x <= 0 ? 0 : x, x <= 0 ? T(0) : T(1)};
  if constexpr (kKind == sigmoid) {
    const T e = exp_minus(x), s = 1 / (1 + e);
    return {s, s * (x > 0 ? e * s : 1 - s)};
  }
  if constexpr (kKind == gelu_erf) {
    const Normal<T> n = normal(x);
    return {x * n.cdf, n.cdf + x * n.pdf};
  }
  const Sigmoid<T> s = sigmoid_2u(x);
  return {x * s.value, s.value + x * s.slope * (T(1.5957691216057308) + T(0.21406444881780073) * (x * x))};
}

// body(row, first column, number of columns) for the runs [begin, end).
template <class Body>
HFNN_INLINE void for_rows(const Call& call, int64_t begin, int64_t end, Body body) {
  const int64_t runs = count_runs(call.cols);
  for (int64_t run = begin; run < end; ++run) {
    const int64_t first = run % runs * kRun;
    body(run / runs, first, std::min(kRun, call.cols - first));
  }
}

HFNN_INLINE int64_t offset(const Tensor& t, int64_t row, int64_t col) { return row * t.strides[0] + col; }

template <int64_t kKind>
HFNN_INLINE void forward_runs(const Call& call, int64_t begin, int64_t end) {
  with_runs(call.gate.dtype, [&](auto t) HFNN_FLAT {
    Runs<decltype(t)> gates(call.gate, kRun), ups(call.up, kRun), ys(call.y, kRun);
    for_rows(call, begin, end, [&](int64_t row, int64_t col, int64_t n) HFNN_FLAT {
      const auto* gate = gates.read(offset(call.gate, row, col), n);
      const auto* up = ups.read(offset(call.up, row, col), n);
      auto* y = ys.open(offset(call.y, row, col));
#pragma omp simd
      for (int64_t k = 0; k < n; ++k) store(y[k], curve<kKind>(load(gate[k])).value * load(up[k]));
      ys.close(offset(call.y, row, col), n);
    });
  });
}

template <int64_t kKind, class T>
HFNN_INLINE void backward_gate(const T* dy, const T* gate, const T* up, T* dgate, int64_t n) {
#pragma omp simd
  for (int64_t k = 0; k < n; ++k) {
    const auto slope = curve<kKind>(load(gate[k])).slope, by_up = load(dy[k]) * load(up[k]);
    // Where relu is flat, the gradient is 0, whatever dy and up are.
    store(dgate[k], kKind == relu ? (slope == 0 ? 0 : by_up) : by_up * slope);
  }
}

template <int64_t kKind, class T>
HFNN_INLINE void backward_both(const T* dy, const T* gate, const T* up, T* dgate, T* dup, int64_t n) {
#pragma omp simd
  for (int64_t k = 0; k < n; ++k) {
    const auto f = curve<kKind>(load(gate[k]));
    const auto d = load(dy[k]), by_up = d * load(up[k]);
    store(dgate[k], kKind == relu ? (f.slope == 0 ? 0 : by_up) : by_up * f.slope);
    store(dup[k], d * f.value);
  }
}

template <int64_t kKind>
HFNN_INLINE void backward_runs(const Call& call, int64_t begin, int64_t end) {
  with_runs(call.gate.dtype, [&](auto t) HFNN_FLAT {
    Runs<decltype(t)> dys(call.dy, kRun), gates(call.gate, kRun), ups(call.up, kRun);
    Runs<decltype(t)> dgates(call.dgate, kRun), dups(call.dup, kRun);
    for_rows(call, begin, end, [&](int64_t row, int64_t col, int64_t n) HFNN_FLAT {
      const auto* dy = dys.read(offset(call.dy, row, col), n);
      const auto* gate = gates.read(offset(call.gate, row, col), n);
      const auto* up = ups.read(offset(call.up, row, col), n);
      decltype(t)* dgate = call.dgate ? dgates.open(offset(call.dgate, row, col)) : nullptr;
      decltype(t)* dup = call.dup ? dups.open(offset(call.dup, row, col)) : nullptr;
      if (dgate && dup) {
        backward_both<kKind>(dy, gate, up, dgate, dup, n);
      } else if (dgate) {
        backward_gate<kKind>(dy, gate, up, dgate, n);
      } else {
#pragma omp simd
        for (int64_t k = 0; k < n; ++k) store(dup[k], load(dy[k]) * curve<kKind>(load(gate[k])).value);
      }
      if (dgate) dgates.close(offset(call.dgate, row, col), n);
      if (dup) dups.close(offset(call.dup, row, col), n);
    });
  });
}

HFNN_PASSES(silu)
HFNN_PASSES(gelu_erf)
HFNN_PASSES(gelu_tanh)
HFNN_PASSES(relu)
HFNN_PASSES(sigmoid)
HFNN_PASSES(quick_gelu)

static constexpr Work kForward[kinds] = {forward_silu, forward_gelu_erf, forward_gelu_tanh,
                                         forward_relu, forward_sigmoid,  forward_quick_gelu};
static constexpr Work kBackward[kinds] = {backward_silu, backward_gelu_erf, backward_gelu_tanh,
                                          backward_relu, backward_sigmoid,  backward_quick_gelu};

// Checks for the shape of `like` and contiguous rows.
static void expect_rows(const char* tensor, const Tensor& t, const Tensor& like) {
  if (!t) refuse(tensor, "be a tensor", "None");
  if (t.dims != 2 || !std::equal(t.shape, t.shape + 2, like.shape))
    refuse(tensor, "have the shape " + text(like.shape, 2), text(t.shape, t.dims));
  if (t.device != -1) refuse(tensor, "be on the CPU", "one on cuda:" + std::to_string(t.device));
  if (t.shape[1] > 1 && t.strides[1] != 1)
    refuse(tensor, "have rows without gaps", "the strides " + text(t.strides, 2));
  expect_dtype(tensor, t, like.dtype);
}

static void expect_call(const Tensor& gate, const Tensor& up, int64_t kind) {
  expect_floating("gate", gate.dtype);
  if (gate.dims != 2) refuse("gate", "have 2 dimensions", text(gate.shape, gate.dims));
  expect_rows("gate", gate, gate);
  expect_rows("up", up, gate);
  if (kind < 0 || kind >= kinds) refuse("kind", "be from 0 to " + std::to_string(kinds - 1), std::to_string(kind));
}

static void run(const Work* table, Call call, int64_t kind, int64_t threads) {
  call.rows = call.gate.shape[0], call.cols = call.gate.shape[1];
  bool contiguous = true;
  for (const Tensor* t : {&call.gate, &call.up, &call.y, &call.dy, &call.dgate, &call.dup})
    contiguous = contiguous && (!*t || t->contiguous());
  if (contiguous) call.cols *= call.rows, call.rows = 1;
  if (call.cols == 0) return;
  split(call.run_count(), call.rows * call.cols, threads,
        [&](int64_t begin, int64_t end) { table[kind](call, begin, end); });
}

static void forward(const Tensor& gate, const Tensor& up, const Tensor& y, int64_t kind, int64_t threads) {
  expect_call(gate, up, kind);
  expect_rows("y", y, gate);
  run(kForward, {gate, up, y, {}, {}, {}, 0, 0}, kind, threads);
}

static void backward(const Tensor& dy, const Tensor& gate, const Tensor& up, const Tensor& dgate, const Tensor& dup,
                     int64_t kind, int64_t threads) {
  expect_call(gate, up, kind);
  expect_rows("dy", dy, gate);
  if (dgate) expect_rows("dgate", dgate, gate);
  if (dup) expect_rows("dup", dup, gate);
  if (!dgate && !dup) return;
  run(kBackward, {gate, up, {}, dy, dgate, dup, 0, 0}, kind, threads);
}

const Gated gated_cpu = {forward, backward};

}  // namespace hfnn
