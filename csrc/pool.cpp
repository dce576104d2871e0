// Max pooling on the CPU. Forward computes one row of outputs at a time. Backward computes one row of inputs, or one
// plane if C is 1. Each is computed by one thread.
#include "pool.h"

#include <limits>

#include "cpu.h"

namespace hfnn {

namespace {
struct Call {
  Tensor x, y, codes;  // in backward: dx and dy
  Triple window, stride, padding, dilation;
};

// One dimension of the windows, in elements of x.
struct Axis {
  int64_t window, stride, padding, dilation, in, out;

  HFNN_INLINE int64_t at(int64_t o, int64_t k) const { return o * stride - padding + k * dilation; }
  HFNN_INLINE bool inside(int64_t i) const { return i >= 0 && i < in; }
  // Whether window o has a position inside x: tests its first position that is not negative.
  HFNN_INLINE bool reaches(int64_t o) const {
    const int64_t first = at(o, 0);
    if (first >= 0) return first < in;
    const int64_t k = (-first + dilation - 1) / dilation;
    return k < window && at(o, k) < in;
  }
};
}  // namespace

HFNN_INLINE Axis axis(const Call& c, int d) {
  return {c.window[d], c.stride[d], c.padding[d], c.dilation[d], c.x.shape[d + 1], c.y.shape[d + 1]};
}

// No position yet: the first position inside x is taken whatever its value.
constexpr int32_t kNone = -1;

template <class T, class W>
HFNN_INLINE void take(T x, int32_t k, W& best, int32_t& code) {
  const W value = load(x);
  const bool better = value > best || value != value || code == kNone;
  best = better ? value : best;
  code = better ? k : code;
}

// Row (p, od, oh) of y into best and code. For each k, in order: position k of all windows.
template <class T, class W>
HFNN_INLINE void forward_row(const Call& call, int64_t row, W* best, int32_t* code) {
  const Axis d = axis(call, 0), h = axis(call, 1), w = axis(call, 2);
  const int64_t oh = row % h.out, od = row / h.out % d.out, p = row / h.out / d.out, C = call.x.shape[4];
  std::fill_n(best, w.out * C, -std::numeric_limits<W>::infinity());
  std::fill_n(code, w.out * C, kNone);
  int32_t k = 0;
  for (int64_t kd = 0; kd < d.window; ++kd) {
    for (int64_t kh = 0; kh < h.window; ++kh) {
      const int64_t id = d.at(od, kd), ih = h.at(oh, kh);
      if (!d.inside(id) || !h.inside(ih)) {
        k += int32_t(w.window);
        continue;
      }
      const T* x = call.x.as<T>() + ((p * d.in + id) * h.in + ih) * w.in * C;
      for (int64_t kw = 0; kw < w.window; ++kw, ++k) {
        int64_t first = 0, last = w.out;  // windows whose position k is inside x
        while (first < last && w.at(first, kw) < 0) ++first;
        while (first < last && w.at(last - 1, kw) >= w.in) --last;
        const int64_t from = w.at(0, kw);
        if (C == 1 && w.stride == 1) {
#pragma omp simd
          for (int64_t o = first; o < last; ++o) take(x[from + o], k, best[o], code[o]);
        } else if (C == 1 && w.stride == 2) {
#pragma omp simd
          for (int64_t o = first; o < last; ++o) take(x[from + 2 * o], k, best[o], code[o]);
        } else {
          for (int64_t o = first; o < last; ++o) {
#pragma omp simd
            for (int64_t c = 0; c < C; ++c) take(x[(from + o * w.stride) * C + c], k, best[o * C + c], code[o * C + c]);
          }
        }
      }
    }
  }
}

HFNN_CLONES static void forward_rows(const Call& call, int64_t begin, int64_t end) {
  with_dtype(call.x.dtype, [&](auto stored) HFNN_FLAT {
    using T = decltype(stored);
    using W = Wide<T>;
    const int64_t n = call.y.shape[3] * call.y.shape[4];
    const std::unique_ptr<W[]> best(new W[n]);
    const std::unique_ptr<int32_t[]> code(new int32_t[n]);
    for (int64_t row = begin; row < end; ++row) {
      forward_row<T>(call, row, best.get(), code.get());
      T* y = call.y.as<T>() + row * n;
      uint8_t* codes = call.codes.as<uint8_t>() + row * n;
#pragma omp simd
      for (int64_t i = 0; i < n; ++i) store(y[i], best[i]);
#pragma omp simd
      for (int64_t i = 0; i < n; ++i) codes[i] = uint8_t(code[i] == kNone ? 0 : code[i]);
    }
  });
}

// The index of the window whose position k is at i (at most one), or -1.
HFNN_INLINE int64_t window_at(const Axis& a, int64_t i, int64_t k) {
  const int64_t from = i + a.padding - k * a.dilation;
  return from >= 0 && from % a.stride == 0 && from / a.stride < a.out ? from / a.stride : -1;
}

// Adds a row of dy to `sum`, a row of dx. Codes in [number, number + window) point into this row.
template <class T, class W>
HFNN_INLINE void add_row(const T* dy, const uint8_t* codes, int32_t number, const Axis& w, int64_t C, W* sum) {
  for (int64_t o = 0; o < w.out; ++o) {
    for (int64_t k = 0; k < w.window; ++k) {
      const int64_t i = w.at(o, k);
      if (!w.inside(i)) continue;
#pragma omp simd
      for (int64_t c = 0; c < C; ++c)
        sum[i * C + c] += codes[o * C + c] == uint8_t(number + k) ? load(dy[o * C + c]) : W(0);
    }
  }
}

// Row (p, id, ih) of dx into `sum`. Descending k visits the windows in ascending order.
template <class T, class W>
HFNN_INLINE void backward_row(const Call& call, int64_t row, W* sum) {
  const Axis d = axis(call, 0), h = axis(call, 1), w = axis(call, 2);
  const int64_t ih = row % h.in, id = row / h.in % d.in, p = row / h.in / d.in, C = call.x.shape[4];
  std::fill_n(sum, w.in * C, W(0));
  for (int64_t kd = d.window; kd-- > 0;) {
    for (int64_t kh = h.window; kh-- > 0;) {
      const int64_t od = window_at(d, id, kd), oh = window_at(h, ih, kh);
      if (od < 0 || oh < 0) continue;
      const int64_t from = ((p * d.out + od) * h.out + oh) * w.out * C;
      const int32_t number = int32_t((kd * h.window + kh) * w.window);
      add_row(call.y.as<T>() + from, call.codes.as<uint8_t>() + from, number, w, C, sum);
    }
  }
}

// Plane p of dx into `sum`, if C is 1: adds each dy where its code points.
template <class T, class W>
HFNN_INLINE void backward_plane(const Call& call, int64_t p, const int64_t* places, W* sum) {
  const Axis d = axis(call, 0), h = axis(call, 1), w = axis(call, 2);
  std::fill_n(sum, d.in * h.in * w.in, W(0));
  for (int64_t od = 0; od < d.out; ++od) {
    for (int64_t oh = 0; oh < h.out; ++oh) {
      if (!d.reaches(od) || !h.reaches(oh)) continue;
      const int64_t row = ((p * d.out + od) * h.out + oh) * w.out;
      const T* dy = call.y.as<T>() + row;
      const uint8_t* codes = call.codes.as<uint8_t>() + row;
      const int64_t from = (d.at(od, 0) * h.in + h.at(oh, 0)) * w.in;
      for (int64_t o = 0; o < w.out; ++o)
        if (w.reaches(o)) sum[from + w.at(o, 0) + places[codes[o]]] += load(dy[o]);
    }
  }
}

// Rows [begin, end) of dx, or planes if C is 1.
HFNN_CLONES static void backward_parts(const Call& call, int64_t begin, int64_t end) {
  with_dtype(call.x.dtype, [&](auto stored) HFNN_FLAT {
    using T = decltype(stored);
    using W = Wide<T>;
    const int64_t *in = call.x.shape, C = in[4], n = C == 1 ? in[1] * in[2] * in[3] : in[3] * C;
    const std::unique_ptr<W[]> sum(new W[n]);
    // The offset of position k of a window from its first position.
    int64_t places[256] = {}, k = 0;
    for (int64_t kd = 0; kd < call.window[0]; ++kd)
      for (int64_t kh = 0; kh < call.window[1]; ++kh)
        for (int64_t kw = 0; kw < call.window[2]; ++kw)
          places[k++] = (kd * call.dilation[0] * in[2] + kh * call.dilation[1]) * in[3] + kw * call.dilation[2];
    for (int64_t part = begin; part < end; ++part) {
      if (C == 1)
        backward_plane<T>(call, part, places, sum.get());
      else
        backward_row<T>(call, part, sum.get());
      T* dx = call.x.as<T>() + part * n;
#pragma omp simd
      for (int64_t i = 0; i < n; ++i) store(dx[i], sum[i]);
    }
  });
}

static void check(const Call& call) {
  const Tensor &x = call.x, &y = call.y;
  expect_floating("x", x.dtype);
  HFNN_CHECK_EQ(x.dims, 5);
  HFNN_CHECK_EQ(y.dims, 5);
  expect_alike("x", x, x);
  expect_shape("y", y, {x.shape[0], y.shape[1], y.shape[2], y.shape[3], x.shape[4]});
  expect_dtype("y", y, x.dtype);
  expect_shape("codes", call.codes, y.shape, y.dims);
  expect_dtype("codes", call.codes, Dtype::uint8);
  for (int d = 0; d < 3; ++d) {
    HFNN_CHECK(call.window[d] > 0 && call.stride[d] > 0 && call.padding[d] >= 0 && call.dilation[d] > 0);
  }
  HFNN_CHECK(call.window[0] <= 256 && call.window[1] <= 256 && call.window[2] <= 256);
  HFNN_CHECK(call.window[0] * call.window[1] * call.window[2] <= 256);
}

static void forward(const Tensor& x, const Tensor& y, const Tensor& codes, Triple window, Triple stride, Triple padding,
                    Triple dilation, int64_t threads) {
  const Call call{x, y, codes, window, stride, padding, dilation};
  check(call);
  const int64_t rows = y.shape[0] * y.shape[1] * y.shape[2];
  if (y.numel() == 0) return;
  split(rows, std::max(x.numel(), y.numel()), threads,
        [&](int64_t begin, int64_t end) { forward_rows(call, begin, end); });
}

static void backward(const Tensor& dy, const Tensor& codes, const Tensor& dx, Triple window, Triple stride,
                     Triple padding, Triple dilation, int64_t threads) {
  const Call call{dx, dy, codes, window, stride, padding, dilation};
  check(call);
  const int64_t parts = dx.shape[0] * (dx.shape[4] == 1 ? 1 : dx.shape[1] * dx.shape[2]);
  if (dx.numel() == 0) return;
  split(parts, std::max(dx.numel(), dy.numel()), threads,
        [&](int64_t begin, int64_t end) { backward_parts(call, begin, end); });
}

const Pool pool_cpu = {forward, backward};

}  // namespace hfnn
