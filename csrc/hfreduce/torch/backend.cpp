// hfreduce._c10d: the backend's lifetime and its Python module. Only files of this folder are compiled against torch.
#include "torch/backend.h"

#include <pybind11/chrono.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <optional>

namespace hfreduce {

using c10d::OpType;

namespace {

// Releases the GIL if this thread holds it: a thread that is joined may need it.
class WithoutGil {
 public:
  WithoutGil() {
    if (Py_IsInitialized() && PyGILState_Check()) released_.emplace();
  }

 private:
  std::optional<py::gil_scoped_release> released_;
};

// Adapts torch's store. `get` is only called for keys that exist: otherwise it would block, other threads included.
class TorchStore : public Store {
 public:
  explicit TorchStore(c10::intrusive_ptr<c10d::Store> store) : store_(std::move(store)) {}
  void set(const std::string& key, const std::string& value) override { store_->set(key, value); }
  std::optional<std::string> find(const std::string& key) override {
    if (!store_->check({key})) return std::nullopt;
    return store_->get_to_str(key);
  }

 private:
  c10::intrusive_ptr<c10d::Store> store_;
};

// Python functions, never freed: where the main thread is, the exception that a group is shut down for, and the order
// of hosts.
PyObject *where = nullptr, *why = nullptr, *sorted = nullptr;

bool interpreter_lives() {
#if PY_VERSION_HEX >= 0x030D0000
  return Py_IsInitialized() && !Py_IsFinalizing();
#else
  return Py_IsInitialized() && !_Py_IsFinalizing();
#endif
}

std::string told_by(PyObject* function) {
  if (!function || !interpreter_lives()) return "";
  py::gil_scoped_acquire locked;
  try {
    return py::handle(function)().cast<std::string>();
  } catch (const std::exception&) {  // the text only helps the reader of a message
    return "";
  }
}

HostOrder order_of(const std::vector<std::pair<std::string, std::string>>& hosts) {
  if (!sorted || !interpreter_lives()) return {};
  py::gil_scoped_acquire locked;
  const auto [order, source] = py::handle(sorted)(hosts).cast<std::pair<std::vector<int>, std::string>>();
  return {order, source};
}

struct Living {
  std::mutex mutex;
  std::vector<c10::weak_intrusive_ptr<Backend>> backends;
};

Living& living() {
  static Living* const all = new Living;  // outlives every thread
  return *all;
}

std::atomic<uint64_t> begun{0}, bytes_begun{0};

milliseconds until(Deadline deadline) { return std::chrono::duration_cast<milliseconds>(deadline - Clock::now()); }

Config config_of(int rank, int size, const Backend::Options& options) {
  Config config;
  config.rank = rank, config.size = size;
  for (uint64_t global : options.global_ranks_in_group) config.global_ranks.push_back(static_cast<int>(global));
  config.name = options.group_name.empty() ? "default" : options.group_name;
  config.timeout = options.timeout;
  config.host_id = options.host_id, config.interface = options.interface;
  config.slot_bytes = options.slot_bytes;
  config.plan = rows_of(options.plan);
  config.where = [] { return told_by(where); };
  config.sorted = order_of;
  return config;
}

// Connects to the other ranks. The backend is closed at process exit, if not before.
Backend::Pointer create(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
                        const Backend::Options& options) {
  auto backend = c10::make_intrusive<Backend>(store, rank, size, options);
  Living& all = living();
  std::lock_guard lock(all.mutex);
  all.backends.erase(
      std::remove_if(all.backends.begin(), all.backends.end(), [](const auto& weak) { return weak.expired(); }),
      all.backends.end());
  all.backends.emplace_back(backend);
  return backend;
}

}  // namespace

Backend::Backend(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size, const Options& options)
    : c10d::Backend(rank, size), options_(options), timeout_(options.timeout.count()), last_split_(Pointer()) {
  const Config config = config_of(rank, size, options);
  global_ranks_ = config.global_ranks;
  for (int i = static_cast<int>(global_ranks_.size()); i < size; ++i) global_ranks_.push_back(i);
  TorchStore adapted(store);
  try {
    communicator_ = std::make_shared<Communicator>(adapted, config);
  } catch (const Fault& fault) {
    TORCH_CHECK_WITH(DistBackendError, false, fault.what());
  }
}

Backend::~Backend() {
  const WithoutGil released;
  close(milliseconds(timeout_), "");
  accelerator_.reset();
  communicator_.reset();
}

uint64_t Backend::operations() { return begun.load(std::memory_order_relaxed); }
uint64_t Backend::nbytes() { return bytes_begun.load(std::memory_order_relaxed); }

Backend::Work Backend::begin(const Start& start, const Tensors& outputs, Operation::Body body, Line* line) {
  if (!line) line = collectives_.get();
  try {
    communicator_->check_owner();
  } catch (const Fault& fault) {
    TORCH_CHECK_WITH(DistBackendError, false, fault.what());
  }
  begun.fetch_add(1, std::memory_order_relaxed);
  for (const at::Tensor& output : outputs)
    if (output.layout() == c10::kStrided) bytes_begun.fetch_add(output.nbytes(), std::memory_order_relaxed);
  const OpType type = start.type;
  const bool message = type == OpType::SEND || type == OpType::RECV || type == OpType::RECVANYSOURCE;
  std::unique_ptr<Placed> placed = place(*line, start, outputs);
  const bool to_keep = placed && placed->own() && !placed->captured();
  // Must be equal on all ranks, so it counts collectives only.
  const uint64_t sequence = sequence_.fetch_add(message ? 0 : 1, std::memory_order_relaxed) + 1;
  auto operation =
      c10::make_intrusive<Operation>(rank_, type, start.title, outputs, sequence, std::move(body), std::move(placed));
  bool bundled = false;
  {
    std::lock_guard lock(mutex_);
    if (bundle_) {
      bundle_->add(*operation);
      bundled = true;
    }
    if (to_keep) kept_.push_back(operation);
  }
  // A kernel is enqueued at once. The host-staged reduction needs some calls per chunk, which should not delay a caller
  // that goes on with other work.
  const bool quick = start.path && gpu::Accelerator::captures(*start.path);
  line->submit(operation, !start.async_op || quick);
  // A bundled message returns no work: a blocking send would wait and never reach the receive that its peer waits for.
  return bundled && message ? Work() : Work(std::move(operation));
}

std::shared_ptr<Line> Backend::messages(int peer, Direction direction, int tag) {
  constexpr size_t kMany = 64;
  std::lock_guard lock(mutex_);
  std::shared_ptr<Line>& line = messages_[{peer, direction, tag}];
  if (line) return line;
  line = std::make_shared<Line>();
  const std::shared_ptr<Line> made = line;
  for (auto each = messages_.begin(); messages_.size() > kMany && each != messages_.end();) {
    if (!each->second->idle()) {
      ++each;
      continue;
    }
    Line* const gone = each->second.get();
    for (auto stream = streams_.begin(); stream != streams_.end();)
      stream = stream->first.first == gone ? streams_.erase(stream) : std::next(stream);
    gone->close();
    each = messages_.erase(each);
  }
  return made;
}

milliseconds Backend::patience(std::chrono::milliseconds timeout) const {
  return timeout < milliseconds(0) ? milliseconds(timeout_) : timeout;  // kUnsetTimeout is negative
}

void Backend::check_root(const char* what, int64_t rank) const {
  TORCH_CHECK_VALUE(0 <= rank && rank < size_, "hfreduce: ", what, " takes a rank of the group, 0 to ", size_ - 1,
                    ", got ", rank);
}

c10d::ErrorType Backend::getError() {
  return communicator_->failed() ? c10d::ErrorType::COMM_ERROR : c10d::ErrorType::SUCCESS;
}

// torch splits the backend once per device, but one backend serves both: the second call returns the same child.
c10::intrusive_ptr<c10d::Backend> Backend::split(const c10::intrusive_ptr<c10d::Store>& store,
                                                 const std::vector<int>& ranks,
                                                 const c10::intrusive_ptr<c10d::Backend::Options>& options) {
  const auto place = std::find(ranks.begin(), ranks.end(), rank_);
  if (place == ranks.end()) return nullptr;
  if (last_split_name_ == options->group_name)
    if (auto last = last_split_.lock()) return last;
  const auto* given = dynamic_cast<const Options*>(options.get());
  Options own(given ? *given : options_);
  own.timeout = options->timeout;
  own.group_name = options->group_name;
  own.global_ranks_in_group.clear();
  for (int rank : ranks) {
    check_root("split", rank);
    own.global_ranks_in_group.push_back(global_ranks_[rank]);
  }
  auto child = create(store, static_cast<int>(place - ranks.begin()), static_cast<int>(ranks.size()), own);
  last_split_name_ = own.group_name;
  last_split_ = c10::weak_intrusive_ptr<c10d::Backend>(child);
  return child;
}

void Backend::startCoalescing() {
  std::lock_guard lock(mutex_);
  bundle_ = c10::make_intrusive<Operation>(rank_, OpType::COALESCED, nullptr, Tensors(), sequence_, nullptr);
}

Backend::Work Backend::endCoalescing() {
  c10::intrusive_ptr<Operation> bundle;
  {
    std::lock_guard lock(mutex_);
    bundle = std::exchange(bundle_, {});
  }
  TORCH_CHECK(bundle, "hfreduce: endCoalescing without startCoalescing");
  bundle->part_ended(nullptr);
  return bundle;
}

void Backend::abort() { communicator_->abort("abort() was called"); }

void Backend::shutdown() { close(milliseconds(timeout_), told_by(why)); }

void Backend::close(milliseconds patience, const std::string& why) {
  if (!communicator_ || closed_.exchange(true)) return;
  const WithoutGil released;
  if (forks() != forks_) return forget();
  std::vector<std::shared_ptr<Line>> lines{collectives_}, receiving;
  {
    std::lock_guard lock(mutex_);
    for (const auto& [key, line] : messages_) (std::get<Direction>(key) == kSend ? lines : receiving).push_back(line);
  }
  const Deadline deadline = Clock::now() + patience;
  bool rest = true;
  for (const auto& line : lines) rest = line->idle_by(deadline) && rest;
  communicator_->drop_receives();  // they would wait for the whole timeout
  for (const auto& line : receiving) rest = line->idle_by(deadline) && rest;
  if (!rest)
    communicator_->abort("the group was shut down while operations were still running" +
                         (why.empty() ? "" : ", because of an exception: " + why));
  lines.insert(lines.end(), receiving.begin(), receiving.end());
  for (const auto& line : lines) line->close();
  if (accelerator_) accelerator_->shutdown(std::max(milliseconds(0), until(deadline)));
  communicator_->shutdown(why);
}

// In a forked child: leaks everything. Freeing would join threads that do not exist, and say goodbye for the parent.
void Backend::forget() {
  new std::shared_ptr<Communicator>(communicator_);
  (void)accelerator_.release();
  (void)capture_.release();
  new std::shared_ptr<Line>(collectives_);
  for (const auto& [key, line] : messages_) new std::shared_ptr<Line>(line);
}

void Backend::close_all(milliseconds patience) {
  std::vector<c10::weak_intrusive_ptr<Backend>> backends;
  {
    std::lock_guard lock(living().mutex);
    backends.swap(living().backends);
  }
  const std::string because = told_by(why);
  for (const auto& weak : backends)
    if (const Pointer backend = weak.lock()) backend->close(patience, because);
}

}  // namespace hfreduce

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  using hfreduce::Backend;
  using Options = Backend::Options;
  const auto unlocked = py::call_guard<py::gil_scoped_release>();

  py::class_<Options, c10d::Backend::Options, c10::intrusive_ptr<Options>>(m, "Options")
      .def(py::init<>())
      .def_readwrite("interface", &Options::interface)
      .def_readwrite("host_id", &Options::host_id)
      .def_readwrite("slot_bytes", &Options::slot_bytes)
      .def_readwrite("plan", &Options::plan)
      .def_readwrite("device_plan", &Options::device_plan)
      .def("__deepcopy__", [](const Options& self, const py::dict&) { return c10::make_intrusive<Options>(self); });

  py::class_<Backend, c10d::Backend, c10::intrusive_ptr<Backend>>(m, "Backend")
      .def_property_readonly("options", &Backend::options)
      .def("get_error", &Backend::getError)
      .def("describe", &Backend::describe)
      .def("record", [](Backend& self) { return self.communicator().record(); })
      .def("perform_nocolor_split", [](Backend&, const py::object&) {});  // ranks outside a new group do nothing

  m.def(
      "create",
      [](const c10d::DistributedBackendOptions& given, const Options& options) -> c10::intrusive_ptr<c10d::Backend> {
        Options own(options);
        own.timeout = std::chrono::duration_cast<std::chrono::milliseconds>(given.timeout);
        own.group_name = given.group_id;
        own.global_ranks_in_group.assign(given.global_ranks_in_group.begin(), given.global_ranks_in_group.end());
        return hfreduce::create(given.store, given.group_rank, given.group_size, own);
      },
      unlocked);
  hfreduce::bind_arrivals(m);
  hfreduce::take_lazy_views();
  m.def("operations", &Backend::operations);
  m.def("nbytes", &Backend::nbytes);
  m.def("set_told_by", [](py::function where, py::function why, py::function sorted) {
    hfreduce::where = where.release().ptr(), hfreduce::why = why.release().ptr();
    hfreduce::sorted = sorted.release().ptr();
  });
  m.def("close_all",
        [](double seconds) { Backend::close_all(hfreduce::milliseconds(static_cast<int64_t>(seconds * 1000))); });
}
