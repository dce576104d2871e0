#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/utils/pybind.h>

#include <memory>
#include <vector>

namespace hfreduce {

// The members of haiscale.ddp.arrivals.Arrivals, under the GIL throughout.
class Arrivals : public std::enable_shared_from_this<Arrivals> {
 public:
  Arrivals(size_t parameters, py::function begin, py::function whole, py::function late);
  py::object hook(size_t parameter);  // for register_post_accumulate_grad_hook; does not keep this alive
  void arrived(size_t parameter);
  void watch(std::vector<int> bucket_of, std::vector<int> expected);
  void arm();
  void clean(size_t bucket) { dirty_.at(bucket) = false; }
  void run(size_t bucket, bool running) { running_.at(bucket) = running; }
  bool is_whole(size_t bucket) const { return !waiting_.at(bucket); }
  bool is_dirty(size_t bucket) const { return dirty_.at(bucket); }
  const std::vector<int>& counts() const { return counts_; }
  const std::vector<size_t>& order() const { return order_; }

  bool begun = false;

 private:
  const py::function begin_, whole_, late_;
  std::vector<int> counts_, bucket_of_, expected_, size_, waiting_;  // the first three by parameter
  std::vector<bool> dirty_, running_;
  std::vector<size_t> order_;
};

void bind_arrivals(py::module_& m);  // and collect

}  // namespace hfreduce
