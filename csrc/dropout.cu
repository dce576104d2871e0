// Dropout on CUDA; dropout.h defines every bit of it.
#include "dropout.h"
#include "elementwise.cuh"
#include "philox.h"

namespace hfnn {
namespace {

// A group of N elements takes N / 4 counters.
struct Drop {
  uint32_t limit;  // threshold - 1: a word is kept when it is greater, which can drop everything too
  bool all;        // threshold 0, which keeps everything
  float scale;
  uint64_t seed, offset;
  const uint64_t* pair;  // {seed, offset} on the device, or null

  __device__ void begin() {
    if (!pair) return;
    seed = pair[0];
    offset = pair[1];
  }
  __device__ float apply(float x, uint32_t word) const { return word > limit || all ? x * scale : 0.0f; }

  template <int N>
  __device__ void operator()(float (&x)[N], const float (&)[N], int64_t group) const {
#pragma unroll
    for (int i = 0; i < N; i += 4) {
      const Words words = dropout_words(seed, offset + uint64_t(group) * (N / 4) + i / 4);
      x[i] = apply(x[i], words.a);
      x[i + 1] = apply(x[i + 1], words.b);
      x[i + 2] = apply(x[i + 2], words.c);
      x[i + 3] = apply(x[i + 3], words.d);
    }
  }
};

void forward(const Tensor& x, const Tensor& y, int64_t threshold, double scale, int64_t seed, int64_t offset,
             const Tensor& pair, int64_t queue) {
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
  const Drop drop = {uint32_t(threshold - 1), threshold == 0,   float(scale),
                     uint64_t(seed),          uint64_t(offset), pair.as<const uint64_t>()};
  with_floating("x", x.dtype, [&](auto type) { map<decltype(type), false>(x, Tensor{}, y, queue, drop); });
}

}  // namespace

const Dropout dropout_cuda = {forward};

}  // namespace hfnn
