// Operations of the c10d backend: check the arguments, then call the communicator or the accelerator. Collectives other
// than all_to_all; the rest is in exchange.cpp.
#include <ATen/Functions.h>

#include <array>

#include "torch/backend.h"

namespace hfreduce {

using c10d::OpType;

namespace {

// The path of several collectives at once: one that is only enqueued if all are, and captured if all can be.
std::optional<gpu::Path> both(std::optional<gpu::Path> a, std::optional<gpu::Path> b) {
  return a && b ? std::max(a, b) : std::nullopt;
}

// A collective whose bytes, as Plan::choose counts them, are those of this tensor.
gpu::Message message_of(Kind kind, const at::Tensor& tensor, Op op = Op::sum) {
  return {kind, bytes_of(tensor), element_of(tensor.scalar_type()).dtype, op};
}

}  // namespace

Backend::Work Backend::broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) {
  const at::Tensor tensor = only("broadcast", tensors);
  check_root("broadcast", options.rootRank);
  const int root = static_cast<int>(options.rootRank);
  const milliseconds timeout = patience(options.timeout);
  const Element element = element_of(tensor.scalar_type());
  const gpu::Message message{Kind::broadcast, bytes_of(tensor), element.dtype};
  const auto by = path(tensor.device(), message);
  const Start start{OpType::BROADCAST, "hfreduce:broadcast", options.asyncOp, tensor.device(), by};
  return begin(start, tensors, [=, this](int&) {
    const Way way = this->way(tensor.device(), message, by, timeout);
    const Memory memory(tensor, rank_ == root, way);
    const int64_t count = memory.count() * element.width;
    if (way.accelerator)
      way.accelerator->broadcast(way.path, memory.data(), count, element.dtype, root, native(tensor), timeout);
    else
      communicator_->broadcast(memory.data(), count, element.dtype, root, timeout);
    if (rank_ != root) memory.give_back();
  });
}

Backend::Work Backend::allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) {
  if (tensors.size() == 1 && tensors[0].defined() && tensors[0].layout() == c10::kSparse)
    return allreduce_sparse(tensors, options);
  const at::Tensor& tensor = only("all_reduce", tensors);
  const Reduction reduction = reduction_of(options.reduceOp, tensor.scalar_type());
  Start start{OpType::ALLREDUCE, "hfreduce:all_reduce", options.asyncOp, tensor.device()};
  start.path = path(start.device, message_of(Kind::all_reduce, tensor, reduction.op));
  return begin(start, tensors, all_reduces(tensors, {reduction}, start.path, patience(options.timeout)));
}

Backend::Work Backend::allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) {
  std::vector<Reduction> reductions;
  for (const at::Tensor& tensor : tensors) {
    check_tensor("all_reduce", tensor);
    reductions.push_back(reduction_of(options.reduceOp, tensor.scalar_type()));
  }
  const OpType type = tensors.size() == 1 ? OpType::ALLREDUCE : OpType::ALLREDUCE_COALESCED;
  Start start{type, "hfreduce:all_reduce", options.asyncOp, device_of("all_reduce", tensors)};
  for (size_t i = 0; i < tensors.size(); ++i) {
    const auto by = path(start.device, message_of(Kind::all_reduce, tensors[i], reductions[i].op));
    start.path = i ? both(start.path, by) : by;
  }
  return begin(start, tensors, all_reduces(tensors, reductions, std::nullopt, patience(options.timeout)));
}

Operation::Body Backend::all_reduces(Tensors tensors, std::vector<Reduction> reductions, std::optional<gpu::Path> path,
                                     milliseconds timeout) {
  return [=, this](int&) {
    for (size_t i = 0; i < tensors.size(); ++i) {
      const at::Tensor& tensor = tensors[i];
      const Reduction& reduction = reductions[i];
      const Element element = element_of(tensor.scalar_type());
      if (size_ == 1 && !tensor.device().is_cpu() && reduction.op != Op::premul_sum) continue;
      const Way way = this->way(tensor.device(), message_of(Kind::all_reduce, tensor, reduction.op), path, timeout);
      const Memory memory(tensor, true, way);
      void* const data = memory.data();
      const int64_t count = memory.count() * element.width;
      if (way.accelerator)
        way.accelerator->all_reduce(way.path, data, data, count, element.dtype, reduction, native(tensor), timeout);
      else
        communicator_->all_reduce(data, data, count, element.dtype, reduction, timeout);
      memory.give_back();
    }
  };
}

Backend::Work Backend::reduce(Tensors& tensors, const c10d::ReduceOptions& options) {
  const at::Tensor tensor = only("reduce", tensors);
  check_root("reduce", options.rootRank);
  const Reduction reduction = reduction_of(options.reduceOp, tensor.scalar_type());
  const int root = static_cast<int>(options.rootRank);
  const milliseconds timeout = patience(options.timeout);
  const Start start{OpType::REDUCE, "hfreduce:reduce", options.asyncOp, tensor.device()};
  return begin(start, tensors, [=, this](int&) {
    const Element element = element_of(tensor.scalar_type());
    const Memory memory(tensor, true, by_host(timeout));
    communicator_->reduce(memory.data(), rank_ == root ? memory.data() : nullptr, memory.count() * element.width,
                          element.dtype, reduction, root, timeout);
    if (rank_ == root) memory.give_back();
  });
}

// outputs: the whole output as one tensor, or one tensor per rank, which may differ in size.
void Backend::all_gather_now(const Tensors& outputs, const at::Tensor& input, std::optional<gpu::Path> path,
                             milliseconds timeout) {
  const Element element = element_of(input.scalar_type());
  const c10::Device device = input.device();
  const bool alone = size_ == 1 && !device.is_cpu();
  if (alone || !even(outputs)) {
    outputs[rank_].copy_(input.view_as(outputs[rank_]));
    for (int root = 0; root < size_ && !alone; ++root) {
      const Memory memory(outputs[root], rank_ == root, by_host(timeout));
      communicator_->broadcast(memory.data(), memory.count() * element.width, element.dtype, root, timeout);
      memory.give_back();
    }
    return;
  }
  const Way way = this->way(device, {Kind::all_gather, bytes_of(outputs), element.dtype}, path, timeout);
  const Memory in(input, true, way);
  Memory out(outputs, false, way);
  const char* const place = out.data() + rank_ * in.count() * input.element_size();
  if (out.overlaps(in) && in.data() != place) out.copy(false);
  const int64_t count = in.count() * element.width;
  if (way.accelerator)
    way.accelerator->all_gather(way.path, in.data(), out.data(), count, element.dtype, native(input), timeout);
  else
    communicator_->all_gather(in.data(), out.data(), count, element.dtype, timeout);
  out.give_back();
}

Backend::Work Backend::allgather(std::vector<Tensors>& outputs, Tensors& inputs,
                                 const c10d::AllgatherOptions& options) {
  const at::Tensor input = only("all_gather", inputs);
  const Tensors list = only("all_gather", outputs);
  check_list("all_gather", list, size_, input);
  TORCH_CHECK_VALUE(list[rank_].numel() == input.numel(), "hfreduce: all_gather was given an input of ", input.sizes(),
                    " but an output of ", list[rank_].sizes(), " for this rank (", rank_, ")");
  const milliseconds timeout = patience(options.timeout);
  Start start{OpType::ALLGATHER, "hfreduce:all_gather", options.asyncOp, input.device()};
  if (even(list))
    start.path = path(input.device(), {Kind::all_gather, bytes_of(list), element_of(input.scalar_type()).dtype});
  return begin(start, list, [=, this](int&) { all_gather_now(list, input, start.path, timeout); });
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
  Start start{type, "hfreduce:all_gather", options.asyncOp, device_of("all_gather", inputs)};
  for (size_t i = 0; i < inputs.size(); ++i) {
    const auto by = path(start.device, message_of(Kind::all_gather, outputs[i]));
    start.path = i ? both(start.path, by) : by;
  }
  return begin(start, outputs, [=, this, outputs = outputs, inputs = inputs](int&) {
    for (size_t i = 0; i < inputs.size(); ++i) all_gather_now({outputs[i]}, inputs[i], std::nullopt, timeout);
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
  for (size_t i = 0; i < inputs.size(); ++i) check_list("all_gather", lists[i], size_, inputs[i]);
  const milliseconds timeout = patience(options.timeout);
  const Start start{OpType::ALLGATHER_COALESCED, "hfreduce:all_gather", options.asyncOp,
                    device_of("all_gather", inputs)};
  return begin(start, flat, [=, this, inputs = inputs](int&) {
    for (size_t i = 0; i < inputs.size(); ++i) all_gather_now(lists[i], inputs[i], std::nullopt, timeout);
  });
}

Backend::Work Backend::gather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::GatherOptions& options) {
  const at::Tensor input = only("gather", inputs);
  check_root("gather", options.rootRank);
  const int root = static_cast<int>(options.rootRank);
  const Tensors list = rank_ == root ? only("gather", outputs) : Tensors();
  if (rank_ == root) check_list("gather", list, size_, input);
  for (const at::Tensor& output : list)
    TORCH_CHECK_VALUE(output.numel() == input.numel(), "hfreduce: gather takes outputs of the input's size, ",
                      input.sizes(), ", got ", output.sizes());
  const milliseconds timeout = patience(options.timeout);
  const Start start{OpType::GATHER, "hfreduce:gather", options.asyncOp, input.device()};
  return begin(start, list, [=, this](int&) {
    const Element element = element_of(input.scalar_type());
    const Memory in(input, true, by_host(timeout));
    Memory out(list, false, by_host(timeout));
    if (out.overlaps(in)) out.copy(false);
    communicator_->gather(in.data(), out.data(), in.count() * element.width, element.dtype, root, timeout);
    out.give_back();
  });
}

Backend::Work Backend::scatter(Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ScatterOptions& options) {
  const at::Tensor output = only("scatter", outputs);
  check_root("scatter", options.rootRank);
  const int root = static_cast<int>(options.rootRank);
  const Tensors list = rank_ == root ? only("scatter", inputs) : Tensors();
  if (rank_ == root) check_list("scatter", list, size_, output);
  for (const at::Tensor& input : list)
    TORCH_CHECK_VALUE(input.numel() == output.numel(), "hfreduce: scatter takes inputs of the output's size, ",
                      output.sizes(), ", got ", input.sizes());
  const milliseconds timeout = patience(options.timeout);
  const Start start{OpType::SCATTER, "hfreduce:scatter", options.asyncOp, output.device()};
  return begin(start, outputs, [=, this](int&) {
    const Element element = element_of(output.scalar_type());
    const Memory in(list, true, by_host(timeout));
    Memory out(output, false, by_host(timeout));
    if (out.overlaps(in)) out.copy(false);
    communicator_->scatter(in.data(), out.data(), out.count() * element.width, element.dtype, root, timeout);
    out.give_back();
  });
}

// inputs: the whole input as one tensor, or one tensor per rank, which may differ in size.
void Backend::reduce_scatter_now(const at::Tensor& output, const Tensors& inputs, Reduction reduction,
                                 std::optional<gpu::Path> path, milliseconds timeout) {
  const Element element = element_of(output.scalar_type());
  const c10::Device device = output.device();
  if (size_ == 1 && !device.is_cpu() && reduction.op != Op::premul_sum) {
    output.copy_(inputs[0].view_as(output));
  } else if (even(inputs)) {
    const gpu::Message message{Kind::reduce_scatter, bytes_of(inputs), element.dtype, reduction.op};
    const Way way = this->way(device, message, path, timeout);
    Memory out(output, false, way);
    const Memory in(inputs, true, way);
    if (out.overlaps(in)) out.copy(false);
    const int64_t count = out.count() * element.width;
    if (way.accelerator)
      way.accelerator->reduce_scatter(way.path, in.data(), out.data(), count, element.dtype, reduction, native(output),
                                      timeout);
    else
      communicator_->reduce_scatter(in.data(), out.data(), count, element.dtype, reduction, timeout);
    out.give_back();
  } else {
    Memory out(output, false, by_host(timeout));
    for (int root = 0; root < size_; ++root) {
      const Memory in(inputs[root], true, by_host(timeout));
      if (rank_ == root && out.overlaps(in)) out.copy(false);
      communicator_->reduce(in.data(), rank_ == root ? out.data() : nullptr, in.count() * element.width, element.dtype,
                            reduction, root, timeout);
    }
    out.give_back();
  }
}

Backend::Work Backend::reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                                      const c10d::ReduceScatterOptions& options) {
  const at::Tensor output = only("reduce_scatter", outputs);
  const Tensors list = only("reduce_scatter", inputs);
  check_list("reduce_scatter", list, size_, output);
  TORCH_CHECK_VALUE(list[rank_].numel() == output.numel(), "hfreduce: reduce_scatter was given an output of ",
                    output.sizes(), " but an input of ", list[rank_].sizes(), " for this rank (", rank_, ")");
  const Reduction reduction = reduction_of(options.reduceOp, output.scalar_type());
  const milliseconds timeout = patience(options.timeout);
  Start start{OpType::REDUCE_SCATTER, "hfreduce:reduce_scatter", options.asyncOp, output.device()};
  if (even(list)) {
    const DType dtype = element_of(output.scalar_type()).dtype;
    start.path = path(start.device, {Kind::reduce_scatter, bytes_of(list), dtype, reduction.op});
  }
  return begin(start, outputs, [=, this](int&) { reduce_scatter_now(output, list, reduction, start.path, timeout); });
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
  Start start{type, "hfreduce:reduce_scatter", options.asyncOp, device_of("reduce_scatter", inputs)};
  for (size_t i = 0; i < inputs.size(); ++i) {
    const auto by = path(start.device, message_of(Kind::reduce_scatter, inputs[i], reductions[i].op));
    start.path = i ? both(start.path, by) : by;
  }
  return begin(start, outputs, [=, this, outputs = outputs, inputs = inputs](int&) {
    for (size_t i = 0; i < inputs.size(); ++i)
      reduce_scatter_now(outputs[i], {inputs[i]}, reductions[i], std::nullopt, timeout);
  });
}

// all_reduce of sparse tensors, as in gloo: every rank gathers all indices and values, and adds them in rank order.
// Ranks may have different numbers of values. Only indices that some rank has are in the result.

namespace {

// Exchanged between ranks: number of values, number of sparse dimensions, and all sizes.
constexpr size_t kDims = 16;
struct Form {
  int64_t count = 0, sparse = 0, dims = 0;
  std::array<int64_t, kDims> sizes{};

  explicit Form(const at::Tensor& x) : count(x._nnz()), sparse(x.sparse_dim()), dims(x.dim()) {
    std::copy(x.sizes().begin(), x.sizes().end(), sizes.begin());
  }
  bool fits(const Form& other) const { return sparse == other.sparse && dims == other.dims && sizes == other.sizes; }
};

at::Tensor coo(const at::Tensor& indices, const at::Tensor& values, const at::Tensor& like) {
  return at::_sparse_coo_tensor_unsafe(indices, values, like.sizes(), like.options().requires_grad(false));
}

}  // namespace

at::Tensor Backend::sum_of_sparse(const at::Tensor& input, milliseconds timeout) {
  const Form mine(input);
  std::vector<Form> forms(size_, mine);
  constexpr int64_t words = sizeof(Form) / sizeof(int64_t);
  communicator_->all_gather(&mine, forms.data(), words, DType::i64, timeout);
  for (int rank = 0; rank < size_; ++rank)  // all ranks see the same, so all throw, and the group stays usable
    TORCH_CHECK_VALUE(forms[rank].fits(mine),
                      "hfreduce: all_reduce takes sparse tensors of one shape and one number of ",
                      "sparse dimensions, got ", input.sizes(), " on rank ", rank_, " and another on rank ", rank);
  const at::Tensor indices = input._indices(), values = input._values();
  Tensors all_indices, all_values;
  for (const Form& form : forms) {
    std::vector<int64_t> sizes = values.sizes().vec();
    sizes[0] = form.count;
    all_indices.push_back(at::empty({form.sparse, form.count}, indices.options()));
    all_values.push_back(at::empty(sizes, values.options().requires_grad(false)));
  }
  all_gather_now(all_indices, indices, std::nullopt, timeout);
  all_gather_now(all_values, values, std::nullopt, timeout);
  at::Tensor sum = coo(all_indices[0], all_values[0], input);
  for (int rank = 1; rank < size_; ++rank) sum.add_(coo(all_indices[rank], all_values[rank], input));
  return sum.coalesce();
}

Backend::Work Backend::allreduce_sparse(Tensors& tensors, const c10d::AllreduceOptions& options) {
  TORCH_CHECK_VALUE(tensors.size() == 1 && tensors[0].layout() == c10::kSparse,
                    "hfreduce: a sparse all_reduce takes one tensor of layout Sparse");
  const at::Tensor tensor = tensors[0];
  TORCH_CHECK_VALUE(tensor.device().is_cpu() || tensor.device().is_cuda(),
                    "hfreduce: all_reduce takes CPU and CUDA tensors, got one on ", tensor.device());
  TORCH_CHECK_VALUE(options.reduceOp.op_ == c10d::ReduceOp::SUM, "hfreduce: all_reduce of sparse tensors takes ",
                    "ReduceOp.SUM, got ReduceOp.", name_of(options.reduceOp.op_));
  TORCH_CHECK_VALUE(tensor.dim() <= static_cast<int64_t>(kDims), "hfreduce: all_reduce takes sparse tensors of up to ",
                    kDims, " dimensions, got ", tensor.dim());
  const milliseconds timeout = patience(options.timeout);
  const Start start{OpType::_ALLREDUCE_SPARSE, "hfreduce:all_reduce", options.asyncOp, tensor.device()};
  return begin(start, tensors, [=, this](int&) { tensor.copy_(sum_of_sparse(tensor.coalesce(), timeout)); });
}

}  // namespace hfreduce
