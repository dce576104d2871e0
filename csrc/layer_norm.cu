// Layer normalisation on CUDA. layer_norm.h has the definition, norm.cuh the kernels.
#include "layer_norm.h"
#include "norm.cuh"

namespace hfnn {
namespace {

void forward(const Tensor& x, const Tensor& weight, const Tensor& bias, const Tensor& y, const Tensor& mean,
             const Tensor& rstd, double eps, int64_t queue) {
  norm_forward<true>(x, weight, bias, y, mean, rstd, eps, 0, queue);
}

void rebuild(const Tensor& x, const Tensor& weight, const Tensor& bias, const Tensor& mean, const Tensor& rstd,
             const Tensor& y, int64_t queue) {
  norm_rebuild<true>(x, weight, bias, mean, rstd, y, 0, queue);
}

void backward(const Tensor& dy, const Tensor& x, const Tensor& weight, const Tensor& mean, const Tensor& rstd,
              const Tensor& dx, const Tensor& dweight, const Tensor& dbias, const Tensor& partials, int64_t queue) {
  norm_backward<true>(dy, x, weight, mean, rstd, dx, dweight, dbias, partials, 0, queue);
}

}  // namespace

const LayerNorm layer_norm_cuda = {norm_partials, forward, rebuild, backward};

}  // namespace hfnn
