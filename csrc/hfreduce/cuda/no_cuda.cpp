// What stands for runtime.cpp in builds without CUDA.
#ifndef HFNN_CUDA
#include <stdexcept>

#include "cuda/driver.h"

namespace hfreduce::gpu {

std::string why_no_cuda() { return "hfreduce was built without CUDA: no nvcc was found, or it was switched off"; }

std::unique_ptr<Driver> cuda(int) { throw std::runtime_error(why_no_cuda()); }

}  // namespace hfreduce::gpu
#endif
