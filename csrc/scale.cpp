// Scaling by a number in memory, on the CPU.
#include "scale.h"

#include "cpu.h"

namespace hfnn {

namespace {
struct Call {
  Tensor x, y;
  double factor;
};
}  // namespace

HFNN_CLONES static void forward_runs(const Call& call, int64_t begin, int64_t end) {
  with_runs(call.x.dtype, [&](auto t) HFNN_FLAT {
    const auto factor = static_cast<Wide<decltype(t)>>(call.factor);
    Runs<decltype(t)> xs(call.x, kRun), ys(call.y, kRun);
    for_runs(call.x.numel(), begin, end, [&](int64_t i, int64_t n) HFNN_FLAT {
      const auto* x = xs.read(i, n);
      auto* y = ys.open(i);
#pragma omp simd
      for (int64_t k = 0; k < n; ++k) store(y[k], factor * load(x[k]));
      ys.close(i, n);
    });
  });
}

static void forward(const Tensor& x, const Tensor& factor, const Tensor& y, int64_t threads) {
  expect_floating("x", x.dtype);
  expect_alike("x", x, x);
  expect_alike("y", y, x);
  if (!factor || factor.numel() != 1)
    refuse("factor", "be a tensor of one element", factor ? text(factor.shape, factor.dims) : "None");
  expect_shape("factor", factor, factor.shape, factor.dims);
  expect_dtype("factor", factor, wide(x.dtype));
  Call call{x, y, 0};
  with_wide(x.dtype, [&](auto w) { call.factor = *factor.as<decltype(w)>(); });
  if (call.factor == 1 && x.data == y.data) return;
  split_runs(x.numel(), threads, [&](int64_t begin, int64_t end) { forward_runs(call, begin, end); });
}

const Scale scale_cpu = {forward};

}  // namespace hfnn
