// The Driver on the CUDA runtime, which is linked statically. Stream memory operations exist only in the driver API.
// Its functions are looked up through the runtime, so that loading this module does not need libcuda.
#ifdef HFNN_CUDA
#include <cuda.h>
#include <cudaTypedefs.h>
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cctype>
#include <cstring>
#include <fstream>
#include <stdexcept>

#include "cuda/driver.h"

namespace hfreduce::gpu {

namespace {

std::runtime_error failure(const char* call, const char* name, const char* words) {
  return std::runtime_error(std::string(call) + ": " + name + ", " + words);
}

void check(cudaError_t error, const char* call) {
  if (error == cudaSuccess) return;
  static_cast<void>(cudaGetLastError());  // clears a non-sticky error, so that no later call reports it
  throw failure(call, cudaGetErrorName(error), cudaGetErrorString(error));
}
#define HFREDUCE_CALL(function, ...) check(function(__VA_ARGS__), #function)

// A driver API function, as of CUDA `version`.
template <class Function>
Function entry(const char* name, unsigned version) {
  void* found = nullptr;
  cudaDriverEntryPointQueryResult result;
  check(cudaGetDriverEntryPointByVersion(name, &found, version, cudaEnableDefault, &result), name);
  if (result != cudaDriverEntryPointSuccess || !found)
    throw std::runtime_error(std::string("the CUDA driver does not have ") + name);
  return reinterpret_cast<Function>(found);
}

int driver_version() {
  int version = 0;
  HFREDUCE_CALL(cudaDriverGetVersion, &version);
  return version;
}

struct Entries {
  PFN_cuStreamWriteValue32_v11070 write = entry<PFN_cuStreamWriteValue32_v11070>("cuStreamWriteValue32", 11070);
  PFN_cuStreamWaitValue32_v11070 wait = entry<PFN_cuStreamWaitValue32_v11070>("cuStreamWaitValue32", 11070);
#if CUDA_VERSION >= 13000
  // Honours its flags from 13.1 on; nullptr before.
  PFN_cuMemcpyBatchAsync_v13000 copies =
      driver_version() < 13010 ? nullptr : entry<PFN_cuMemcpyBatchAsync_v13000>("cuMemcpyBatchAsync", 13000);
#endif
  PFN_cuGetErrorName_v6000 name = entry<PFN_cuGetErrorName_v6000>("cuGetErrorName", 6000);
  PFN_cuGetErrorString_v6000 words = entry<PFN_cuGetErrorString_v6000>("cuGetErrorString", 6000);

  void check(CUresult error, const char* call) const {
    if (error == CUDA_SUCCESS) return;
    const char *told = nullptr, *explained = nullptr;
    name(error, &told), words(error, &explained);
    throw failure(call, told ? told : "unknown error", explained ? explained : std::to_string(error).c_str());
  }
};

const Entries& entries() {
  static const Entries entries;
  return entries;
}

// Makes the device current for its lifetime.
class Current {
 public:
  explicit Current(int device) {
    HFREDUCE_CALL(cudaGetDevice, &before_);
    if (before_ == device) return;
    HFREDUCE_CALL(cudaSetDevice, device);
    changed_ = true;
  }
  ~Current() {
    if (changed_) static_cast<void>(cudaSetDevice(before_));
  }
  Current(const Current&) = delete;

 private:
  int before_ = 0;
  bool changed_ = false;
};

std::string uuid_of(int device) {
  cudaDeviceProp properties;
  HFREDUCE_CALL(cudaGetDeviceProperties, &properties, device);
  std::string text;
  for (const char c : properties.uuid.bytes)
    for (const int half : {c >> 4 & 15, c & 15}) text += "0123456789abcdef"[half];
  return text;
}

int numa_node_of(int device) {
  char id[32];
  HFREDUCE_CALL(cudaDeviceGetPCIBusId, id, sizeof(id), device);
  std::string path = id;
  std::transform(path.begin(), path.end(), path.begin(), [](unsigned char c) { return std::tolower(c); });
  std::ifstream file("/sys/bus/pci/devices/" + path + "/numa_node");
  int node = -1;
  return file >> node ? node : -1;
}

CUdeviceptr address(const void* memory) { return static_cast<CUdeviceptr>(reinterpret_cast<uintptr_t>(memory)); }
CUstream raw(Stream stream) { return static_cast<CUstream>(stream); }
cudaStream_t of(Stream stream) { return static_cast<cudaStream_t>(stream); }
cudaEvent_t of_event(Event event) { return static_cast<cudaEvent_t>(event); }

class Runtime : public Driver {
 public:
  explicit Runtime(int device) : device_(device), uuid_(uuid_of(device)), node_(numa_node_of(device)) {
    HFREDUCE_CALL(cudaDeviceGetAttribute, &pitch_, cudaDevAttrMaxPitch, device);
    const Current current(device);
    HFREDUCE_CALL(cudaFree, nullptr);  // creates the context
    static_cast<void>(entries());
  }

  std::string uuid() const override { return uuid_; }
  int numa_node() const override { return node_; }

  // An IPC handle refers to the whole block that the memory is part of, and exposes all of it. So no other allocation
  // may share the block.
  void* allocate(size_t bytes) override {
    constexpr size_t kBlock = 2 << 20;
    const Current current(device_);
    void* memory = nullptr;
    cudaStream_t stream = nullptr;
    bytes = (std::max<size_t>(bytes, 1) + kBlock - 1) / kBlock * kBlock;
    HFREDUCE_CALL(cudaMalloc, &memory, bytes);
    // On a separate stream, because the default stream may wait for the caller's kernels.
    HFREDUCE_CALL(cudaStreamCreateWithFlags, &stream, cudaStreamNonBlocking);
    HFREDUCE_CALL(cudaMemsetAsync, memory, 0, bytes, stream);
    HFREDUCE_CALL(cudaStreamSynchronize, stream);
    HFREDUCE_CALL(cudaStreamDestroy, stream);
    return memory;
  }
  void release(void* memory) override {
    const Current current(device_);
    HFREDUCE_CALL(cudaFree, memory);
  }
  Handle handle(void* memory) override {
    const Current current(device_);
    Handle handle;
    cudaIpcMemHandle_t told;
    static_assert(sizeof(told) == sizeof(handle));
    HFREDUCE_CALL(cudaIpcGetMemHandle, &told, memory);
    std::memcpy(&handle, &told, sizeof(handle));
    return handle;
  }
  void* open(const Handle& theirs) override {
    const Current current(device_);
    cudaIpcMemHandle_t told;
    std::memcpy(&told, &theirs, sizeof(told));
    void* memory = nullptr;
    HFREDUCE_CALL(cudaIpcOpenMemHandle, &memory, told, cudaIpcMemLazyEnablePeerAccess);
    return memory;
  }
  void close(void* opened) override {
    const Current current(device_);
    HFREDUCE_CALL(cudaIpcCloseMemHandle, opened);
  }
  // Devices that this process does not see cannot be queried.
  bool reaches(const std::string& uuid) const override {
    if (uuid == uuid_) return true;
    int devices = 0;
    HFREDUCE_CALL(cudaGetDeviceCount, &devices);
    for (int i = 0; i < devices; ++i) {
      if (i == device_ || uuid_of(i) != uuid) continue;
      int can = 0;
      HFREDUCE_CALL(cudaDeviceCanAccessPeer, &can, device_, i);
      return can;
    }
    return false;
  }

  void pin(void* host, size_t bytes) override {
    const Current current(device_);
    HFREDUCE_CALL(cudaHostRegister, host, bytes, cudaHostRegisterPortable | cudaHostRegisterMapped);
    void* mapped = nullptr;
    HFREDUCE_CALL(cudaHostGetDevicePointer, &mapped, host, 0);
    if (mapped == host) return;
    static_cast<void>(cudaHostUnregister(host));
    throw std::runtime_error(
        "the device sees pinned host memory at another address than the host: this is not supported");
  }
  void unpin(void* host) override {
    const Current current(device_);
    HFREDUCE_CALL(cudaHostUnregister, host);
  }

  Stream stream(bool urgent) override {
    const Current current(device_);
    int least = 0, greatest = 0;
    HFREDUCE_CALL(cudaDeviceGetStreamPriorityRange, &least, &greatest);
    cudaStream_t stream = nullptr;
    HFREDUCE_CALL(cudaStreamCreateWithPriority, &stream, cudaStreamNonBlocking, urgent ? greatest : least);
    return stream;
  }
  void destroy(Stream stream) override {
    const Current current(device_);
    HFREDUCE_CALL(cudaStreamDestroy, of(stream));
  }
  bool capturing(Stream stream) override {
    const Current current(device_);
    cudaStreamCaptureStatus status;
    HFREDUCE_CALL(cudaStreamIsCapturing, of(stream), &status);
    return status != cudaStreamCaptureStatusNone;
  }
  Event event() override {
    const Current current(device_);
    cudaEvent_t event = nullptr;
    HFREDUCE_CALL(cudaEventCreateWithFlags, &event, cudaEventDisableTiming);
    return event;
  }
  void destroy_event(Event event) override {
    const Current current(device_);
    HFREDUCE_CALL(cudaEventDestroy, of_event(event));
  }
  void record(Event event, Stream stream) override {
    const Current current(device_);
    HFREDUCE_CALL(cudaEventRecord, of_event(event), of(stream));
  }
  void wait_event(Event event, Stream stream) override {
    const Current current(device_);
    HFREDUCE_CALL(cudaStreamWaitEvent, of(stream), of_event(event), 0);
  }
  bool reached(Event event) override {
    const Current current(device_);
    // While any thread captures a graph, a query in another mode would invalidate the capture.
    cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
    HFREDUCE_CALL(cudaThreadExchangeStreamCaptureMode, &mode);
    const cudaError_t error = cudaEventQuery(of_event(event));
    HFREDUCE_CALL(cudaThreadExchangeStreamCaptureMode, &mode);
    if (error == cudaErrorNotReady) {
      static_cast<void>(cudaGetLastError());
      return false;
    }
    check(error, "cudaEventQuery");
    return true;
  }

  void copy(void* to, const void* from, int64_t bytes, Stream stream) override {
    if (!bytes) return;
    const Current current(device_);
    HFREDUCE_CALL(cudaMemcpyAsync, to, from, static_cast<size_t>(bytes), cudaMemcpyDefault, of(stream));
  }
  void copy_within(void* to, const void* from, int64_t bytes, Stream stream) override {
#if CUDA_VERSION >= 13000
    if (bytes && entries().copies) {
      const Current current(device_);
      CUdeviceptr target = address(to), source = address(from);
      auto size = static_cast<size_t>(bytes);
      CUmemcpyAttributes how{};
      how.srcAccessOrder = CU_MEMCPY_SRC_ACCESS_ORDER_STREAM;
      how.flags = CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE;
      size_t first = 0;
      entries().check(entries().copies(&target, &source, &size, 1, &how, &first, 1, raw(stream)), "cuMemcpyBatchAsync");
      return;
    }
#endif
    copy(to, from, bytes, stream);
  }
  void copy_rows(void* to, int64_t to_step, const void* from, int64_t from_step, int64_t bytes, int64_t rows,
                 Stream stream) override {
    if (!bytes || !rows) return;
    const Current current(device_);
    if (rows > 1 && std::max(to_step, from_step) <= pitch_) {
      HFREDUCE_CALL(cudaMemcpy2DAsync, to, static_cast<size_t>(to_step), from, static_cast<size_t>(from_step),
                    static_cast<size_t>(bytes), static_cast<size_t>(rows), cudaMemcpyDefault, of(stream));
      return;
    }
    for (int64_t i = 0; i < rows; ++i)
      copy(static_cast<char*>(to) + i * to_step, static_cast<const char*>(from) + i * from_step, bytes, stream);
  }
  void write(uint32_t* flag, uint32_t value, Stream stream) override {
    const Current current(device_);
    entries().check(entries().write(raw(stream), address(flag), value, CU_STREAM_WRITE_VALUE_DEFAULT),
                    "cuStreamWriteValue32");
  }
  void wait(const uint32_t* flag, uint32_t value, Stream stream) override {
    const Current current(device_);
    entries().check(entries().wait(raw(stream), address(flag), value, CU_STREAM_WAIT_VALUE_GEQ), "cuStreamWaitValue32");
  }

 private:
  const int device_;
  const std::string uuid_;
  const int node_;
  int pitch_ = 0;
};

}  // namespace

std::unique_ptr<Driver> cuda(int index) { return std::make_unique<Runtime>(index); }

std::string why_no_cuda() {
  int devices = 0;
  const cudaError_t error = cudaGetDeviceCount(&devices);
  if (error != cudaSuccess) {
    static_cast<void>(cudaGetLastError());
    return std::string("cudaGetDeviceCount: ") + cudaGetErrorString(error);
  }
  if (!devices) return "there is no CUDA device";
  try {
    static_cast<void>(entries());
  } catch (const std::exception& error) {
    return error.what();
  }
  return "";
}

}  // namespace hfreduce::gpu
#else
#include <stdexcept>

#include "cuda/driver.h"

namespace hfreduce::gpu {

std::string why_no_cuda() { return "hfreduce was built without CUDA: no nvcc was found, or it was switched off"; }
std::unique_ptr<Driver> cuda(int) { throw std::runtime_error(why_no_cuda()); }

}  // namespace hfreduce::gpu
#endif
