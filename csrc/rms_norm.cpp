// RMSNorm on the CPU. The arithmetic is in norm_cpu.h.
#include "rms_norm.h"

#include "norm_cpu.h"

namespace hfnn {

HFNN_NORM(false)

static void forward(const Tensor& x, const Tensor& weight, const Tensor& y, const Tensor& rstd, double eps,
                    double offset, int64_t threads) {
  norm_check(x, "y", y, weight, {});
  if (rstd) norm_check_statistic("rstd", rstd, x);
  const Vector w(weight, wide(x.dtype), x.shape[1], 1, offset);
  norm_run(forward_rows, {x, y, {}, {}, rstd, {}, w, w, eps}, x.shape[0], threads);
}

static void rebuild(const Tensor& x, const Tensor& weight, const Tensor& rstd, const Tensor& y, double offset,
                    int64_t threads) {
  norm_check(x, "y", y, weight, {});
  norm_check_statistic("rstd", rstd, x);
  const Vector w(weight, wide(x.dtype), x.shape[1], 1, offset);
  norm_run(rebuild_rows, {x, y, {}, {}, rstd, {}, w, w}, x.shape[0], threads);
}

static void backward(const Tensor& dy, const Tensor& x, const Tensor& weight, const Tensor& rstd, const Tensor& dx,
                     const Tensor& dweight, const Tensor& partials, double offset, int64_t threads) {
  norm_check(x, "dy", dy, weight, {});
  norm_check_statistic("rstd", rstd, x);
  norm_check_dx(dx, x);
  norm_check_gradient("dweight", dweight, weight, x, partials, 1);
  const Vector w(weight, wide(x.dtype), x.shape[1], 1, offset);
  norm_run(backward_chunks, {x, dy, dx, {}, rstd, dweight ? partials : Tensor(), w, w},
           norm_chunks(x.shape[0], x.shape[1]), threads);
  if (dweight) norm_sum_partials(partials, 0, dweight, threads);
}

const RmsNorm rms_norm_cpu = {norm_chunks, forward, rebuild, backward};

}  // namespace hfnn
