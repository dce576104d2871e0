// all_reduce of sparse tensors, as gloo does it: everybody gathers the indices and values of all, and adds them up in
// the order of ranks. Ranks may have unequally many; what has no value anywhere stays out of the result.
#include <ATen/Functions.h>

#include <array>

#include "torch/backend.h"

namespace hfreduce {

using c10d::OpType;

namespace {

// What ranks tell of theirs: how many values, how many dimensions are sparse, and all sizes.
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
  for (int rank = 0; rank < size_; ++rank)  // all see the same, so all refuse, and the group goes on
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
  all_gather_now(all_indices, indices, timeout);
  all_gather_now(all_values, values, timeout);
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
  return collective(start, tensors, [=, this](int&) { tensor.copy_(sum_of_sparse(tensor.coalesce(), timeout)); });
}

}  // namespace hfreduce
