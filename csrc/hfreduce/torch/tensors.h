// Tensors as the core takes them: checked, contiguous, of a supported dtype.
#pragma once

#include <cstring>
#include <string>
#include <torch/csrc/distributed/c10d/Types.hpp>
#include <vector>

#include "collectives/reduce.h"
#include "torch/device.h"
#include "types.h"

namespace hfreduce {

using Tensors = std::vector<at::Tensor>;

// A tensor element is sent as `width` numbers of `dtype`. Operations that only move data take any dtype.
struct Element {
  DType dtype;
  int64_t width = 1;
};

inline Element element_of(at::ScalarType type) {
  switch (type) {
    case at::kByte:
      return {DType::u8};
    case at::kChar:
      return {DType::i8};
    case at::kShort:
      return {DType::i16};
    case at::kInt:
      return {DType::i32};
    case at::kLong:
      return {DType::i64};
    case at::kBool:
      return {DType::boolean};
    case at::kHalf:
      return {DType::f16};
    case at::kBFloat16:
      return {DType::bf16};
    case at::kFloat:
      return {DType::f32};
    case at::kDouble:
      return {DType::f64};
    case at::kFloat8_e4m3fn:
      return {DType::e4m3};
    case at::kFloat8_e5m2:
      return {DType::e5m2};
    case at::kComplexHalf:
      return {DType::f16, 2};
    case at::kComplexFloat:
      return {DType::f32, 2};
    case at::kComplexDouble:
      return {DType::f64, 2};
    default:
      return {DType::u8, static_cast<int64_t>(c10::elementSize(type))};
  }
}

// The dtypes that reductions support. Wider unsigned integers, other 8-bit floats and quantized types are only moved.
inline bool has_arithmetic(at::ScalarType type) { return type == at::kByte || element_of(type).dtype != DType::u8; }

inline const char* name_of(c10d::ReduceOp::RedOpType op) {
  constexpr const char* names[] = {"SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR", "PREMUL_SUM"};
  return op < std::size(names) ? names[op] : "UNUSED";
}

// The core's reduction. Throws ValueError if it is not defined for this dtype, before anything is sent.
inline Reduction reduction_of(const c10d::ReduceOp& op, at::ScalarType type) {
  constexpr Op ops[] = {Op::sum, Op::avg, Op::prod, Op::min, Op::max, Op::band, Op::bor, Op::bxor, Op::premul_sum};
  const bool linear = op.op_ == c10d::ReduceOp::SUM || op.op_ == c10d::ReduceOp::AVG;
  const bool known = op.op_ < std::size(ops) && has_arithmetic(type) && (!c10::isComplexType(type) || linear);
  TORCH_CHECK_VALUE(known && supported(element_of(type).dtype, ops[op.op_]), "hfreduce: ReduceOp.", name_of(op.op_),
                    " is not defined for ", type,
                    " tensors (bit operations: integers and bool; PREMUL_SUM: floats; AVG: all but bool; complex: SUM "
                    "and AVG; none for unsigned integers of more than 8 bits)");
  Reduction reduction{ops[op.op_]};
  if (reduction.op == Op::premul_sum) {
    TORCH_CHECK_VALUE(op.supplement_, "hfreduce: ReduceOp.PREMUL_SUM was given no factor");
    const auto& factor = static_cast<const c10d::NCCLPreMulSumSupplement&>(*op.supplement_);
    reduction.factor = factor.tensor_factor.defined() ? factor.tensor_factor.item<double>() : factor.double_factor;
  }
  return reduction;
}

inline void check_tensor(const char* what, const at::Tensor& tensor) {
  TORCH_CHECK_VALUE(tensor.defined(), "hfreduce: ", what, " was given an undefined tensor");
  TORCH_CHECK_VALUE(tensor.layout() == at::kStrided, "hfreduce: ", what, " takes dense tensors, got layout ",
                    tensor.layout(), ": call .to_dense() first");
  TORCH_CHECK_VALUE(tensor.device().is_cpu() || tensor.device().is_cuda(), "hfreduce: ", what,
                    " takes CPU and CUDA tensors, got one on ", tensor.device(), ": move it by .cpu()");
}

inline void check_same(const char* what, const at::Tensor& a, const at::Tensor& b) {
  TORCH_CHECK_VALUE(a.scalar_type() == b.scalar_type(), "hfreduce: ", what,
                    " takes input and output of one dtype, got ", a.scalar_type(), " and ", b.scalar_type());
  TORCH_CHECK_VALUE(a.device() == b.device(), "hfreduce: ", what, " takes input and output on one device, got ",
                    a.device(), " and ", b.device());
}

// `count` tensors, all of the dtype and on the device of `like`.
inline void check_list(const char* what, const Tensors& tensors, int64_t count, const at::Tensor& like) {
  const at::ScalarType type = like.scalar_type();
  TORCH_CHECK_VALUE(static_cast<int64_t>(tensors.size()) == count, "hfreduce: ", what,
                    " takes a list of one tensor for each rank, ", count, ", got ", tensors.size());
  for (const at::Tensor& tensor : tensors) {
    check_tensor(what, tensor);
    TORCH_CHECK_VALUE(tensor.scalar_type() == type, "hfreduce: ", what, " takes tensors of one dtype, got ", type,
                      " and ", tensor.scalar_type());
    TORCH_CHECK_VALUE(tensor.device() == like.device(), "hfreduce: ", what, " takes tensors on one device, got ",
                      like.device(), " and ", tensor.device());
  }
}

inline const at::Tensor& only(const char* what, const Tensors& tensors) {
  TORCH_CHECK_VALUE(tensors.size() == 1, "hfreduce: ", what, " takes one tensor, got ", tensors.size());
  check_tensor(what, tensors[0]);
  return tensors[0];
}

inline const Tensors& only(const char* what, const std::vector<Tensors>& lists) {
  TORCH_CHECK_VALUE(lists.size() == 1, "hfreduce: ", what, " takes one list of tensors, got ", lists.size());
  return lists[0];
}

inline bool even(const Tensors& tensors) {
  for (const at::Tensor& tensor : tensors)
    if (tensor.numel() != tensors[0].numel()) return false;
  return true;
}

inline int64_t bytes_of(const at::Tensor& tensor) { return static_cast<int64_t>(tensor.nbytes()); }
inline int64_t bytes_of(const Tensors& tensors) {
  int64_t bytes = 0;
  for (const at::Tensor& tensor : tensors) bytes += bytes_of(tensor);
  return bytes;
}

// The current stream of the tensor's device, which gets the operation's work.
inline gpu::Stream native(const at::Tensor& tensor) { return current_stream(tensor.device()).native_handle(); }

inline c10::Device device_of(const char* what, const Tensors& tensors) {
  for (const at::Tensor& tensor : tensors)
    TORCH_CHECK_VALUE(tensor.device() == tensors[0].device(), "hfreduce: ", what, " takes tensors on one device, got ",
                      tensors[0].device(), " and ", tensor.device());
  return tensors.empty() ? c10::Device(c10::kCPU) : tensors[0].device();
}

// Tensors of one dtype as one contiguous block: their own memory if it is contiguous, otherwise a copy. The block is on
// the host (pinned, for device tensors) unless the accelerator is used. Copies between host and device run on the
// current stream.
class Memory {
 public:
  // filled: whether the tensors' contents are needed.
  Memory(Tensors tensors, bool filled, const Way& way) : tensors_(std::move(tensors)), way_(way) {
    if (tensors_.empty()) return;
    staged_ = !way.accelerator && !tensors_[0].device().is_cpu();
    data_ = static_cast<char*>(tensors_[0].data_ptr());
    const char* next = data_;
    // The core may rely on alignment.
    bool own = !staged_ && reinterpret_cast<uintptr_t>(data_) % tensors_[0].element_size() == 0;
    for (const at::Tensor& tensor : tensors_) {
      own = own && tensor.is_contiguous() && !tensor.is_conj() && !tensor.is_neg();
      own = own && (tensor.numel() == 0 || tensor.data_ptr() == next);
      if (own) next += tensor.nbytes();
      count_ += tensor.numel();
    }
    bytes_ = count_ * static_cast<int64_t>(tensors_[0].element_size());
    if (!own) copy(filled);
  }
  Memory(const at::Tensor& tensor, bool filled, const Way& way) : Memory(Tensors{tensor}, filled, way) {}

  char* data() const { return data_; }
  int64_t count() const { return count_; }  // elements

  bool overlaps(const Memory& other) const {
    return data_ < other.data_ + other.bytes_ && other.data_ < data_ + bytes_;
  }

  // Switches to a copy.
  void copy(bool filled) {
    auto options = tensors_[0].options().requires_grad(false).memory_format(std::nullopt);
    // torch's caching allocator reuses pinned memory once the copies that use it are done.
    if (staged_) options = options.device(at::kCPU).pinned_memory(true);
    buffer_ = at::empty({count_}, options);
    data_ = static_cast<char*>(buffer_.data_ptr());
    if (!filled) return;
    int64_t offset = 0;
    for (const at::Tensor& tensor : tensors_) part(offset, tensor).copy_(tensor, /*non_blocking=*/true);
    if (staged_) way_.settle(tensors_[0].device());
  }

  // Copies the result back into the tensors, if this is a copy.
  void give_back() const {
    if (!buffer_.defined()) return;
    int64_t offset = 0;
    for (const at::Tensor& tensor : tensors_) tensor.copy_(part(offset, tensor), /*non_blocking=*/true);
  }

 private:
  at::Tensor part(int64_t& offset, const at::Tensor& tensor) const {
    offset += tensor.numel();
    return buffer_.narrow(0, offset - tensor.numel(), tensor.numel()).view(tensor.sizes());
  }

  Tensors tensors_;
  Way way_;
  at::Tensor buffer_;
  bool staged_ = false;
  char* data_ = nullptr;
  int64_t count_ = 0, bytes_ = 0;
};

}  // namespace hfreduce
