// Dropout on the CPU; the arithmetic is in dropout_cpu.h.
#include "dropout.h"

#include "dropout_cpu.h"

namespace hfnn {

namespace {
struct Call {
  Tensor x, residual, y;
  Drop drop;
};
}  // namespace

template <bool kAdd>
HFNN_INLINE void run(const Call& call, int64_t begin, int64_t end) {
  with_wide(call.x.dtype, [&](auto wide) HFNN_FLAT {
    Runs<decltype(wide)> xs(call.x, kRun), residuals(call.residual, kRun), ys(call.y, kRun);
    drop_elements<kAdd>(call.drop, xs, residuals, ys, begin * kRun, std::min(end * kRun, call.x.numel()));
  });
}

HFNN_CLONES static void forward_runs(const Call& call, int64_t begin, int64_t end) { run<false>(call, begin, end); }
HFNN_CLONES static void add_runs(const Call& call, int64_t begin, int64_t end) { run<true>(call, begin, end); }

static void forward(const Tensor& x, const Tensor& y, int64_t threshold, double scale, int64_t seed, int64_t offset,
                    const Tensor& pair, int64_t threads) {
  drop_check(x, "y", y);
  const Call call{x, {}, y, drop_of(threshold, scale, seed, offset, pair)};
  split_runs(x.numel(), threads, [&](int64_t begin, int64_t end) { forward_runs(call, begin, end); });
}

static void add(const Tensor& x, const Tensor& residual, const Tensor& y, int64_t threshold, double scale, int64_t seed,
                int64_t offset, const Tensor& pair, int64_t threads) {
  drop_check_sum(x, residual, "y", y);
  const Call call{x, residual, y, drop_of(threshold, scale, seed, offset, pair)};
  split_runs(x.numel(), threads, [&](int64_t begin, int64_t end) { add_runs(call, begin, end); });
}

const Dropout dropout_cpu = {forward, add};

}  // namespace hfnn
