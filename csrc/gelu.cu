// Gaussian error linear unit on CUDA. gelu.h has the definition.
//
// Two bytes in and two out leave time for about 25 instructions per element. So 16-bit dtypes use their own formulas
// with one ex2 and one reciprocal, whose error is far below half an ulp of float16. float32 has twice the time, and
// uses exact functions.
#include "elementwise.cuh"
#include "gelu.h"

namespace hfnn {
namespace {

__device__ inline float fast_exp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ inline float fast_reciprocal(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

constexpr float kSqrtHalf = 0.70710678118654752f, kInvSqrtTwoPi = 0.39894228040143268f;

// Phi(x), the normal distribution, and e = exp(-x^2 / 2).
//
// With a = |x| and t = 1 / (1 + 0.375 a), the tail Phi(-a) is e * t (c1 + c2 t + c3 t^2 + c4 t^3 + c5 t^4), the form of
// Abramowitz and Stegun 7.1.26. The c are fitted to the relative error: at most 2.7e-5 for a below 13, where float32
// ends. This is a tenth of half an ulp of float16, for small and large outputs.
template <bool kFast>
__device__ inline float normal(float x, float& e) {
  if constexpr (kFast) {
    e = fast_exp2(x * x * -0.72134752044448170f);  // log2(e) / 2
    const float t = fast_reciprocal(fmaf(fabsf(x), 0.375f, 1.0f));
    float p = fmaf(t, -0.09134633f, 0.20184635f);
    p = fmaf(t, p, 0.08235078f);
    p = fmaf(t, p, 0.1581176f);
    p = fmaf(t, p, 0.14901983f);
    const float tail = p * t * e;
    return x < 0 ? tail : 1 - tail;
  } else {
    e = expf(x * x * -0.5f);
    return 0.5f * (1 + erff(x * kSqrtHalf));
  }
}

// e = exp(-2u), u = sqrt(2/pi) (x + 0.044715 x^3). The tanh form uses (1 + tanh(u)) / 2 = 1 / (1 + e), which never
// cancels.
constexpr float kTwoU1 = 1.5957691216057308f, kTwoU3 = 0.071354816272600249f;
constexpr float kLog2e = 1.4426950408889634f;

template <bool kFast>
__device__ inline float exp_minus_two_u(float x) {
  if constexpr (kFast)
    return fast_exp2(x * fmaf(x * x, -kTwoU3 * kLog2e, -kTwoU1 * kLog2e));
  else
    return expf(-x * fmaf(x * x, kTwoU3, kTwoU1));
}

template <bool kFast>
__device__ inline float divide(float a, float b) {
  return kFast ? a * fast_reciprocal(b) : __fdiv_rn(a, b);
}

template <bool kFast, bool kTanh>
struct Forward {
  __device__ void begin() {}
  template <int N>
  __device__ void operator()(float (&x)[N], const float (&)[N], int64_t) const {
#pragma unroll
    for (int i = 0; i < N; ++i) {
      float e;
      x[i] = kTanh ? divide<kFast>(x[i], 1 + exp_minus_two_u<kFast>(x[i])) : x[i] * normal<kFast>(x[i], e);
    }
  }
};

template <bool kFast, bool kTanh>
struct Backward {
  __device__ void begin() {}
  template <int N>
  __device__ void operator()(float (&dy)[N], const float (&x)[N], int64_t) const {
#pragma unroll
    for (int i = 0; i < N; ++i) {
      if constexpr (kTanh) {
        const float e = exp_minus_two_u<kFast>(x[i]), s = divide<kFast>(1, 1 + e);
        const float rest = x[i] > 0 ? e * s : 1 - s;                // 1 - s without cancellation
        const float slope = fmaf(x[i] * x[i], 3 * kTwoU3, kTwoU1);  // d(2u)/dx
        dy[i] *= fmaf(x[i] * s * rest, slope, s);
      } else {
        float e;
        const float phi = normal<kFast>(x[i], e);
        dy[i] *= fmaf(x[i] * kInvSqrtTwoPi, e, phi);
      }
    }
  }
};

// kFast: arithmetic that is accurate enough for 16 bits.
template <class T, bool kFast, bool kTwo, template <bool, bool> class F>
void run(const Tensor& a, const Tensor& b, const Tensor& y, bool tanh, int64_t queue) {
  if (tanh)
    map<T, kTwo, 1>(a, b, y, queue, F<kFast, true>{});
  else
    map<T, kTwo, kTwo ? 1 : 2>(a, b, y, queue, F<kFast, false>{});
}

// f(T{}) for the 16-bit dtype of x if y or dy is float32.
template <class F>
void with_narrow(const Tensor& x, const Tensor& wide, F&& f) {
  HFNN_CHECK_EQ(wide.dtype, Dtype::float32);
  if (x.dtype == Dtype::bfloat16) return f(__nv_bfloat16{});
  HFNN_CHECK_EQ(x.dtype, Dtype::float16);
  f(__half{});
}

void forward(const Tensor& x, const Tensor& y, bool tanh, int64_t queue) {
  expect_cuda("x", x);
  expect_beside("y", y, x);
  if (y.numel() == 0) return;
  DeviceGuard guard(x.device);
  if (x.dtype == y.dtype)
    with_floating("x", x.dtype, [&](auto type) {
      using T = decltype(type);
      run<Types<T>, sizeof(T) == 2, false, Forward>(x, Tensor{}, y, tanh, queue);
    });
  else
    with_narrow(x, y, [&](auto type) {
      using T = decltype(type);
      run<Types<T, T, float>, false, false, Forward>(x, Tensor{}, y, tanh, queue);
    });
}

void rebuild(const Tensor& x, const Tensor& y, bool tanh, int64_t queue) {
  expect_cuda("x", x);
  expect_beside("y", y, x);
  if (y.numel() == 0) return;
  DeviceGuard guard(x.device);
  with_floating("x", x.dtype, [&](auto in) {
    with_floating("y", y.dtype, [&](auto out) {
      using T = Types<decltype(in), decltype(in), decltype(out)>;
      run<T, false, false, Forward>(x, Tensor{}, y, tanh, queue);
    });
  });
}

void backward(const Tensor& dy, const Tensor& x, const Tensor& dx, bool tanh, int64_t queue) {
  expect_cuda("x", x);
  expect_beside("dy", dy, x);
  expect_like("dx", dx, x);
  if (x.numel() == 0) return;
  DeviceGuard guard(x.device);
  if (x.dtype == dy.dtype)
    with_floating("x", x.dtype, [&](auto type) {
      using T = decltype(type);
      run<Types<T>, sizeof(T) == 2, true, Backward>(dy, x, dx, tanh, queue);
    });
  else
    with_narrow(x, dy, [&](auto type) {
      using T = decltype(type);
      run<Types<float, T, T>, false, true, Backward>(dy, x, dx, tanh, queue);
    });
}

}  // namespace

const Gelu gelu_cuda = {forward, rebuild, backward};

}  // namespace hfnn
