// hfnn::Tensor: what a kernel needs to know of a torch.Tensor, without torch headers. It borrows the memory. An absent
// tensor (Python's None) converts to false.
#pragma once
#include <cstdint>

namespace hfnn {

// torch.bool is uint8 with the values 0 and 1.
enum class Dtype : uint8_t { none, float32, bfloat16, float16, float64, int64, uint8, int32, int16, other };

struct Tensor {
  static constexpr int kMaxDims = 8;
  void* data = nullptr;
  int64_t shape[kMaxDims] = {}, strides[kMaxDims] = {};  // strides in elements
  int dims = 0;
  int device = -1;  // -1: the CPU, else the CUDA ordinal
  Dtype dtype = Dtype::none;

  explicit operator bool() const { return dtype != Dtype::none; }

  template <class T>
  T* as() const {
    return static_cast<T*>(data);
  }

  int64_t numel() const {
    int64_t n = 1;
    for (int i = 0; i < dims; ++i) n *= shape[i];
    return n;
  }

  // A dimension of size 1 may have any stride, and an empty tensor has no layout.
  bool contiguous() const {
    int64_t expected = 1;
    for (int i = dims; i-- > 0; expected *= shape[i])
      if (shape[i] != 1 && strides[i] != expected) return numel() == 0;
    return true;
  }
};

}  // namespace hfnn
