#include "triton.h"

#include <ATen/Parallel.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/util/SmallVector.h>
#include <dlfcn.h>
#include <pybind11/pybind11.h>
#include <torch/csrc/autograd/python_variable.h>

#include <cstring>
#include <limits>

namespace py = pybind11;

namespace hfnn::node {
namespace {

constexpr size_t kMostKinds = 4096;  // per function; further kinds run in Python
constexpr int kMostTries = 3;        // attempts to record a kind

// The part of the CUDA driver that is used. Bound when the first launch is recorded, so nothing of CUDA is linked.
struct Driver {
  int (*launch)(void* function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x, unsigned block_y,
                unsigned block_z, unsigned shared, void* stream, void** params, void** extra) = nullptr;
  int (*error_string)(int error, const char** text) = nullptr;
  int (*device_get)(int* device, int ordinal) = nullptr;
  int (*primary_context_retain)(void** context, int device) = nullptr;
  int (*context_set_current)(void* context) = nullptr;
};
constexpr int kInvalidContext = 201;  // CUDA_ERROR_INVALID_CONTEXT

const Driver& cuda() {
  static const Driver found = [] {
    Driver d;
    void* library = dlopen("libcuda.so.1", RTLD_LAZY);
    if (!library) return d;
    const auto bind = [&](auto& to, const char* name) {
      to = reinterpret_cast<std::decay_t<decltype(to)>>(dlsym(library, name));
    };
    bind(d.error_string, "cuGetErrorString");
    bind(d.device_get, "cuDeviceGet");
    bind(d.primary_context_retain, "cuDevicePrimaryCtxRetain");
    bind(d.context_set_current, "cuCtxSetCurrent");
    bind(d.launch, "cuLaunchKernel");
    if (!d.error_string || !d.device_get || !d.primary_context_retain || !d.context_set_current) d.launch = nullptr;
    return d;
  }();
  return found;
}

// In tests, a Python function replaces the driver, and tensors may be on the CPU.
PyObject* fake_launch = nullptr;

int launch_fake(void* function, unsigned x, unsigned y, unsigned z, unsigned threads, unsigned, unsigned,
                unsigned shared, void* stream, void** params, void**) {
  py::gil_scoped_acquire gil;
  const auto number = [](const void* p) { return reinterpret_cast<uintptr_t>(p); };
  return py::cast<int>(py::handle(fake_launch)(number(function), py::make_tuple(x, y, z), threads, shared,
                                               number(stream), number(params)));
}

const Driver fake{launch_fake, [](int error, const char** text) {
                    *text = error == 1 ? "invalid argument" : nullptr;
                    return 0;
                  }};
std::atomic<const Driver*> driver{nullptr};  // null until something was recorded

bool bind_driver() {
  if (!driver.load() && cuda().launch) driver.store(&cuda());
  return driver.load();
}

// Detects that someone watches Triton's launches; see kernels/launch.py.
struct Watch {
  static constexpr int kLists = 2, kDicts = 2, kTypes = 3;
  std::atomic<bool> usable{false};
  std::array<PyObject*, kLists> lists{};
  std::array<PyObject*, kDicts> dicts{};
  std::array<PyTypeObject*, kTypes> types{};
  std::array<std::atomic<Py_ssize_t>, kDicts> sizes{};
  std::array<std::atomic<unsigned>, kTypes> versions{};

  // Needs no GIL: the objects are never freed, and only their counts are read. A concurrent change may be seen one
  // launch late.
  bool quiet() const {
    if (!usable.load(std::memory_order_acquire)) return false;
    for (PyObject* list : lists)
      if (PyList_GET_SIZE(list)) return false;
    for (int i = 0; i < kDicts; ++i)
      if (PyDict_GET_SIZE(dicts[i]) != sizes[i].load(std::memory_order_relaxed)) return false;
    for (int i = 0; i < kTypes; ++i)
      if (types[i]->tp_version_tag != versions[i].load(std::memory_order_relaxed)) return false;
    return true;
  }

  // Needs the GIL. Called while nobody watches.
  void look(const py::module_& launch) {
    const py::object found = launch.attr("watch")();
    if (found.is_none()) {
      usable = false;
      return;
    }
    bool all = true;
    const auto [first, second, third] = py::cast<std::tuple<py::tuple, py::tuple, py::tuple>>(found);
    const bool fresh = !lists[0];  // the objects are the same each time
    for (int i = 0; i < kLists && fresh; ++i) lists[i] = py::object(first[i]).release().ptr();
    for (int i = 0; i < kDicts; ++i) {
      if (fresh) dicts[i] = py::object(second[i]).release().ptr();
      sizes[i] = PyDict_GET_SIZE(dicts[i]);
    }
    for (int i = 0; i < kTypes; ++i) {
      if (fresh) types[i] = reinterpret_cast<PyTypeObject*>(py::object(third[i]).release().ptr());
      versions[i] = types[i]->tp_version_tag;
      all = all && types[i]->tp_version_tag;  // 0: the type has no version tag
    }
    usable.store(all, std::memory_order_release);
  }
};
Watch watch;

const py::module_& launch_module() {  // with the GIL
  static const py::module_* module = new py::module_(py::module_::import("hfnn.kernels.launch"));
  return *module;
}

bool watched() {
  if (watch.quiet()) return false;
  py::gil_scoped_acquire gil;
  const bool is = py::cast<bool>(launch_module().attr("watched")());
  if (!is) watch.look(launch_module());
  return is;
}

bool wide(int64_t x) { return x < std::numeric_limits<int32_t>::min() || x > std::numeric_limits<int32_t>::max(); }

using Words = c10::SmallVector<uint64_t, 96>;
using Addresses = c10::SmallVector<uint64_t, 24>;

// The kind of the call, and the addresses or values of its arguments.
c10::Device describe(c10::ArrayRef<Arg> args, Words& key, Addresses& values) {
  std::optional<c10::Device> device;
  for (const Arg& arg : args) {
    uint64_t value = 0;
    const uint64_t word = arg.kind;
    switch (arg.kind) {
      case Arg::tensor: {
        const at::Tensor& x = *arg.t;
        const auto on = x.device();
        if (!device || (device->is_cpu() && !on.is_cpu())) device = on;
        value = reinterpret_cast<uint64_t>(x.data_ptr());
        size_t twin = 0;  // the first argument with this address, possibly this one
        while (twin < values.size() && !(values[twin] == value && args[twin].kind == Arg::tensor)) ++twin;
        key.push_back(word | static_cast<uint64_t>(x.scalar_type()) << 8 | static_cast<uint64_t>(on.type()) << 16 |
                      static_cast<uint64_t>(static_cast<uint8_t>(on.index())) << 24 |
                      static_cast<uint64_t>(value % 16 == 0) << 32 | static_cast<uint64_t>(x.dim()) << 33 |
                      static_cast<uint64_t>(twin) << 48);
        for (const int64_t n : x.sizes()) key.push_back(n);
        for (const int64_t n : x.strides()) key.push_back(n);
        break;
      }
      case Arg::none:
        key.push_back(word);
        break;
      case Arg::fresh:
        value = static_cast<uint64_t>(arg.i);
        key.push_back(word | static_cast<uint64_t>(wide(arg.i)) << 8);
        break;
      case Arg::fresh_real: {
        const float number = static_cast<float>(arg.d);
        std::memcpy(&value, &number, sizeof(number));
        key.push_back(word);
        break;
      }
      case Arg::integer:
      case Arg::boolean:
        value = static_cast<uint64_t>(arg.i);
        key.append({word, value});
        break;
      case Arg::real:
        std::memcpy(&value, &arg.d, sizeof(value));
        key.append({word, value});
    }
    values.push_back(value);
  }
  return device.value_or(c10::Device(c10::kCPU));
}

uintptr_t raw_stream(c10::Device device) {  // as torch gives it to Python
  const py::object stream = py::module_::import("torch._C").attr("_cuda_getCurrentRawStream");
  return py::cast<uintptr_t>(stream(static_cast<int>(device.index())));
}

py::tuple as_python(c10::ArrayRef<Arg> args, int queue_at, c10::Device device, py::tuple& fresh) {
  const auto queue = [&] { return py::int_(device.is_cuda() ? raw_stream(device) : at::get_num_threads()); };
  py::list list, numbers;
  for (size_t i = 0; i <= args.size(); ++i) {
    if (static_cast<int>(i) == queue_at) list.append(queue());
    if (i == args.size()) break;
    const Arg& arg = args[i];
    if (arg.kind == Arg::fresh || arg.kind == Arg::fresh_real) numbers.append(list.size());
    switch (arg.kind) {
      case Arg::none:
        list.append(py::none());
        break;
      case Arg::tensor:
        list.append(py::reinterpret_steal<py::object>(THPVariable_Wrap(*arg.t)));
        break;
      case Arg::integer:
      case Arg::fresh:
        list.append(py::int_(arg.i));
        break;
      case Arg::fresh_real:
      case Arg::real:
        list.append(py::float_(arg.d));
        break;
      case Arg::boolean:
        list.append(py::bool_(arg.i != 0));
    }
  }
  fresh = py::tuple(numbers);
  return py::tuple(list);
}

// Makes the tensors' device the current one.
struct OnDevice {
  explicit OnDevice(c10::Device device) {
    if (!device.is_cuda()) return;
    impl = c10::impl::getDeviceGuardImpl(c10::DeviceType::CUDA);
    if (impl->getDevice() != device) guard.reset_device(device);
  }
  void* stream(c10::Device device) const {
    return impl ? impl->getStreamNativeHandle(impl->getStream(device)) : nullptr;
  }
  const c10::impl::DeviceGuardImplInterface* impl = nullptr;
  c10::OptionalDeviceGuard guard;
};

enum Param { literal, pointer, fresh };  // as in kernels/launch.py

std::vector<TritonLaunch> parse(const py::list& found, int queue_at) {
  std::vector<TritonLaunch> launches;
  for (const py::handle item : found) {
    const auto entry = py::cast<py::tuple>(item);
    TritonLaunch launch;
    launch.function = reinterpret_cast<void*>(py::cast<uintptr_t>(entry[0]));
    const auto grid = py::cast<py::tuple>(entry[1]);
    for (int i = 0; i < 3; ++i) launch.grid[i] = py::cast<unsigned>(grid[i]);
    launch.threads = py::cast<unsigned>(entry[2]);
    launch.shared = py::cast<unsigned>(entry[3]);
    const py::object hooks = entry[4];
    if (!hooks.is_none()) launch.hooks = py::object(hooks).release().ptr();
    const auto params = py::cast<py::list>(entry[5]);
    for (const py::handle value : params) {
      const auto [kind, a, b] = py::cast<std::tuple<int, int64_t, py::int_>>(value);
      const auto param = static_cast<uint16_t>(launch.params.size());
      const auto arg = static_cast<uint16_t>(queue_at >= 0 && a > queue_at ? a - 1 : a);
      launch.params.push_back(kind == literal ? py::cast<uint64_t>(b) : 0);
      if (kind == pointer) launch.patches.push_back({param, arg, py::cast<int64_t>(b)});
      if (kind == fresh) launch.patches.push_back({param, arg, 0});
    }
    // The last parameters of Triton's kernels are addresses of scratch memory. Recorded kernels use none.
    launch.params.insert(launch.params.end(), 2, 0);
    launches.push_back(std::move(launch));
  }
  return launches;
}

void replay(const TritonLaunch& launch, const Addresses& given, c10::Device device, void* stream,
            const std::string& name) {
  c10::SmallVector<uint64_t, 64> values(launch.params.begin(), launch.params.end());
  for (const auto& patch : launch.patches) values[patch.param] = given[patch.arg] + patch.offset;
  c10::SmallVector<void*, 64> params;
  for (uint64_t& value : values) params.push_back(&value);
  const auto& [x, y, z] = launch.grid;
  const Driver& with = *driver.load(std::memory_order_acquire);
  const auto run = [&] {
    return with.launch(launch.function, x, y, z, launch.threads, 1, 1, launch.shared, stream, params.data(), nullptr);
  };
  int error = run();
  if (error == kInvalidContext && with.device_get) {  // this thread has not called the CUDA runtime yet
    int number = 0;
    void* context = nullptr;
    if (!with.device_get(&number, device.index()) && !with.primary_context_retain(&context, number) &&
        !with.context_set_current(context)) {
      error = run();
    }
  }
  if (error) {
    const char* text = nullptr;
    with.error_string(error, &text);
    TORCH_CHECK(false, name, ": CUDA's driver did not launch a kernel: ", text ? text : "unknown error", " (", error,
                ")");
  }
}

}  // namespace

size_t TritonFunction::Hash::operator()(Key key) const {
  uint64_t hash = key.size();
  for (const uint64_t word : key) {
    hash = (hash ^ word) * 0x9E3779B97F4A7C15u;
    hash ^= hash >> 29;
  }
  return hash;
}

TritonFunction::TritonFunction(PyObject* function) : function_(function) {
  Py_INCREF(function_);
  const py::handle f(function_);
  name_ = py::cast<std::string>(f.attr("__module__")) + "." + py::cast<std::string>(f.attr("__qualname__"));
  int i = 0;
  const py::object signature = py::module_::import("inspect").attr("signature")(f);
  const py::object parameters = signature.attr("parameters");
  for (const py::handle parameter : parameters) {
    if (py::cast<std::string>(parameter) == "queue") queue_ = i;
    ++i;
  }
}

void TritonFunction::operator()(c10::ArrayRef<Arg> args) {
  Words key;
  Addresses values;
  const c10::Device device = describe(args, key, values);
  const std::vector<TritonLaunch>* launches = nullptr;
  bool recordable;
  {
    const std::lock_guard lock(mutex_);
    ++counts_.calls;
    const auto found = entries_.find(Key(key));
    if (found == entries_.end()) {
      recordable = entries_.size() < kMostKinds;
    } else {
      if (found->second.recorded) launches = &found->second.launches;
      recordable = !launches && found->second.tries < kMostTries;
    }
  }
  if (launches) {
    bool alone = !watched();
    for (const auto& launch : *launches) alone = alone && !(launch.hooks && PyList_GET_SIZE(launch.hooks));
    if (!alone) return call(args, device);
    const OnDevice on(device);
    void* const stream = on.stream(device);
    for (const auto& launch : *launches) replay(launch, values, device, stream, name_);
    const std::lock_guard lock(mutex_);
    ++counts_.replays;
    return;
  }
  if (!recordable || !(device.is_cuda() || driver.load() == &fake)) return call(args, device);

  Recording made = record(args, device);
  const std::lock_guard lock(mutex_);
  Entry& entry = entries_.try_emplace(std::vector<uint64_t>(key.begin(), key.end())).first->second;
  counts_.kinds = static_cast<int64_t>(entries_.size());
  if (entry.recorded) return;  // by another thread meanwhile
  if (made.launches) {
    entry.launches = std::move(*made.launches);
    entry.recorded = true;
  } else {
    counts_.refusal = std::move(made.refusal);
    entry.tries = made.again ? entry.tries + 1 : kMostTries;
  }
}

void TritonFunction::call(c10::ArrayRef<Arg> args, c10::Device device) {
  py::gil_scoped_acquire gil;
  const at::NoGradGuard below;
  const OnDevice on(device);
  py::tuple fresh;
  const py::handle function(function_);
  function(*as_python(args, queue_, device, fresh));
}

TritonFunction::Recording TritonFunction::record(c10::ArrayRef<Arg> args, c10::Device device) {
  py::gil_scoped_acquire gil;
  const at::NoGradGuard below;
  const OnDevice on(device);
  py::tuple fresh;
  const py::tuple given = as_python(args, queue_, device, fresh);
  const py::tuple found = launch_module().attr("recorded")(py::handle(function_), given, fresh);
  Recording made{.launches = {}, .refusal = py::cast<std::string>(found[1]), .again = py::cast<bool>(found[2])};
  if (found[0].is_none()) return made;
  if (!bind_driver()) {
    made.refusal = "libcuda.so.1 cannot be used";
    return made;
  }
  if (device.is_cuda()) {  // torch must give C++ the same stream as Python
    try {
      if (reinterpret_cast<uintptr_t>(on.stream(device)) != raw_stream(device)) made.refusal = "another stream";
    } catch (const c10::Error& error) {
      made.refusal = error.what_without_backtrace();
    }
    if (!made.refusal.empty()) return made;
  }
  made.launches = parse(py::cast<py::list>(found[0]), queue_);
  if (!watched()) watch.look(launch_module());
  return made;
}

TritonFunction::Counts TritonFunction::counts() {
  const std::lock_guard lock(mutex_);
  return counts_;
}

void bind_triton(py::module_& m) {
  py::class_<Fresh>(m, "Fresh", "An integer that differs at each call.").def(py::init<int64_t>());
  py::class_<FreshReal>(m, "FreshReal", "A float32 that differs at each call.").def(py::init<double>());
  py::class_<TritonFunction>(m, "TritonFunction", "A function of hfnn.kernels, called from C++ as its nodes call it.")
      .def(py::init([](const py::object& f) { return std::make_unique<TritonFunction>(f.ptr()); }))
      .def("__call__",
           [](TritonFunction& self, const py::args& given) {
             c10::SmallVector<Arg, 24> args;
             for (const py::handle x : given) {
               if (x.is_none()) {
                 args.emplace_back();
               } else if (THPVariable_Check(x.ptr())) {
                 args.emplace_back(THPVariable_Unpack(x.ptr()));
               } else if (py::isinstance<Fresh>(x)) {
                 args.emplace_back(py::cast<Fresh>(x));
               } else if (py::isinstance<FreshReal>(x)) {
                 args.emplace_back(py::cast<FreshReal>(x));
               } else if (PyBool_Check(x.ptr())) {
                 args.emplace_back(x.ptr() == Py_True);
               } else if (PyFloat_Check(x.ptr())) {
                 args.emplace_back(PyFloat_AS_DOUBLE(x.ptr()));
               } else {
                 args.emplace_back(py::cast<int64_t>(x));
               }
             }
             const py::gil_scoped_release unlocked;
             self(args);
           })
      .def_property_readonly("calls", [](TritonFunction& self) { return self.counts().calls; })
      .def_property_readonly("replays", [](TritonFunction& self) { return self.counts().replays; })
      .def_property_readonly("kinds", [](TritonFunction& self) { return self.counts().kinds; })
      .def_property_readonly("refusal", [](TritonFunction& self) { return self.counts().refusal; });
  m.def(
      "fake_driver",
      [](const py::object& launch) {
        Py_XDECREF(fake_launch);
        fake_launch = launch.is_none() ? nullptr : py::object(launch).release().ptr();
        driver.store(fake_launch ? &fake : nullptr);
        if (!fake_launch) bind_driver();
      },
      py::arg("launch"),
      "For tests: launch(function, grid, threads, shared, stream, address of the parameters' addresses) takes the\n"
      "place of CUDA's driver and returns its error, 0 for none. None: the driver again.");
}

}  // namespace hfnn::node
