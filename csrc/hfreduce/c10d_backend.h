// The c10d backend "hfreduce": torch's collectives on a Communicator.
#pragma once

#include <unistd.h>

#include <atomic>
#include <map>
#include <memory>
#include <string>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <tuple>
#include <utility>
#include <vector>

#include "c10d_tensors.h"
#include "c10d_work.h"
#include "communicator.h"

namespace hfreduce {

// Collectives are served by one line of operations, in the order in which they were begun; messages by one line for
// each peer and direction, so that two peers may both send first. An operation with asyncOp=false runs on the calling
// thread when nothing is ahead of it. Tensors are checked before anything is sent; one that is not contiguous is
// copied.
class Backend : public c10d::Backend {
 public:
  using Pointer = c10::intrusive_ptr<Backend>;
  using Work = c10::intrusive_ptr<c10d::Work>;

  struct Options : c10d::Backend::Options {
    Options() : c10d::Backend::Options("hfreduce") {}
    std::string interface, host_id;  // see Config
    size_t slot_bytes = Config().slot_bytes;
    std::vector<std::tuple<int, int64_t, int, int, int64_t, int>> plan;  // rows as hfreduce.plan has them
  };

  Backend(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size, const Options& options);
  ~Backend() override;

  const std::string getBackendName() const override { return "hfreduce"; }
  c10::intrusive_ptr<c10d::Backend::Options> getBackendOptions() override { return options(); }
  c10::intrusive_ptr<Options> options() const { return c10::make_intrusive<Options>(options_); }
  Communicator& communicator() { return *communicator_; }
  static uint64_t operations();  // begun by this process, on all its groups

  bool supportsSplitting() const override { return true; }
  bool supportsCoalescing() const override { return true; }
  void setTimeout(std::chrono::milliseconds timeout) override { timeout_ = timeout.count(); }
  void setSequenceNumberForGroup() override {}  // it is 0 on all ranks from the start
  uint64_t getSequenceNumberForGroup() override { return sequence_; }
  c10d::ErrorType getError() override;
  c10::intrusive_ptr<c10d::Backend> split(const c10::intrusive_ptr<c10d::Store>& store, const std::vector<int>& ranks,
                                          const c10::intrusive_ptr<c10d::Backend::Options>& options) override;
  void startCoalescing() override;
  Work endCoalescing() override;
  void abort() override;
  void shutdown() override { close(milliseconds(timeout_)); }
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

  Work begin(Line& line, c10d::OpType type, const char* title, bool async_op, const Tensors& outputs,
             Operation::Body body);
  Work collective(c10d::OpType type, const char* title, bool async_op, const Tensors& outputs, Operation::Body body) {
    return begin(*collectives_, type, title, async_op, outputs, std::move(body));
  }
  Line& messages(int peer, Direction direction);
  milliseconds patience(std::chrono::milliseconds timeout) const;  // of an operation
  void check_root(const char* what, int64_t rank) const;
  void close(milliseconds patience);
  void forget();

  void all_gather_now(const Tensors& outputs, const at::Tensor& input, milliseconds timeout);
  void reduce_scatter_now(const at::Tensor& output, const Tensors& inputs, Reduction reduction, milliseconds timeout);

  const int pid_ = getpid();  // of the process that made it: a fork's child has none of its threads
  std::unique_ptr<Communicator> communicator_;
  Options options_;
  std::vector<int> global_ranks_;
  std::atomic<int64_t> timeout_;  // ms
  std::atomic<uint64_t> sequence_{0};
  std::atomic<bool> closed_{false};
  const std::shared_ptr<Line> collectives_ = std::make_shared<Line>();
  std::mutex mutex_;  // of what follows
  std::map<std::pair<int, Direction>, std::shared_ptr<Line>> messages_;
  c10::intrusive_ptr<Operation> bundle_;  // between startCoalescing and endCoalescing
  c10::weak_intrusive_ptr<c10d::Backend> last_split_;
  std::string last_split_name_;
};

}  // namespace hfreduce
