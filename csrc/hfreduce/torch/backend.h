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

// Collectives are served by one line of operations, in the order in which they were begun; messages by one line for
// each peer, direction and tag, so that two peers may both send first, and a message that waits for its other side
// holds up none of another tag. An operation with asyncOp=false runs on the calling
// thread when nothing is ahead of it. Tensors are checked before anything is sent; one that is not contiguous is
// copied.
//
// CUDA tensors: with asyncOp=false the work is given to the caller's current stream, otherwise to one of ours that
// waits for it; see Operation. What the accelerator takes is only enqueued, so the calling thread does it, too, when
// nothing is ahead; messages go from device to device where they can (DeviceMessages); all else is copied to pinned
// memory, goes the way of the CPU's tensors, and is copied back. A group works on the CUDA device that it sees first.
class Backend : public c10d::Backend {
 public:
  using Pointer = c10::intrusive_ptr<Backend>;
  using Work = c10::intrusive_ptr<c10d::Work>;

  struct Options : c10d::Backend::Options {
    Options() : c10d::Backend::Options("hfreduce") {}
    std::string interface, host_id;  // see Config
    size_t slot_bytes = Config().slot_bytes;
    std::vector<RowTuple> plan;                    // rows as hfreduce.plan has them
    std::vector<gpu::DeviceRowTuple> device_plan;  // the same, of gpu::DeviceRow
  };

  Backend(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size, const Options& options);
  ~Backend() override;

  const std::string getBackendName() const override { return "hfreduce"; }
  c10::intrusive_ptr<c10d::Backend::Options> getBackendOptions() override { return options(); }
  c10::intrusive_ptr<Options> options() const { return c10::make_intrusive<Options>(options_); }
  Communicator& communicator() { return *communicator_; }
  std::string describe() const;
  static uint64_t operations();  // begun by this process, on all its groups
  static uint64_t nbytes();      // of the dense tensors that those give back

  bool supportsSplitting() const override { return true; }
  // batch_isend_irecv then begins message by message, as on gloo: what it has begun when one of them is refused stands,
  // and there is no bundle that nobody ends. Only who names a device to torch's coalescing manager gets a bundle.
  bool supportsCoalescing() const override { return false; }
  void setTimeout(std::chrono::milliseconds timeout) override { timeout_ = timeout.count(); }
  void setSequenceNumberForGroup() override {}  // it is 0 on all ranks from the start
  uint64_t getSequenceNumberForGroup() override { return sequence_; }
  c10d::ErrorType getError() override;
  c10::intrusive_ptr<c10d::Backend> split(const c10::intrusive_ptr<c10d::Store>& store, const std::vector<int>& ranks,
                                          const c10::intrusive_ptr<c10d::Backend::Options>& options) override;
  void startCoalescing() override;
  Work endCoalescing() override;
  void abort() override;
  void shutdown() override;
  // Ends all groups of this process that still live, before the interpreter does.
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

  // What is to be known of an operation before it runs.
  struct Start {
    c10d::OpType type;
    const char* title;
    bool async_op;
    c10::Device device{c10::kCPU};
    std::optional<gpu::Path> path{};  // on the device, where the accelerator takes it
  };

  // line: of a message; else that of the collectives.
  Work begin(const Start& start, const Tensors& outputs, Operation::Body body, Line* line = nullptr);
  std::unique_ptr<Placed> place(Line& line, const Start& start, const Tensors& outputs);
  std::vector<c10::intrusive_ptr<Operation>> sweep();
  // The path of a collective, where the accelerator is made and takes it.
  std::optional<gpu::Path> path(c10::Device device, const gpu::Message& message) const;
  // How it goes, on the line, in the order of collectives: by this path, if it was chosen before. The first one makes
  // the accelerator.
  Way way(c10::Device device, const gpu::Message& message, std::optional<gpu::Path> path, milliseconds timeout);
  Way by_host(milliseconds timeout) const { return {communicator_.get(), Clock::now() + timeout}; }
  void meet(c10::Device device, milliseconds timeout);
  // Those of the accelerator, where the tensor is on its device and it has been made: on this rank alone, maybe.
  gpu::DeviceMessages* device_messages(const at::Tensor& tensor) const;
  // Held by whoever gives it an operation: lines that nobody holds and that have nothing to do go when there are many.
  std::shared_ptr<Line> messages(int peer, Direction direction, int tag);
  milliseconds patience(std::chrono::milliseconds timeout) const;  // of an operation
  void check_root(const char* what, int64_t rank) const;
  void close(milliseconds patience, const std::string& why);  // why: see Communicator::shutdown
  void forget();

  at::Tensor sum_of_sparse(const at::Tensor& input, milliseconds timeout);
  // What the line is to do; path: of all tensors, where it is chosen.
  Operation::Body all_reduces(Tensors tensors, std::vector<Reduction> reductions, std::optional<gpu::Path> path,
                              milliseconds timeout);
  void all_gather_now(const Tensors& outputs, const at::Tensor& input, std::optional<gpu::Path> path,
                      milliseconds timeout);
  void reduce_scatter_now(const at::Tensor& output, const Tensors& inputs, Reduction reduction,
                          std::optional<gpu::Path> path, milliseconds timeout);
  struct Exchange;
  int recv_now(const at::Tensor& tensor, int from, int tag, milliseconds timeout);
  void all_to_all_now(const Exchange& exchange, milliseconds timeout);

  const int forks_ = forks();  // of the process that made it: a fork's child has none of its threads
  std::shared_ptr<Communicator> communicator_;
  Options options_;
  std::vector<int> global_ranks_;
  std::atomic<int64_t> timeout_;  // ms
  std::atomic<uint64_t> sequence_{0};
  std::atomic<bool> closed_{false};
  const std::shared_ptr<Line> collectives_ = std::make_shared<Line>();
  std::unique_ptr<gpu::Accelerator> accelerator_;
  std::atomic<gpu::Accelerator*> met_{nullptr};  // it, for any thread
  bool asked_ = false;                           // whether the ranks have met for it; of the line of collectives
  mutable std::mutex mutex_;                     // of what follows
  std::optional<c10::Device> device_;            // of all operations on CUDA tensors
  std::unique_ptr<gpu::Driver> capture_;         // asked whether a stream is captured; none without CUDA
  std::map<std::pair<Line*, int>, c10::Stream> streams_;
  Turns turns_;                                     // of the line of collectives
  std::deque<c10::intrusive_ptr<Operation>> kept_;  // for their device, which may still be at work on their tensors
  std::string no_accelerator_;                      // why there is none; "" before anybody asked
  std::map<std::tuple<int, Direction, int>, std::shared_ptr<Line>> messages_;
  c10::intrusive_ptr<Operation> bundle_;  // between startCoalescing and endCoalescing
  c10::weak_intrusive_ptr<c10d::Backend> last_split_;
  std::string last_split_name_;
};

void bind_arrivals(py::module_& m);  // arrivals.cpp: Arrivals, and collect

}  // namespace hfreduce
