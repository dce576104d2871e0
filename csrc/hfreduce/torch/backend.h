// The c10d backend "hfreduce": torch's collectives on a Communicator.
#pragma once

#include <torch/csrc/utils/pybind.h>

#include <atomic>
#include <deque>
#include <map>
#include <memory>
#include <string>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <tuple>
#include <utility>
#include <vector>

#include "communicator.h"
#include "cuda/accelerator.h"
#include "torch/tensors.h"
#include "torch/turns.h"
#include "torch/work.h"
#include "transport/socket.h"

namespace hfreduce {

// Collectives go through one Line (an in-order queue of operations). Messages have a Line for each peer, direction and
// tag: so two peers may both send first, and a message that waits for its peer does not block those of other tags. An
// operation with asyncOp=false runs on the calling thread if nothing is queued before it. Tensors are checked before
// anything is sent; one that is not contiguous is copied.
//
// CUDA tensors: with asyncOp=false the work goes to the caller's current stream, otherwise to one of our streams, which
// waits for the current one; see Operation. What the accelerator takes is only enqueued, so the calling thread does it,
// too, if nothing is queued. Messages go from device to device where possible (DeviceMessages). Everything else is
// staged through pinned memory and runs on the CPU path. A group works on the first CUDA device that it is given.
class Backend : public c10d::Backend {
 public:
  using Pointer = c10::intrusive_ptr<Backend>;
  using Work = c10::intrusive_ptr<c10d::Work>;

  struct Options : c10d::Backend::Options {
    Options() : c10d::Backend::Options("hfreduce") {}
    std::string interface, host_id;  // see Config
    size_t slot_bytes = Config().slot_bytes;
    std::vector<RowTuple> plan;                    // rows of hfreduce.plan
    std::vector<gpu::DeviceRowTuple> device_plan;  // rows of gpu::DeviceRow
  };

  Backend(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size, const Options& options);
  ~Backend() override;

  const std::string getBackendName() const override { return "hfreduce"; }
  c10::intrusive_ptr<c10d::Backend::Options> getBackendOptions() override { return options(); }
  c10::intrusive_ptr<Options> options() const { return c10::make_intrusive<Options>(options_); }
  Communicator& communicator() { return *communicator_; }
  std::string describe() const;
  static uint64_t operations();  // begun by this process, in all groups
  static uint64_t nbytes();      // of the dense output tensors of these operations

  bool supportsSplitting() const override { return true; }
  // So batch_isend_irecv issues messages one by one, as on gloo: if one is rejected, those before it stand, and no
  // bundle is left open. A bundle exists only if a device is passed to torch's coalescing manager.
  bool supportsCoalescing() const override { return false; }
  void setTimeout(std::chrono::milliseconds timeout) override { timeout_ = timeout.count(); }
  void setSequenceNumberForGroup() override {}  // 0 on all ranks from the start
  uint64_t getSequenceNumberForGroup() override { return sequence_; }
  c10d::ErrorType getError() override;
  c10::intrusive_ptr<c10d::Backend> split(const c10::intrusive_ptr<c10d::Store>& store, const std::vector<int>& ranks,
                                          const c10::intrusive_ptr<c10d::Backend::Options>& options) override;
  void startCoalescing() override;
  Work endCoalescing() override;
  void abort() override;
  void shutdown() override;
  // Closes all groups of this process that are still alive. Called before the interpreter exits.
  static void close_all(milliseconds patience);

  Work broadcast(Tensors&, const c10d::BroadcastOptions&) override;
  Work allreduce(Tensors&, const c10d::AllreduceOptions&) override;
  Work allreduce_sparse(Tensors&, const c10d::AllreduceOptions&) override;
  Work allreduce_coalesced(Tensors&, const c10d::AllreduceCoalescedOptions&) override;
  Work reduce(Tensors&, const c10d::ReduceOptions&) override;
  Work allgather(std::vector<Tensors>&, Tensors&, const c10d::AllgatherOptions&) override;
  Work _allgather_base(at::Tensor&, at::Tensor&, const c10d::AllgatherOptions&) override;
  Work allgather_coalesced(std::vector<Tensors>&, Tensors&, const c10d::AllgatherOptions&) override;
  Work allgather_into_tensor_coalesced(Tensors&, Tensors&, const c10d::AllgatherOptions&) override;
  Work gather(std::vector<Tensors>&, Tensors&, const c10d::GatherOptions&) override;
  Work scatter(Tensors&, std::vector<Tensors>&, const c10d::ScatterOptions&) override;
  Work reduce_scatter(Tensors&, std::vector<Tensors>&, const c10d::ReduceScatterOptions&) override;
  Work _reduce_scatter_base(at::Tensor&, at::Tensor&, const c10d::ReduceScatterOptions&) override;
  Work reduce_scatter_tensor_coalesced(Tensors&, Tensors&, const c10d::ReduceScatterOptions&) override;
  Work alltoall_base(at::Tensor&, at::Tensor&, std::vector<int64_t>&, std::vector<int64_t>&,
                     const c10d::AllToAllOptions&) override;
  Work alltoall(Tensors&, Tensors&, const c10d::AllToAllOptions&) override;
  Work barrier(const c10d::BarrierOptions&) override;
  void monitoredBarrier(const c10d::BarrierOptions&, bool wait_all_ranks) override;
  Work send(Tensors&, int to, int tag) override;
  Work recv(Tensors&, int from, int tag) override;
  Work recvAnysource(Tensors&, int tag) override;

 private:
  enum Direction { kSend, kReceive };

  // What is known of an operation before it runs.
  struct Start {
    c10d::OpType type;
    const char* title;
    bool async_op;
    c10::Device device{c10::kCPU};
    std::optional<gpu::Path> path{};  // if the accelerator takes it
  };

  // line: a message's; nullptr: that of the collectives.
  Work begin(const Start& start, const Tensors& outputs, Operation::Body body, Line* line = nullptr);
  std::unique_ptr<Placed> place(Line& line, const Start& start, const Tensors& outputs);
  std::vector<c10::intrusive_ptr<Operation>> sweep();
  // The path of a collective, if the accelerator exists and takes it.
  std::optional<gpu::Path> path(c10::Device device, const gpu::Message& message) const;
  // Called on the line, in the order of collectives. `path` if already chosen. The first call makes the accelerator.
  Way way(c10::Device device, const gpu::Message& message, std::optional<gpu::Path> path, milliseconds timeout);
  Way by_host(milliseconds timeout) const { return {communicator_.get(), Clock::now() + timeout}; }
  void meet(c10::Device device, milliseconds timeout);
  // The accelerator's, if it exists and the tensor is on its device. Other ranks may not have it yet.
  gpu::DeviceMessages* device_messages(const at::Tensor& tensor) const;
  // The caller holds the Line while it submits. If there are many, those that are idle and held by nobody are removed.
  std::shared_ptr<Line> messages(int peer, Direction direction, int tag);
  milliseconds patience(std::chrono::milliseconds timeout) const;  // of an operation
  void check_root(const char* what, int64_t rank) const;
  void close(milliseconds patience, const std::string& why);  // why: see Communicator::shutdown
  void forget();

  at::Tensor sum_of_sparse(const at::Tensor& input, milliseconds timeout);
  // The body of an operation; path: common to all tensors, if chosen.
  Operation::Body all_reduces(Tensors tensors, std::vector<Reduction> reductions, std::optional<gpu::Path> path,
                              milliseconds timeout);
  void all_gather_now(const Tensors& outputs, const at::Tensor& input, std::optional<gpu::Path> path,
                      milliseconds timeout);
  void reduce_scatter_now(const at::Tensor& output, const Tensors& inputs, Reduction reduction,
                          std::optional<gpu::Path> path, milliseconds timeout);
  struct Exchange;
  int recv_now(const at::Tensor& tensor, int from, int tag, milliseconds timeout);
  void all_to_all_now(const Exchange& exchange, milliseconds timeout);

  const int forks_ = forks();  // of the process that made it: a forked child has none of its threads
  std::shared_ptr<Communicator> communicator_;
  Options options_;
  std::vector<int> global_ranks_;
  std::atomic<int64_t> timeout_;  // ms
  std::atomic<uint64_t> sequence_{0};
  std::atomic<bool> closed_{false};
  const std::shared_ptr<Line> collectives_ = std::make_shared<Line>();
  std::unique_ptr<gpu::Accelerator> accelerator_;
  std::atomic<gpu::Accelerator*> met_{nullptr};  // accelerator_, for any thread
  bool asked_ = false;                           // whether `meet` was called; used by the line of collectives only
  mutable std::mutex mutex_;                     // guards the members below
  std::optional<c10::Device> device_;            // of all operations on CUDA tensors
  std::unique_ptr<gpu::Driver> capture_;         // tells whether a stream is being captured; null without CUDA
  std::map<std::pair<Line*, int>, c10::Stream> streams_;
  Turns turns_;                                     // for the line of collectives
  std::deque<c10::intrusive_ptr<Operation>> kept_;  // kept alive while the device may use their tensors
  std::string no_accelerator_;                      // the reason why there is none; "" before the first attempt
  std::map<std::tuple<int, Direction, int>, std::shared_ptr<Line>> messages_;
  c10::intrusive_ptr<Operation> bundle_;  // between startCoalescing and endCoalescing
  c10::weak_intrusive_ptr<c10d::Backend> last_split_;
  std::string last_split_name_;
};

void bind_arrivals(py::module_& m);  // arrivals.cpp: Arrivals, and collect
void take_lazy_views();              // lazy.cpp; once in a process

}  // namespace hfreduce
