// The operations of the c10d backend: what is checked, and what is asked of the communicator.
#include <torch/csrc/distributed/c10d/Utils.hpp>

#include "c10d_backend.h"

namespace hfreduce {

using c10d::OpType;

Backend::Work Backend::broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) {
  const at::Tensor tensor = only("broadcast", tensors);
  check_root("broadcast", options.rootRank);
  const int root = static_cast<int>(options.rootRank);
  const milliseconds timeout = patience(options.timeout);
  return collective(OpType::BROADCAST, "hfreduce:broadcast", options.asyncOp, tensors, [=, this](int&) {
    const Wire wire = wire_of(tensor.scalar_type());
    const Memory memory(tensor, rank_ == root);
    communicator_->broadcast(memory.data(), memory.count() * wire.width, wire.dtype, root, timeout);
    if (rank_ != root) memory.give_back();
  });
}

Backend::Work Backend::allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) {
  only("all_reduce", tensors);
  c10d::AllreduceCoalescedOptions all;
  static_cast<c10d::AllreduceOptions&>(all) = options;
  return allreduce_coalesced(tensors, all);
}

Backend::Work Backend::allreduce_sparse(Tensors& tensors, const c10d::AllreduceOptions& options) {
  return allreduce(tensors, options);  // which says that it takes dense tensors
}

Backend::Work Backend::allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) {
  std::vector<Reduction> reductions;
  for (const at::Tensor& tensor : tensors) {
    check_tensor("all_reduce", tensor);
    reductions.push_back(reduction_of(options.reduceOp, tensor.scalar_type()));
  }
  const milliseconds timeout = patience(options.timeout);
  const OpType type = tensors.size() == 1 ? OpType::ALLREDUCE : OpType::ALLREDUCE_COALESCED;
  return collective(type, "hfreduce:all_reduce", options.asyncOp, tensors, [=, this, tensors = tensors](int&) {
    for (size_t i = 0; i < tensors.size(); ++i) {
      const Wire wire = wire_of(tensors[i].scalar_type());
      const Memory memory(tensors[i], true);
      communicator_->all_reduce(memory.data(), memory.data(), memory.count() * wire.width, wire.dtype, reductions[i],
                                timeout);
      memory.give_back();
    }
  });
}

Backend::Work Backend::reduce(Tensors& tensors, const c10d::ReduceOptions& options) {
  const at::Tensor tensor = only("reduce", tensors);
  check_root("reduce", options.rootRank);
  const Reduction reduction = reduction_of(options.reduceOp, tensor.scalar_type());
  const int root = static_cast<int>(options.rootRank);
  const milliseconds timeout = patience(options.timeout);
  return collective(OpType::REDUCE, "hfreduce:reduce", options.asyncOp, tensors, [=, this](int&) {
    const Wire wire = wire_of(tensor.scalar_type());
    const Memory memory(tensor, true);
    communicator_->reduce(memory.data(), rank_ == root ? memory.data() : nullptr, memory.count() * wire.width,
                          wire.dtype, reduction, root, timeout);
    if (rank_ == root) memory.give_back();
  });
}

// outputs: the whole output as one tensor, or one tensor for each rank, of whatever sizes the ranks' inputs have.
void Backend::all_gather_now(const Tensors& outputs, const at::Tensor& input, milliseconds timeout) {
  const Wire wire = wire_of(input.scalar_type());
  if (!even(outputs)) {
    outputs[rank_].copy_(input.view_as(outputs[rank_]));
    for (int root = 0; root < size_; ++root) {
      const Memory memory(outputs[root], rank_ == root);
      communicator_->broadcast(memory.data(), memory.count() * wire.width, wire.dtype, root, timeout);
      memory.give_back();
    }
    return;
  }
  const Memory in(input, true);
  Memory out(outputs, false);
  const char* const place = out.data() + rank_ * in.count() * input.element_size();
  if (out.overlaps(in) && in.data() != place) out.copy(false);
  communicator_->all_gather(in.data(), out.data(), in.count() * wire.width, wire.dtype, timeout);
  out.give_back();
}

Backend::Work Backend::allgather(std::vector<Tensors>& outputs, Tensors& inputs,
                                 const c10d::AllgatherOptions& options) {
  const at::Tensor input = only("all_gather", inputs);
  const Tensors list = only("all_gather", outputs);
  check_list("all_gather", list, size_, input.scalar_type());
  TORCH_CHECK_VALUE(list[rank_].numel() == input.numel(), "hfreduce: all_gather was given an input of ", input.sizes(),
                    " but an output of ", list[rank_].sizes(), " for this rank (", rank_, ")");
  const milliseconds timeout = patience(options.timeout);
  return collective(OpType::ALLGATHER, "hfreduce:all_gather", options.asyncOp, list,
                    [=, this](int&) { all_gather_now(list, input, timeout); });
}

Backend::Work Backend::_allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& options) {
  Tensors outputs{output}, inputs{input};
  return allgather_into_tensor_coalesced(outputs, inputs, options);
}

Backend::Work Backend::allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                       const c10d::AllgatherOptions& options) {
  TORCH_CHECK_VALUE(outputs.size() == inputs.size(), "hfreduce: all_gather was given ", inputs.size(), " inputs and ",
                    outputs.size(), " outputs");
  for (size_t i = 0; i < inputs.size(); ++i) {
    check_tensor("all_gather", inputs[i]);
    check_tensor("all_gather", outputs[i]);
    check_same("all_gather", inputs[i], outputs[i]);
    TORCH_CHECK_VALUE(outputs[i].numel() == inputs[i].numel() * size_, "hfreduce: all_gather of an input of ",
                      inputs[i].numel(), " elements by ", size_, " ranks takes an output of ",
                      inputs[i].numel() * size_, ", got ", outputs[i].numel());
  }
  const milliseconds timeout = patience(options.timeout);
  const OpType type = inputs.size() == 1 ? OpType::_ALLGATHER_BASE : OpType::COALESCED;
  return collective(type, "hfreduce:all_gather", options.asyncOp, outputs,
                    [=, this, outputs = outputs, inputs = inputs](int&) {
                      for (size_t i = 0; i < inputs.size(); ++i) all_gather_now({outputs[i]}, inputs[i], timeout);
                    });
}

// outputs[r][i]: input i of rank r.
Backend::Work Backend::allgather_coalesced(std::vector<Tensors>& outputs, Tensors& inputs,
                                           const c10d::AllgatherOptions& options) {
  TORCH_CHECK_VALUE(static_cast<int>(outputs.size()) == size_, "hfreduce: all_gather takes one list for each rank, ",
                    size_, ", got ", outputs.size());
  std::vector<Tensors> lists(inputs.size());
  Tensors flat;
  for (const Tensors& list : outputs) {
    TORCH_CHECK_VALUE(list.size() == inputs.size(), "hfreduce: all_gather was given ", inputs.size(), " inputs and ",
                      list.size(), " outputs for a rank");
    for (size_t i = 0; i < inputs.size(); ++i) lists[i].push_back(list[i]);
    flat.insert(flat.end(), list.begin(), list.end());
  }
  for (size_t i = 0; i < inputs.size(); ++i) check_list("all_gather", lists[i], size_, inputs[i].scalar_type());
  const milliseconds timeout = patience(options.timeout);
  return collective(OpType::ALLGATHER_COALESCED, "hfreduce:all_gather", options.asyncOp, flat,
                    [=, this, inputs = inputs](int&) {
                      for (size_t i = 0; i < inputs.size(); ++i) all_gather_now(lists[i], inputs[i], timeout);
                    });
}

Backend::Work Backend::gather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::GatherOptions& options) {
  const at::Tensor input = only("gather", inputs);
  check_root("gather", options.rootRank);
  const int root = static_cast<int>(options.rootRank);
  const Tensors list = rank_ == root ? only("gather", outputs) : Tensors();
  if (rank_ == root) check_list("gather", list, size_, input.scalar_type());
  for (const at::Tensor& output : list)
    TORCH_CHECK_VALUE(output.numel() == input.numel(), "hfreduce: gather takes outputs of the input's size, ",
                      input.sizes(), ", got ", output.sizes());
  const milliseconds timeout = patience(options.timeout);
  return collective(OpType::GATHER, "hfreduce:gather", options.asyncOp, list, [=, this](int&) {
    const Wire wire = wire_of(input.scalar_type());
    const Memory in(input, true);
    Memory out(list, false);
    if (out.overlaps(in)) out.copy(false);
    communicator_->gather(in.data(), out.data(), in.count() * wire.width, wire.dtype, root, timeout);
    out.give_back();
  });
}

Backend::Work Backend::scatter(Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ScatterOptions& options) {
  const at::Tensor output = only("scatter", outputs);
  check_root("scatter", options.rootRank);
  const int root = static_cast<int>(options.rootRank);
  const Tensors list = rank_ == root ? only("scatter", inputs) : Tensors();
  if (rank_ == root) check_list("scatter", list, size_, output.scalar_type());
  for (const at::Tensor& input : list)
    TORCH_CHECK_VALUE(input.numel() == output.numel(), "hfreduce: scatter takes inputs of the output's size, ",
                      output.sizes(), ", got ", input.sizes());
  const milliseconds timeout = patience(options.timeout);
  return collective(OpType::SCATTER, "hfreduce:scatter", options.asyncOp, outputs, [=, this](int&) {
    const Wire wire = wire_of(output.scalar_type());
    const Memory in(list, true);
    Memory out(output, false);
    if (out.overlaps(in)) out.copy(false);
    communicator_->scatter(in.data(), out.data(), out.count() * wire.width, wire.dtype, root, timeout);
    out.give_back();
  });
}

// inputs: the whole input as one tensor, or one for each rank, of whatever sizes the ranks' outputs have.
void Backend::reduce_scatter_now(const at::Tensor& output, const Tensors& inputs, Reduction reduction,
                                 milliseconds timeout) {
  const Wire wire = wire_of(output.scalar_type());
  Memory out(output, false);
  if (even(inputs)) {
    const Memory in(inputs, true);
    if (out.overlaps(in)) out.copy(false);
    communicator_->reduce_scatter(in.data(), out.data(), out.count() * wire.width, wire.dtype, reduction, timeout);
  } else {
    for (int root = 0; root < size_; ++root) {
      const Memory in(inputs[root], true);
      if (rank_ == root && out.overlaps(in)) out.copy(false);
      communicator_->reduce(in.data(), rank_ == root ? out.data() : nullptr, in.count() * wire.width, wire.dtype,
                            reduction, root, timeout);
    }
  }
  out.give_back();
}

Backend::Work Backend::reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                                      const c10d::ReduceScatterOptions& options) {
  const at::Tensor output = only("reduce_scatter", outputs);
  const Tensors list = only("reduce_scatter", inputs);
  check_list("reduce_scatter", list, size_, output.scalar_type());
  TORCH_CHECK_VALUE(list[rank_].numel() == output.numel(), "hfreduce: reduce_scatter was given an output of ",
                    output.sizes(), " but an input of ", list[rank_].sizes(), " for this rank (", rank_, ")");
  const Reduction reduction = reduction_of(options.reduceOp, output.scalar_type());
  const milliseconds timeout = patience(options.timeout);
  return collective(OpType::REDUCE_SCATTER, "hfreduce:reduce_scatter", options.asyncOp, outputs,
                    [=, this](int&) { reduce_scatter_now(output, list, reduction, timeout); });
}

Backend::Work Backend::_reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                            const c10d::ReduceScatterOptions& options) {
  Tensors outputs{output}, inputs{input};
  return reduce_scatter_tensor_coalesced(outputs, inputs, options);
}

Backend::Work Backend::reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                       const c10d::ReduceScatterOptions& options) {
  TORCH_CHECK_VALUE(outputs.size() == inputs.size(), "hfreduce: reduce_scatter was given ", inputs.size(),
                    " inputs and ", outputs.size(), " outputs");
  std::vector<Reduction> reductions;
  for (size_t i = 0; i < inputs.size(); ++i) {
    check_tensor("reduce_scatter", inputs[i]);
    check_tensor("reduce_scatter", outputs[i]);
    check_same("reduce_scatter", inputs[i], outputs[i]);
    TORCH_CHECK_VALUE(inputs[i].numel() == outputs[i].numel() * size_, "hfreduce: reduce_scatter into an output of ",
                      outputs[i].numel(), " elements on ", size_, " ranks takes an input of ",
                      outputs[i].numel() * size_, ", got ", inputs[i].numel());
    reductions.push_back(reduction_of(options.reduceOp, inputs[i].scalar_type()));
  }
  const milliseconds timeout = patience(options.timeout);
  const OpType type = inputs.size() == 1 ? OpType::_REDUCE_SCATTER_BASE : OpType::COALESCED;
  return collective(type, "hfreduce:reduce_scatter", options.asyncOp, outputs,
                    [=, this, outputs = outputs, inputs = inputs](int&) {
                      for (size_t i = 0; i < inputs.size(); ++i)
                        reduce_scatter_now(outputs[i], {inputs[i]}, reductions[i], timeout);
                    });
}

Backend::Work Backend::alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_splits,
                                     std::vector<int64_t>& input_splits, const c10d::AllToAllOptions& options) {
  check_tensor("all_to_all", input);
  check_tensor("all_to_all", output);
  check_same("all_to_all", input, output);
  TORCH_CHECK_VALUE(input.dim() > 0 && output.dim() > 0, "hfreduce: all_to_all takes tensors of one dimension or more");
  c10d::checkSplitSizes(input_splits, input, size_);
  c10d::checkSplitSizes(output_splits, output, size_);
  std::vector<int64_t> in_counts(size_), in_offsets(size_), out_counts(size_), out_offsets(size_);
  c10d::computeLengthsAndOffsets(input_splits, input, &in_counts, &in_offsets);
  c10d::computeLengthsAndOffsets(output_splits, output, &out_counts, &out_offsets);
  const Wire wire = wire_of(input.scalar_type());
  for (auto* list : {&in_counts, &in_offsets, &out_counts, &out_offsets})
    for (int64_t& number : *list) number *= wire.width;
  const milliseconds timeout = patience(options.timeout);
  return collective(OpType::ALLTOALL_BASE, "hfreduce:all_to_all", options.asyncOp, {output},
                    [=, this, output = output, input = input](int&) {
                      const Memory in(input, true);
                      Memory out(output, false);
                      if (out.overlaps(in)) out.copy(false);
                      communicator_->all_to_all(in.data(), in_offsets, in_counts, out.data(), out_offsets, out_counts,
                                                wire.dtype, timeout);
                      out.give_back();
                    });
}

Backend::Work Backend::alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& options) {
  TORCH_CHECK_VALUE(!inputs.empty(), "hfreduce: all_to_all takes a list of one tensor for each rank, ", size_,
                    ", got none");
  check_list("all_to_all", inputs, size_, inputs[0].scalar_type());
  check_list("all_to_all", outputs, size_, inputs[0].scalar_type());
  const Wire wire = wire_of(inputs[0].scalar_type());
  std::vector<int64_t> in_counts, in_offsets, out_counts, out_offsets;
  for (const auto& [tensors, counts, offsets] :
       {std::tie(inputs, in_counts, in_offsets), std::tie(outputs, out_counts, out_offsets)}) {
    int64_t offset = 0;
    for (const at::Tensor& tensor : tensors) {
      counts.push_back(tensor.numel() * wire.width);
      offsets.push_back(offset);
      offset += counts.back();
    }
  }
  const milliseconds timeout = patience(options.timeout);
  return collective(OpType::ALLTOALL, "hfreduce:all_to_all", options.asyncOp, outputs,
                    [=, this, outputs = outputs, inputs = inputs](int&) {
                      const Memory in(inputs, true);
                      Memory out(outputs, false);
                      if (out.overlaps(in)) out.copy(false);
                      communicator_->all_to_all(in.data(), in_offsets, in_counts, out.data(), out_offsets, out_counts,
                                                wire.dtype, timeout);
                      out.give_back();
                    });
}

Backend::Work Backend::barrier(const c10d::BarrierOptions& options) {
  const milliseconds timeout = patience(options.timeout);
  return collective(OpType::BARRIER, "hfreduce:barrier", options.asyncOp, {},
                    [=, this](int&) { communicator_->barrier(timeout); });
}

// Every barrier of ours names the ranks that are missing: all of them, whether asked for or not.
void Backend::monitoredBarrier(const c10d::BarrierOptions& options, bool) {
  c10d::BarrierOptions now = options;
  now.asyncOp = false;
  barrier(now)->wait();
}

Backend::Work Backend::send(Tensors& tensors, int to, int tag) {
  const at::Tensor tensor = only("send", tensors);
  check_root("send", to);
  const milliseconds timeout = patience(c10d::kUnsetTimeout);
  return begin(messages(to, kSend), OpType::SEND, "hfreduce:send", true, {}, [=, this](int&) {
    const Wire wire = wire_of(tensor.scalar_type());
    const Memory memory(tensor, true);
    communicator_->send(memory.data(), memory.count() * wire.width, wire.dtype, to, tag, timeout);
  });
}

Backend::Work Backend::recv(Tensors& tensors, int from, int tag) {
  const at::Tensor tensor = only("recv", tensors);
  check_root("recv", from);
  const milliseconds timeout = patience(c10d::kUnsetTimeout);
  return begin(messages(from, kReceive), OpType::RECV, "hfreduce:recv", true, tensors, [=, this](int&) {
    const Wire wire = wire_of(tensor.scalar_type());
    const Memory memory(tensor, false);
    communicator_->recv(memory.data(), memory.count() * wire.width, wire.dtype, from, tag, timeout);
    memory.give_back();
  });
}

Backend::Work Backend::recvAnysource(Tensors& tensors, int tag) {
  const at::Tensor tensor = only("recv", tensors);
  const milliseconds timeout = patience(c10d::kUnsetTimeout);
  return begin(messages(-1, kReceive), OpType::RECVANYSOURCE, "hfreduce:recv", true, tensors, [=, this](int& source) {
    const Wire wire = wire_of(tensor.scalar_type());
    const Memory memory(tensor, false);
    source = communicator_->recv_any(memory.data(), memory.count() * wire.width, wire.dtype, tag, timeout);
    memory.give_back();
  });
}

}  // namespace hfreduce
