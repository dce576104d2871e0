// Norms of sums on the CPU. Each block of rows is summed, then normalised while it is in the cache.
#include "add_norm.h"

#include "dropout_cpu.h"
#include "norm_cpu.h"

namespace hfnn {

namespace {
struct Call {
  Tensor x, residual;
  Drop drop;
  Norm norm;      // of the sum
  int64_t block;  // rows
};
}  // namespace

template <bool kCentred>
HFNN_INLINE void run(const Call& call, int64_t begin, int64_t end) {
  const int64_t rows = call.norm.rows(), cols = call.norm.cols();
  for (int64_t block = begin; block < end; ++block) {
    const int64_t first = block * call.block, last = std::min(first + call.block, rows);
    with_runs(call.x.dtype, call.norm.x.dtype, [&](auto in, auto out) HFNN_FLAT {
      Runs<decltype(in)> xs(call.x, kRun);
      Runs<decltype(out)> residuals(call.residual, kRun), sums(call.norm.x, kRun);
      drop_elements<true>(call.drop, xs, residuals, sums, first * cols, last * cols);
    });
    norm_forward<kCentred, false>(call.norm, first, last);
  }
}

HFNN_CLONES static void layer_norm_blocks(const Call& call, int64_t begin, int64_t end) { run<true>(call, begin, end); }
HFNN_CLONES static void rms_norm_blocks(const Call& call, int64_t begin, int64_t end) { run<false>(call, begin, end); }

// Rows in a block of about 8192 elements. A block starts at a multiple of 4 elements: Philox gives 4 random words at
// once.
static int64_t block_of(int64_t cols) {
  const int64_t unit = cols % 4 == 0 ? 1 : 4;
  return std::max(unit, 8192 / cols / unit * unit);
}

static void split_blocks(void (*blocks)(const Call&, int64_t, int64_t), const Call& call, int64_t threads) {
  const int64_t rows = call.norm.rows();
  split((rows + call.block - 1) / call.block, rows * call.norm.cols(), threads,
        [&](int64_t begin, int64_t end) { blocks(call, begin, end); });
}

static void add_layer_norm(const Tensor& x, const Tensor& residual, const Tensor& sum, const Tensor& weight,
                           const Tensor& bias, const Tensor& y, const Tensor& mean, const Tensor& rstd, double eps,
                           int64_t threshold, double scale, int64_t seed, int64_t offset, const Tensor& pair,
                           int64_t threads) {
  norm_check(sum, "y", y, weight, bias);
  drop_check_sum(x, residual, "sum", sum);
  if (mean) norm_check_statistic("mean", mean, sum);
  if (rstd) norm_check_statistic("rstd", rstd, sum);
  const int64_t cols = sum.shape[1];
  const Vector w(weight, wide(sum.dtype), cols, 1), b(bias, wide(sum.dtype), cols, kNoBias);
  const Drop drop = drop_of(threshold, scale, seed, offset, pair);
  split_blocks(layer_norm_blocks, {x, residual, drop, {sum, y, {}, mean, rstd, {}, w, b, eps}, block_of(cols)},
               threads);
}

static void add_rms_norm(const Tensor& x, const Tensor& residual, const Tensor& sum, const Tensor& weight,
                         const Tensor& y, const Tensor& rstd, double eps, double weight_offset, int64_t threshold,
                         double scale, int64_t seed, int64_t offset, const Tensor& pair, int64_t threads) {
  norm_check(sum, "y", y, weight, {});
  drop_check_sum(x, residual, "sum", sum);
  if (rstd) norm_check_statistic("rstd", rstd, sum);
  const int64_t cols = sum.shape[1];
  const Vector w(weight, wide(sum.dtype), cols, 1, weight_offset);
  const Drop drop = drop_of(threshold, scale, seed, offset, pair);
  split_blocks(rms_norm_blocks, {x, residual, drop, {sum, y, {}, {}, rstd, {}, w, w, eps}, block_of(cols)}, threads);
}

const AddLayerNorm add_layer_norm_cpu = {add_layer_norm};
const AddRmsNorm add_rms_norm_cpu = {add_rms_norm};

}  // namespace hfnn
