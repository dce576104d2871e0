// Shared by the CPU kernels: storage dtypes, one compilation per instruction set, reductions, threads, checks.
//
// A kernel has three layers, so that one source is compiled for several instruction sets:
//   an always_inline template with the arithmetic, as plain loops for the vectoriser;
//   a plain function around it, marked HFNN_CLONES, which also selects the dtypes (target_clones does not work on
//   templates);
//   split(), which gives ranges of the work to threads. It is outside the clones, because gcc outlines the body of a
//   parallel region into a separate function, which would be compiled for the baseline.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstring>
#include <initializer_list>
#include <memory>
#include <string>
#include <type_traits>

#include "check.h"
#include "tensor.h"

#define HFNN_INLINE inline __attribute__((always_inline))
#define HFNN_FLAT __attribute__((always_inline))  // for lambdas, which do not accept `inline`

// gcc selects clones with an ifunc, which runs before ThreadSanitizer is initialised. A build for one machine
// (CMakeLists.txt) needs no clones.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && !defined(__SANITIZE_THREAD__) && \
    !defined(__AVX2__)
#define HFNN_HAS_CLONES
#define HFNN_CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define HFNN_CLONES
#endif

// target_clones does not work on templates: plain functions around forward_runs and backward_runs of one kind of a
// family.
#define HFNN_PASSES(kind)                                                                 \
  HFNN_CLONES static void forward_##kind(const Call& call, int64_t begin, int64_t end) {  \
    forward_runs<kind>(call, begin, end);                                                 \
  }                                                                                       \
  HFNN_CLONES static void backward_##kind(const Call& call, int64_t begin, int64_t end) { \
    backward_runs<kind>(call, begin, end);                                                \
  }

namespace hfnn {

struct bfloat16 {
  uint16_t bits;
};
struct float16 {
  uint16_t bits;
};

// The type in which a stored T is computed.
template <class T>
using Wide = std::conditional_t<std::is_same_v<T, double>, double, float>;

HFNN_INLINE uint32_t bits_of(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return bits;
}
HFNN_INLINE float float_of(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}

HFNN_INLINE float load(float x) { return x; }
HFNN_INLINE double load(double x) { return x; }
HFNN_INLINE float load(bfloat16 x) { return float_of(uint32_t(x.bits) << 16); }

// float16 in integer arithmetic. A subnormal is an integer times 2^-24. Infinity and NaN get the exponent 255.
HFNN_INLINE float load(float16 x) {
  const uint32_t magnitude = x.bits & 0x7fff, sign = uint32_t(x.bits & 0x8000) << 16;
  const uint32_t normal = (magnitude << 13) + (magnitude >= 0x7c00 ? (255u - 31u) << 23 : (127u - 15u) << 23);
  const uint32_t subnormal = bits_of(float(int32_t(magnitude)) * 0x1p-24f);
  return float_of((magnitude < 0x0400 ? subnormal : normal) | sign);
}

// Stores round to nearest, ties to even. A NaN stays a NaN.
HFNN_INLINE void store(float& y, float x) { y = x; }
HFNN_INLINE void store(double& y, double x) { y = x; }
HFNN_INLINE void store(bfloat16& y, float x) {
  const uint32_t bits = bits_of(x), rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
  y.bits = uint16_t((bits & 0x7fffffff) > 0x7f800000 ? 0x7fc0 : rounded);
}
// Below 2^-14, the smallest normal number, adding 0.5 leaves the rounded multiple of 2^-24 in the low bits of the sum.
HFNN_INLINE void store(float16& y, float x) {
  const uint32_t magnitude = bits_of(x) & 0x7fffffff, sign = bits_of(x) >> 16 & 0x8000;
  const uint32_t normal = (magnitude - ((127u - 15u) << 23) + 0xfff + (magnitude >> 13 & 1)) >> 13;
  const uint32_t subnormal = bits_of(float_of(magnitude) + 0.5f) - bits_of(0.5f);
  const uint32_t finite = magnitude < 0x38800000 ? subnormal : normal;
  const uint32_t special = magnitude > 0x7f800000 ? 0x7e00 | (magnitude >> 13 & 0x3ff) : 0x7c00;
  y.bits = uint16_t((magnitude >= 0x477ff000 ? special : finite) | sign);  // 65520 and above round to infinity
}

HFNN_INLINE float fused(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
HFNN_INLINE double fused(double a, double b, double c) { return __builtin_fma(a, b, c); }

// a * b + c for polynomials, whose bits are not promised. Fused where that is an instruction: not in a baseline x86-64
// build without clones. (In the baseline clone it is a slow but exact call.)
HFNN_INLINE float madd(float a, float b, float c) {
#if defined(HFNN_HAS_CLONES) || defined(__FMA__) || defined(__aarch64__)
  return fused(a, b, c);
#else
  return a * b + c;
#endif
}

// Sums over i < n what add(i, lane...) adds to K sets of lanes. Only n decides the order, so the bits are the same on
// every instruction set. There are enough lanes to hide the latency of an addition, and they fit into AVX2's registers.
template <class T, int K>
struct Sums {
  static constexpr int kLanes = 64 / K;
  T lane[K][kLanes] = {};

  template <class Add>
  HFNN_INLINE void run(int64_t n, Add add) {
    int64_t i = 0;
    for (; i + kLanes <= n; i += kLanes) {
#pragma omp simd
      for (int l = 0; l < kLanes; ++l) step(i + l, l, add);
    }
#pragma omp simd
    for (int l = 0; l < int(n - i); ++l) step(i + l, l, add);
  }
  template <class Add>
  HFNN_INLINE void step(int64_t i, int l, Add add) {
    if constexpr (K == 1) add(i, lane[0][l]);
    if constexpr (K == 2) add(i, lane[0][l], lane[1][l]);
  }
  HFNN_INLINE T total(int k) {
    T sixteen[16], four[4];
    for (int l = 0; l < 16; ++l) {
      sixteen[l] = lane[k][l] + lane[k][l + 16];
      if constexpr (K == 1) sixteen[l] += lane[k][l + 32] + lane[k][l + 48];
    }
    for (int l = 0; l < 4; ++l) four[l] = (sixteen[l] + sixteen[l + 4]) + (sixteen[l + 8] + sixteen[l + 12]);
    return (four[0] + four[1]) + (four[2] + four[3]);
  }
};

template <class T, class Term>
HFNN_INLINE T sum(int64_t n, Term term) {
  Sums<T, 1> sums;
  sums.run(n, [=](int64_t i, T& lane) HFNN_FLAT { lane += term(i); });
  return sums.total(0);
}

// In float16.cpp: convert n elements of a 16-bit dtype. float16 uses F16C where available; the vectoriser does not emit
// it.
void widen(Dtype dtype, const void* x, float* y, int64_t n);
void narrow(Dtype dtype, const float* x, void* y, int64_t n);

// A tensor's elements, run by run, for a kernel that reads and writes T. With T = float, 16-bit elements are converted
// in a buffer, which has room for the `longest` run.
template <class T>
class Runs {
 public:
  HFNN_INLINE Runs(const Tensor& t, int64_t longest) : data_(t.as<T>()), half_(nullptr), dtype_(t.dtype) {
    if (!std::is_same_v<T, float> || (t.dtype != Dtype::float16 && t.dtype != Dtype::bfloat16)) return;
    half_ = t.as<uint16_t>();
    buffer_.reset(new T[longest]);
  }
  HFNN_INLINE const T* read(int64_t begin, int64_t n) {
    if constexpr (std::is_same_v<T, float>)
      if (half_) return widen(dtype_, half_ + begin, buffer_.get(), n), buffer_.get();
    return data_ + begin;
  }
  HFNN_INLINE T* open(int64_t begin) { return half_ ? buffer_.get() : data_ + begin; }
  HFNN_INLINE void close(int64_t begin, int64_t n) {
    if constexpr (std::is_same_v<T, float>)
      if (half_) narrow(dtype_, buffer_.get(), half_ + begin, n);
  }

 private:
  T* data_;
  uint16_t* half_;
  Dtype dtype_;
  std::unique_ptr<T[]> buffer_;
};

// f(T{}) with the T that Runs uses for a dtype.
template <class F>
HFNN_INLINE void with_runs(Dtype dtype, F f) {
  if (dtype == Dtype::float32 || dtype == Dtype::float16) f(float{});
  if (dtype == Dtype::bfloat16) f(bfloat16{});
  if (dtype == Dtype::float64) f(double{});
}

// f(X{}, Y{}) for the pairs that expect_pair() accepts.
template <class F>
HFNN_INLINE void with_runs(Dtype x, Dtype y, F f) {
  if (x == y) return with_runs(x, [=](auto t) HFNN_FLAT { f(t, t); });
  if (x == Dtype::bfloat16) return f(bfloat16{}, float{});
  if (y == Dtype::bfloat16) return f(float{}, bfloat16{});
  f(float{}, float{});
}

// f(T{}) with the storage type of a dtype.
template <class F>
HFNN_INLINE void with_dtype(Dtype dtype, F f) {
  if (dtype == Dtype::float16)
    f(float16{});
  else
    with_runs(dtype, f);
}

// The dtype of the arithmetic, and f(W{}) with its type.
inline Dtype wide(Dtype dtype) { return dtype == Dtype::float64 ? dtype : Dtype::float32; }
template <class F>
HFNN_INLINE void with_wide(Dtype dtype, F f) {
  if (dtype == Dtype::float64)
    f(double{});
  else
    f(float{});
}

// body(begin, end) over [0, count), on `threads` threads unless there is too little work: waking them costs about as
// much as 32768 elements.
template <class Body>
void split(int64_t count, int64_t elements, int64_t threads, Body body) {
  const int64_t parts = elements < 32768 ? 1 : std::min(threads, count);
#ifdef _OPENMP
  if (parts > 1) {
#pragma omp parallel for num_threads(int(parts)) schedule(static)
    for (int64_t part = 0; part < parts; ++part) body(count * part / parts, count * (part + 1) / parts);
    return;
  }
#endif
  body(0, count);
}

// Elementwise kernels work in runs of kRun elements, short enough for the L1 cache.
constexpr int64_t kRun = 1024;
HFNN_INLINE int64_t count_runs(int64_t elements) { return (elements + kRun - 1) / kRun; }
template <class Body>
void split_runs(int64_t elements, int64_t threads, Body body) {
  split(count_runs(elements), elements, threads, body);
}
// body(first element, number of elements) for the runs [begin, end).
template <class Body>
HFNN_INLINE void for_runs(int64_t elements, int64_t begin, int64_t end, Body body) {
  for (int64_t run = begin; run < end; ++run) body(run * kRun, std::min(kRun, elements - run * kRun));
}

// `offset` + a vector of n weights, in the dtype of the arithmetic, so that templates depend only on x and y. Borrows a
// vector that already has this form. An absent vector is n times `absent`.
class Vector {
 public:
  Vector(const Tensor& t, Dtype dtype, int64_t n, double absent, double offset = 0) : data_(t.data) {
    if (t.dtype == dtype && offset == 0) return;
    owned_.reset(new char[n * sizeof(double)]);
    data_ = owned_.get();
    const double add = offset == 0 ? -0.0 : offset;  // adding -0.0 leaves every weight unchanged, -0.0 too
    with_wide(dtype, [&](auto wide) { fill(static_cast<decltype(wide)*>(data_), t, n, absent, add); });
  }
  template <class T>
  const T* as() const {
    return static_cast<const T*>(data_);
  }

 private:
  template <class T>
  static void fill(T* out, const Tensor& t, int64_t n, double absent, double offset) {
    if (!t) std::fill_n(out, n, T(absent));
    with_dtype(t.dtype, [&](auto stored) {
      const auto* in = t.as<decltype(stored)>();
      for (int64_t i = 0; i < n; ++i) out[i] = T(offset) + T(load(in[i]));
    });
  }
  std::unique_ptr<char[]> owned_;
  void* data_;
};

inline std::string text(const int64_t* shape, int dims) {
  std::string list;
  for (int i = 0; i < dims; ++i) list += (i ? ", " : "") + std::to_string(shape[i]);
  return "(" + list + (dims == 1 ? ",)" : ")");
}

[[noreturn]] inline void refuse(const char* tensor, const std::string& must, const std::string& got) {
  throw std::invalid_argument(std::string(tensor) + " must " + must + ", got " + got);
}

inline void expect_dtype(const char* tensor, const Tensor& t, Dtype dtype) {
  if (t.dtype != dtype) refuse(tensor, std::string("be ") + name(dtype), name(t.dtype));
}

// Checks for a contiguous tensor of this shape on the CPU.
inline void expect_shape(const char* tensor, const Tensor& t, const int64_t* shape, int dims) {
  if (!t) refuse(tensor, "be a tensor", "None");
  if (t.dims != dims || !std::equal(shape, shape + dims, t.shape))
    refuse(tensor, "have the shape " + text(shape, dims), text(t.shape, t.dims));
  if (t.device != -1) refuse(tensor, "be on the CPU", "one on cuda:" + std::to_string(t.device));
  if (!t.contiguous()) refuse(tensor, "be contiguous", "the strides " + text(t.strides, t.dims));
}
inline void expect_shape(const char* tensor, const Tensor& t, std::initializer_list<int64_t> shape) {
  expect_shape(tensor, t, shape.begin(), int(shape.size()));
}
inline void expect_alike(const char* tensor, const Tensor& t, const Tensor& x) {
  expect_shape(tensor, t, x.shape, x.dims);
  expect_dtype(tensor, t, x.dtype);
}

inline void expect_floating(const char* tensor, Dtype dtype) {
  if (dtype < Dtype::float32 || dtype > Dtype::float64)
    refuse(tensor, "be float32, bfloat16, float16 or float64", name(dtype));
}

// Checks the storage dtypes of an input and an output: equal, or float32 and a 16-bit dtype.
inline void expect_pair(const char* in, Dtype x, const char* out, Dtype y) {
  expect_floating(in, x);
  expect_floating(out, y);
  const bool either = x == Dtype::float32 || y == Dtype::float32;
  if (x == y || (either && x != Dtype::float64 && y != Dtype::float64)) return;
  const char* others = x == Dtype::float32 ? ", bfloat16 or float16" : x == Dtype::float64 ? "" : " or float32";
  refuse(out, std::string("be ") + name(x) + others + " when " + in + " is " + name(x), name(y));
}

}  // namespace hfnn
