// Operations of the c10d backend, continued from ops.cpp: all_to_all, barriers and messages.
#include <torch/csrc/distributed/c10d/Utils.hpp>

#include "cuda/p2p/device_messages.h"
#include "torch/backend.h"

namespace hfreduce {

using c10d::OpType;

// Elements to and from each rank.
struct Backend::Exchange {
  Tensors inputs, outputs;
  std::vector<int64_t> in_counts, in_offsets, out_counts, out_offsets;
};

void Backend::all_to_all_now(const Exchange& exchange, milliseconds timeout) {
  const auto& [inputs, outputs, in_counts, in_offsets, out_counts, out_offsets] = exchange;
  const DType dtype = element_of(inputs[0].scalar_type()).dtype;
  const Way way = this->way(inputs[0].device(), {Kind::all_to_all, 0, dtype}, std::nullopt, timeout);
  const Memory in(inputs, true, way);
  Memory out(outputs, false, way);
  if (out.overlaps(in)) out.copy(false);
  if (way.accelerator)
    way.accelerator->all_to_all(in.data(), in_offsets.data(), in_counts.data(), out.data(), out_offsets.data(),
                                out_counts.data(), dtype, native(inputs[0]), timeout);
  else
    communicator_->all_to_all(in.data(), in_offsets, in_counts, out.data(), out_offsets, out_counts, dtype, timeout);
  out.give_back();
}

Backend::Work Backend::alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_splits,
                                     std::vector<int64_t>& input_splits, const c10d::AllToAllOptions& options) {
  check_tensor("all_to_all", input);
  check_tensor("all_to_all", output);
  check_same("all_to_all", input, output);
  TORCH_CHECK_VALUE(input.dim() > 0 && output.dim() > 0, "hfreduce: all_to_all takes tensors of one dimension or more");
  c10d::checkSplitSizes(input_splits, input, size_);
  c10d::checkSplitSizes(output_splits, output, size_);
  const std::vector<int64_t> zeros(size_);
  Exchange exchange{{input}, {output}, zeros, zeros, zeros, zeros};
  c10d::computeLengthsAndOffsets(input_splits, input, &exchange.in_counts, &exchange.in_offsets);
  c10d::computeLengthsAndOffsets(output_splits, output, &exchange.out_counts, &exchange.out_offsets);
  const Element element = element_of(input.scalar_type());
  for (auto* list : {&exchange.in_counts, &exchange.in_offsets, &exchange.out_counts, &exchange.out_offsets})
    for (int64_t& number : *list) number *= element.width;
  const milliseconds timeout = patience(options.timeout);
  const Start start{OpType::ALLTOALL_BASE, "hfreduce:all_to_all", options.asyncOp, input.device()};
  return begin(start, {output}, [=, this](int&) { all_to_all_now(exchange, timeout); });
}

Backend::Work Backend::alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& options) {
  TORCH_CHECK_VALUE(!inputs.empty(), "hfreduce: all_to_all takes a list of one tensor for each rank, ", size_,
                    ", got none");
  check_list("all_to_all", inputs, size_, inputs[0]);
  check_list("all_to_all", outputs, size_, inputs[0]);
  const Element element = element_of(inputs[0].scalar_type());
  Exchange exchange{inputs, outputs, {}, {}, {}, {}};
  for (const auto& [tensors, counts, offsets] : {std::tie(inputs, exchange.in_counts, exchange.in_offsets),
                                                 std::tie(outputs, exchange.out_counts, exchange.out_offsets)}) {
    int64_t offset = 0;
    for (const at::Tensor& tensor : tensors) {
      counts.push_back(tensor.numel() * element.width);
      offsets.push_back(offset);
      offset += counts.back();
    }
  }
  const milliseconds timeout = patience(options.timeout);
  const Start start{OpType::ALLTOALL, "hfreduce:all_to_all", options.asyncOp, inputs[0].device()};
  return begin(start, outputs, [=, this](int&) { all_to_all_now(exchange, timeout); });
}

// A barrier on a device comes after the current stream's work so far. It blocks the host, as NCCL's does.
Backend::Work Backend::barrier(const c10d::BarrierOptions& options) {
  const milliseconds timeout = patience(options.timeout);
  Start start{OpType::BARRIER, "hfreduce:barrier", options.asyncOp};
  {
    std::lock_guard lock(mutex_);
    if (options.device && options.device->is_cuda() && options.device->has_index())
      start.device = *options.device;
    else if (device_)
      start.device = *device_;
    else if (bound_device_id_ && bound_device_id_->is_cuda())
      start.device = *bound_device_id_;
  }
  return begin(start, {}, [=, this](int&) {
    if (!start.device.is_cpu()) by_host(timeout).settle(start.device);
    communicator_->barrier(timeout);
  });
}

// All our barriers name all missing ranks, whatever wait_all_ranks says.
void Backend::monitoredBarrier(const c10d::BarrierOptions& options, bool) {
  c10d::BarrierOptions now = options;
  now.asyncOp = false;
  barrier(now)->wait();
}

Backend::Work Backend::send(Tensors& tensors, int to, int tag) {
  const at::Tensor tensor = only("send", tensors);
  check_root("send", to);
  const milliseconds timeout = patience(c10d::kUnsetTimeout);
  const Start start{OpType::SEND, "hfreduce:send", true, tensor.device()};
  const auto body = [=, this](int&) {
    const Element element = element_of(tensor.scalar_type());
    Way way = by_host(timeout);
    gpu::DeviceMessages* const device = device_messages(tensor);
    if (device && device->sends(to, tag)) way.accelerator = met_;
    const Memory memory(tensor, true, way);
    const int64_t count = memory.count() * element.width;
    if (way.accelerator)
      device->send(memory.data(), count, element.dtype, to, native(tensor), timeout);
    else
      communicator_->send(memory.data(), count, element.dtype, to, tag, timeout);
  };
  return begin(start, {}, body, messages(to, kSend, tag).get());
}

// from: -1 for any sender. The sender decides whether the payload goes by way of the host. Returns the sender.
int Backend::recv_now(const at::Tensor& tensor, int from, int tag, milliseconds timeout) {
  const Element element = element_of(tensor.scalar_type());
  const int64_t count = tensor.numel() * element.width;
  Way way = by_host(timeout);
  std::optional<Memory> memory;
  const auto place = [&] { return memory.emplace(tensor, false, way).data(); };
  const auto take = [&](const Received& message, const Watch& watch) {
    way.accelerator = met_;
    device_messages(tensor)->take(place(), message, watch, native(tensor));
  };
  const Received message = tensor.device().is_cpu()
                               ? communicator_->receive(place, nullptr, count, element.dtype, from, tag, timeout)
                               : communicator_->receive(place, take, count, element.dtype, from, tag, timeout);
  if (gpu::DeviceMessages* const device = device_messages(tensor); device && !message.ticket)
    device->offer(message.from);
  if (memory) memory->give_back();
  return message.from;
}

Backend::Work Backend::recv(Tensors& tensors, int from, int tag) {
  const at::Tensor tensor = only("recv", tensors);
  check_root("recv", from);
  const milliseconds timeout = patience(c10d::kUnsetTimeout);
  const Start start{OpType::RECV, "hfreduce:recv", true, tensor.device()};
  const auto body = [=, this](int& source) { source = recv_now(tensor, from, tag, timeout); };
  return begin(start, tensors, body, messages(from, kReceive, tag).get());
}

Backend::Work Backend::recvAnysource(Tensors& tensors, int tag) {
  const at::Tensor tensor = only("recv", tensors);
  const milliseconds timeout = patience(c10d::kUnsetTimeout);
  const Start start{OpType::RECVANYSOURCE, "hfreduce:recv", true, tensor.device()};
  const auto body = [=, this](int& source) { source = recv_now(tensor, -1, tag, timeout); };
  return begin(start, tensors, body, messages(-1, kReceive, tag).get());
}

}  // namespace hfreduce
