// Root-mean-square normalisation on CUDA. rms_norm.h has the definition, norm.cuh the kernels.
#include "norm.cuh"
#include "rms_norm.h"

namespace hfnn {
namespace {

void forward(const Tensor& x, const Tensor& weight, const Tensor& y, const Tensor& rstd, double eps, double offset,
             int64_t queue) {
  norm_forward<false>(x, weight, Tensor{}, y, Tensor{}, rstd, eps, offset, queue);
}

void rebuild(const Tensor& x, const Tensor& weight, const Tensor& rstd, const Tensor& y, double offset, int64_t queue) {
  norm_rebuild<false>(x, weight, Tensor{}, Tensor{}, rstd, y, offset, queue);
}

void backward(const Tensor& dy, const Tensor& x, const Tensor& weight, const Tensor& rstd, const Tensor& dx,
              const Tensor& dweight, const Tensor& partials, double offset, int64_t queue) {
  norm_backward<false>(dy, x, weight, Tensor{}, rstd, dx, dweight, Tensor{}, partials, offset, queue);
}

}  // namespace

const RmsNorm rms_norm_cuda = {norm_partials, forward, rebuild, backward};

}  // namespace hfnn
