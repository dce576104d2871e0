// Functions of kernels/*.py called from C++. The first call of a kind runs in Python, which reports its launches. Later
// calls pass the same compiled kernels to the driver, with their own addresses, and run no Python.
//
// Two calls are of one kind if None, numbers, dtypes, devices, sizes, strides and alignment to 16 bytes agree, and the
// same tensors share an address. So a function must not depend on anything else: it computes a grid and constants from
// these and launches through kernels/launch.py. If that cannot be repeated (torch operators, descriptors, scratch
// memory, Triton's interpreter), or while someone watches Triton's launches, every call runs in Python.
#pragma once
#include <ATen/core/Tensor.h>
#include <torch/csrc/python_headers.h>

#include <array>
#include <atomic>
#include <concepts>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

namespace pybind11 {
class module_;
}

namespace hfnn::node {

// An integer that differs at each call, such as a seed or an offset. It is not part of the kind. The function may pass
// it to kernels that do not specialise on it. Other uses are detected when it is recorded, and run in Python.
struct Fresh {
  int64_t value;
};

// The same for a number that kernels take as float32.
struct FreshReal {
  double value;
};

struct Arg {
  enum Kind : uint8_t { none, tensor, integer, fresh, fresh_real, real, boolean } kind = none;
  union {
    const at::Tensor* t;  // must outlive the call
    int64_t i = 0;
    double d;
  };

  Arg() = default;
  Arg(std::nullopt_t) {}
  Arg(const at::Tensor& x) {
    if (x.defined()) kind = tensor, t = &x;
  }
  Arg(const std::optional<at::Tensor>& x) {
    if (x && x->defined()) kind = tensor, t = &*x;
  }
  Arg(Fresh x) : kind(fresh), i(x.value) {}
  Arg(FreshReal x) : kind(fresh_real), d(x.value) {}
  template <std::same_as<bool> T>
  Arg(T x) : kind(boolean), i(x) {}
  template <std::integral T>
    requires(!std::same_as<T, bool>)
  Arg(T x) : kind(integer), i(static_cast<int64_t>(x)) {}
  template <std::floating_point T>
  Arg(T x) : kind(real), d(x) {}
};

// The launch of one kernel: what the driver gets, without the values that differ per call.
struct TritonLaunch {
  struct Patch {
    uint16_t param, arg;
    int64_t offset;  // bytes added to the tensor's address
  };
  void* function = nullptr;
  std::array<unsigned, 3> grid{};
  unsigned threads = 0, shared = 0;
  PyObject* hooks = nullptr;     // a list; not empty while launch hooks are set
  std::vector<uint64_t> params;  // 8 bytes each; the driver reads as many as the kernel takes
  std::vector<Patch> patches;
};

// One function of a kernel module, such as hfnn.kernels.layer_norm.forward. Thread-safe. All tensors are on one device,
// which need not be the current one. Launches use its current stream.
class TritonFunction {
 public:
  // Needs the GIL. The reference is never released.
  explicit TritonFunction(PyObject* function);
  TritonFunction(const TritonFunction&) = delete;
  TritonFunction& operator=(const TritonFunction&) = delete;

  // args: all but `queue`, which is added if the function has it. Call it without the GIL if possible, because the
  // driver blocks while the device's queue is full. Runs below autograd. Python's exceptions propagate.
  void operator()(c10::ArrayRef<Arg> args);

  struct Counts {
    int64_t calls = 0, replays = 0, kinds = 0;
    std::string refusal;  // why the last call that was not recorded could not be
  };
  Counts counts();

 private:
  struct Entry {
    bool recorded = false;
    int tries = 0;
    std::vector<TritonLaunch> launches;  // constant once recorded
  };
  using Key = c10::ArrayRef<uint64_t>;
  struct Hash {
    using is_transparent = void;
    size_t operator()(Key key) const;
  };
  struct Equal {
    using is_transparent = void;
    bool operator()(Key a, Key b) const { return a == b; }
  };

  struct Recording {
    std::optional<std::vector<TritonLaunch>> launches;
    std::string refusal;
    bool again = true;
  };
  Recording record(c10::ArrayRef<Arg> args, c10::Device device);
  void call(c10::ArrayRef<Arg> args, c10::Device device);

  PyObject* function_;
  std::string name_;
  int queue_ = -1;    // its position among the arguments
  std::mutex mutex_;  // for the members below; not held while Python runs or a kernel is launched
  std::unordered_map<std::vector<uint64_t>, Entry, Hash, Equal> entries_;
  Counts counts_;
};

// hfnn._autograd: TritonFunction, Fresh, FreshReal, fake_driver.
void bind_triton(pybind11::module_& m);

}  // namespace hfnn::node
