// LayerNorm on the CPU. The arithmetic is in norm_cpu.h.
#include "layer_norm.h"

#include "norm_cpu.h"

namespace hfnn {

HFNN_NORM(true)

static void forward(const Tensor& x, const Tensor& weight, const Tensor& bias, const Tensor& y, const Tensor& mean,
                    const Tensor& rstd, double eps, int64_t threads) {
  norm_check(x, "y", y, weight, bias);
  if (mean) norm_check_statistic("mean", mean, x);
  if (rstd) norm_check_statistic("rstd", rstd, x);
  const Vector w(weight, wide(x.dtype), x.shape[1], 1), b(bias, wide(x.dtype), x.shape[1], kNoBias);
  norm_run(forward_rows, {x, y, {}, mean, rstd, {}, w, b, eps}, x.shape[0], threads);
}

static void rebuild(const Tensor& x, const Tensor& weight, const Tensor& bias, const Tensor& mean, const Tensor& rstd,
                    const Tensor& y, int64_t threads) {
  norm_check(x, "y", y, weight, bias);
  norm_check_statistic("mean", mean, x);
  norm_check_statistic("rstd", rstd, x);
  const Vector w(weight, wide(x.dtype), x.shape[1], 1), b(bias, wide(x.dtype), x.shape[1], kNoBias);
  norm_run(rebuild_rows, {x, y, {}, mean, rstd, {}, w, b}, x.shape[0], threads);
}

static void backward(const Tensor& dy, const Tensor& x, const Tensor& weight, const Tensor& mean, const Tensor& rstd,
                     const Tensor& dx, const Tensor& dweight, const Tensor& dbias, const Tensor& partials,
                     int64_t threads) {
  norm_check(x, "dy", dy, weight, {});
  norm_check_statistic("mean", mean, x);
  norm_check_statistic("rstd", rstd, x);
  norm_check_dx(dx, x);
  norm_check_gradient("dweight", dweight, weight, x, partials, 2);
  norm_check_gradient("dbias", dbias, weight, x, partials, 2);
  const bool params = dweight || dbias;
  const Vector w(weight, wide(x.dtype), x.shape[1], 1);
  norm_run(backward_chunks, {x, dy, dx, mean, rstd, params ? partials : Tensor(), w, w},
           norm_chunks(x.shape[0], x.shape[1]), threads);
  if (dweight) norm_sum_partials(partials, 0, dweight, threads);
  if (dbias) norm_sum_partials(partials, 1, dbias, threads);
}

const LayerNorm layer_norm_cpu = {norm_chunks, forward, rebuild, backward};

}  // namespace hfnn
