// Whether the CUDA kernels can run on this machine.
#include <cuda_runtime.h>

#include <string>

namespace hfnn {

const char* cuda_refusal();  // nullptr, or the reason

namespace {

std::string version(int number) { return std::to_string(number / 1000) + "." + std::to_string(number % 1000 / 10); }

// A driver supports every runtime of its own major version, and older ones.
std::string refusal() {
  constexpr int kNeeded = CUDART_VERSION / 1000 * 1000;
  int driver = 0;
  if (cudaDriverGetVersion(&driver) != cudaSuccess || driver == 0) return "there is no NVIDIA driver";
  if (driver < kNeeded)
    return "the driver supports CUDA " + version(driver) + ", these kernels need " + version(kNeeded);
  int count = 0;
  const cudaError_t error = cudaGetDeviceCount(&count);
  if (error != cudaSuccess) {
    cudaGetLastError();  // so that torch does not see this error
    return std::string("CUDA reports: ") + cudaGetErrorString(error);
  }
  if (count == 0) return "there is no CUDA device";
  for (int device = 0; device < count; ++device) {
    int major = 0;
    cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
    if (major < 8) return "device " + std::to_string(device) + " has a compute capability below 8.0";
  }
  return "";
}

}  // namespace

const char* cuda_refusal() {
  static const std::string reason = refusal();
  return reason.empty() ? nullptr : reason.c_str();
}

}  // namespace hfnn
