// Functions of kernels/*.py called from C++. The first call of a kind runs in Python, which says what it launched;
// later ones hand the same compiled kernels to the driver, with the addresses of this call, and run no Python.
//
// Two calls are of one kind when None, numbers, dtypes, devices, sizes, strides and alignment to 16 bytes agree, and
// the same tensors share an address. So a function may look at nothing else: it computes a grid and constants from
// them and launches by kernels/launch.py. Where that cannot be repeated (operators of torch, descriptors, scratch
// memory, Triton's interpreter) and while someone watches Triton's launches, every call runs in Python.
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

// An integer that differs at each call, as a seed or an offset: it is not part of the kind. The function may hand it to
// kernels that do not specialise on it; what else is computed from it is found when it is recorded, and runs in Python.
struct Fresh {
  int64_t value;
};

// The same of a number that kernels take as float32.
struct FreshReal {
  double value;
};

struct Arg {
  enum Kind : uint8_t { none, tensor, integer, fresh, fresh_real, real, boolean } kind = none;
  union {
    const at::Tensor* t;  // must live as long as the call
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

// One kernel's launch: what the driver is given, but for what each call has of its own.
struct TritonLaunch {
  struct Patch {
    uint16_t param, arg;
    int64_t offset;  // bytes behind the address of a tensor
  };
  void* function = nullptr;
  std::array<unsigned, 3> grid{};
  unsigned threads = 0, shared = 0;
  PyObject* hooks = nullptr;     // a list; not empty while someone wants to be called first
  std::vector<uint64_t> params;  // 8 bytes for each, of which the driver reads as many as the kernel takes
  std::vector<Patch> patches;
};

// One function of a module of kernels, as hfnn.kernels.layer_norm.forward. It is thread-safe. Tensors are of one
// device, which need not be the current one; launches go to its current stream.
class TritonFunction {
 public:
  // Called with the GIL. The reference is kept for ever.
  explicit TritonFunction(PyObject* function);
  TritonFunction(const TritonFunction&) = delete;
  TritonFunction& operator=(const TritonFunction&) = delete;

  // args: all but `queue`, which is added where the function has it. Called with or without the GIL; without it is
  // better, since the driver waits where the device's queue is full. Runs below autograd. Python's exceptions pass.
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
    std::vector<TritonLaunch> launches;  // unchanged once recorded
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
  int queue_ = -1;    // its place among the arguments
  std::mutex mutex_;  // of what follows; not held while Python runs or a kernel is launched
  std::unordered_map<std::vector<uint64_t>, Entry, Hash, Equal> entries_;
  Counts counts_;
};

// hfnn._autograd: TritonFunction, Fresh, FreshReal, fake_driver.
void bind_triton(pybind11::module_& m);

}  // namespace hfnn::node
