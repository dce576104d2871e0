// Dropout on CUDA. dropout.h defines the bits.
#include "dropout.h"
#include "elementwise.cuh"
#include "philox.h"

namespace hfnn {
namespace {

// The keys of Philox's ten rounds. They are the same for every element, and free as operands from the constant bank.
// Only if the seed is on the device are they computed there.
constexpr int kRounds = 10;
struct Keys {
  uint32_t low[kRounds], high[kRounds];

  __host__ __device__ explicit Keys(uint64_t seed) {
#ifdef __CUDA_ARCH__
#pragma unroll
#endif
    for (uint32_t r = 0; r < kRounds; ++r) {
      low[r] = uint32_t(seed) + r * kPhiloxLow;
      high[r] = uint32_t(seed >> 32) + r * kPhiloxHigh;
    }
  }
};

// A group of N elements takes N / 4 counters. kAdd: the second tensor is the residual, to which kept elements are
// added.
template <bool kPair, bool kAdd>
struct Drop {
  uint32_t limit;  // threshold - 1: greater words are kept, which can also drop everything
  bool all;        // threshold 0: everything is kept
  float scale;
  Keys keys;
  uint64_t offset;
  const uint64_t* pair;  // {seed, offset} on the device

  __device__ void begin() {
    if (!kPair) return;
    keys = Keys(pair[0]);
    offset = pair[1];
  }
  __device__ float apply(float x, float residual, uint32_t word) const {
    const float kept = word > limit || all ? x * scale : 0.0f;
    return kAdd ? residual + kept : kept;
  }

  template <int N>
  __device__ void operator()(float (&x)[N], const float (&residual)[N], int64_t group) const {
#pragma unroll
    for (int i = 0; i < N; i += 4) {
      Words words = dropout_counter(offset + uint64_t(group) * (N / 4) + i / 4);
#pragma unroll
      for (int r = 0; r < kRounds; ++r) words = philox_round(words, keys.low[r], keys.high[r]);
      x[i] = apply(x[i], residual[i], words.a);
      x[i + 1] = apply(x[i + 1], residual[i + 1], words.b);
      x[i + 2] = apply(x[i + 2], residual[i + 2], words.c);
      x[i + 3] = apply(x[i + 3], residual[i + 3], words.d);
    }
  }
};

template <bool kAdd>
void run(const Tensor& x, const Tensor& residual, const Tensor& y, int64_t threshold, double scale, int64_t seed,
         int64_t offset, const Tensor& pair, int64_t queue) {
  expect_cuda("x", x);
  expect_like("y", y, x);
  HFNN_CHECK(threshold >= 0 && threshold <= int64_t(1) << 32);
  if (pair) {
    HFNN_CHECK_EQ(pair.dtype, Dtype::int64);
    HFNN_CHECK_EQ(pair.numel(), 2);
    HFNN_CHECK_EQ(pair.device, x.device);
  }
  if (x.numel() == 0) return;
  DeviceGuard guard(x.device);
  with_floating("x", x.dtype, [&](auto type) {
    const auto start = [&](auto paired) {
      const Drop<paired, kAdd> drop = {uint32_t(threshold - 1), threshold == 0,           float(scale), Keys(seed),
                                       uint64_t(offset),        pair.as<const uint64_t>()};
      map<Types<decltype(type)>, kAdd, 2>(x, residual, y, queue, drop);
    };
    if (pair)
      start(std::true_type{});
    else
      start(std::false_type{});
  });
}

void forward(const Tensor& x, const Tensor& y, int64_t threshold, double scale, int64_t seed, int64_t offset,
             const Tensor& pair, int64_t queue) {
  run<false>(x, {}, y, threshold, scale, seed, offset, pair, queue);
}

void add(const Tensor& x, const Tensor& residual, const Tensor& y, int64_t threshold, double scale, int64_t seed,
         int64_t offset, const Tensor& pair, int64_t queue) {
  expect_like("residual", residual, x);
  run<true>(x, residual, y, threshold, scale, seed, offset, pair, queue);
}

}  // namespace

const Dropout dropout_cuda = {forward, add};

}  // namespace hfnn
