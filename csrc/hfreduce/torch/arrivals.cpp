// Counts the gradients of a backward for haiscale.ddp (haiscale/ddp/arrivals.py documents what and why), and copies
// them into the buffers in which they are averaged.
#include <ATen/ATen.h>
#include <ATen/core/Tensor.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include "torch/backend.h"

namespace hfreduce {

// The members are those of haiscale.ddp.arrivals.Arrivals. All of them run under the GIL.
class Arrivals : public std::enable_shared_from_this<Arrivals> {
 public:
  Arrivals(size_t parameters, py::function begin, py::function whole, py::function late);
  py::object hook(size_t parameter);  // for register_post_accumulate_grad_hook; does not keep this object alive
  void arrived(size_t parameter);
  void finish();
  void watch(std::vector<int> bucket_of, std::vector<int> expected);
  void arm();
  void clean(size_t bucket) { dirty_.at(bucket) = false; }
  void run(size_t bucket, bool running) { running_.at(bucket) = running; }
  bool is_whole(size_t bucket) const { return !waiting_.at(bucket); }
  bool is_dirty(size_t bucket) const { return dirty_.at(bucket); }
  const std::vector<int>& counts() const { return counts_; }
  const std::vector<size_t>& order() const { return order_; }

  bool begun = false, expecting = true;

 private:
  void track(size_t parameter);

  const py::function begin_, whole_, late_;
  std::vector<int> counts_, bucket_of_, expected_, size_, waiting_;  // the first three are indexed by parameter
  std::vector<bool> dirty_, running_;
  std::vector<size_t> order_;
  std::vector<std::pair<std::thread::id, size_t>> latest_;  // parameters whose other hooks may still run, by thread
};

namespace {

struct Hook {
  std::weak_ptr<Arrivals> arrivals;
  size_t parameter;
};

constexpr const char* kName = "hfreduce.Hook";

PyObject* arrived(PyObject* self, PyObject*) {
  const auto* const hook = static_cast<Hook*>(PyCapsule_GetPointer(self, kName));
  try {
    if (const auto arrivals = hook->arrivals.lock()) arrivals->arrived(hook->parameter);
  } catch (py::error_already_set& error) {
    error.restore();
    return nullptr;
  }
  Py_RETURN_NONE;
}

PyMethodDef kArrived{"arrived", arrived, METH_O, "Hook of a parameter."};

}  // namespace

Arrivals::Arrivals(size_t parameters, py::function begin, py::function whole, py::function late)
    : begin_(std::move(begin)), whole_(std::move(whole)), late_(std::move(late)), counts_(parameters) {}

py::object Arrivals::hook(size_t parameter) {
  const auto destroy = [](PyObject* capsule) { delete static_cast<Hook*>(PyCapsule_GetPointer(capsule, kName)); };
  const auto capsule =
      py::reinterpret_steal<py::object>(PyCapsule_New(new Hook{weak_from_this(), parameter}, kName, destroy));
  return py::reinterpret_steal<py::object>(PyCFunction_New(&kArrived, capsule.ptr()));
}

// The GIL serializes the calls from several autograd threads.
void Arrivals::arrived(size_t parameter) {
  if (!expecting) return;
  if (!begun) {
    begun = true;
    begin_();
  }
  const auto thread = std::this_thread::get_id();
  const auto before = std::find_if(latest_.begin(), latest_.end(), [&](auto& one) { return one.first == thread; });
  if (before != latest_.end()) {
    const size_t previous = before->second;
    latest_.erase(before);
    track(previous);
  }
  ++counts_[parameter];
  if (bucket_of_.empty())
    order_.push_back(parameter);
  else
    latest_.emplace_back(thread, parameter);
}

void Arrivals::track(size_t parameter) {
  const int bucket = bucket_of_[parameter];
  if (bucket < 0 || running_[bucket]) {
    late_(parameter);
    return;
  }
  dirty_[bucket] = true;
  if (counts_[parameter] == expected_[parameter] && --waiting_[bucket] == 0) whole_(bucket);
}

void Arrivals::finish() {
  while (!latest_.empty()) {
    const size_t parameter = latest_.front().second;
    latest_.erase(latest_.begin());
    track(parameter);
  }
}

void Arrivals::watch(std::vector<int> bucket_of, std::vector<int> expected) {
  bucket_of_ = std::move(bucket_of), expected_ = std::move(expected);
  const int buckets = bucket_of_.empty() ? 0 : 1 + *std::max_element(bucket_of_.begin(), bucket_of_.end());
  size_.assign(buckets, 0);
  for (const int bucket : bucket_of_)
    if (bucket >= 0) ++size_[bucket];
  waiting_ = size_;
  dirty_.assign(buckets, false), running_.assign(buckets, false);
  latest_.clear();
}

void Arrivals::arm() {
  begun = false, expecting = true;
  latest_.clear();
  std::fill(counts_.begin(), counts_.end(), 0);
  order_.clear();
  waiting_ = size_;
  std::fill(dirty_.begin(), dirty_.end(), false);
}

void collect(const std::vector<at::Tensor>& parameters, const std::vector<at::Tensor>& views) {
  std::vector<at::Tensor> away, grads, missing;
  std::vector<size_t> places;
  for (size_t i = 0; i < parameters.size(); ++i) {
    const at::Tensor& grad = parameters[i].grad();
    if (!grad.defined()) {
      missing.push_back(views[i]);
    } else if (!grad.is_same(views[i])) {
      away.push_back(views[i]), grads.push_back(grad), places.push_back(i);
    }
  }
  const c10::NoGradGuard no_grad;
  if (!away.empty()) at::_foreach_copy_(away, grads);
  if (!missing.empty()) at::_foreach_zero_(missing);
  for (size_t k = 0; k < places.size(); ++k) {
    const auto& parameter = parameters[places[k]];
    if (grads[k].scalar_type() != away[k].scalar_type()) {
      if (parameter.scalar_type() != away[k].scalar_type()) parameter.mutable_grad().reset();
    } else if (!grads[k].requires_grad()) {
      parameter.mutable_grad() = away[k];
    }
  }
}

void bind_arrivals(py::module_& m) {
  py::class_<Arrivals, std::shared_ptr<Arrivals>>(m, "Arrivals")
      .def(py::init<size_t, py::function, py::function, py::function>())
      .def("hook", &Arrivals::hook)
      .def("finish", &Arrivals::finish)
      .def("watch", &Arrivals::watch)
      .def("arm", &Arrivals::arm)
      .def("clean", &Arrivals::clean)
      .def("run", &Arrivals::run)
      .def("is_whole", &Arrivals::is_whole)
      .def("is_dirty", &Arrivals::is_dirty)
      .def_readwrite("begun", &Arrivals::begun)
      .def_readwrite("expecting", &Arrivals::expecting)
      .def_property_readonly("counts", &Arrivals::counts)
      .def_property_readonly("order", &Arrivals::order);
  m.def("collect", &collect);
}

}  // namespace hfreduce
