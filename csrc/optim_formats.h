// How optim.cpp reads and writes arrays in the formats of optim.h, as runs of float or double.
#pragma once
#include "cpu.h"
#include "optim.h"

namespace hfnn {

// An array of a row. `scale` and `has_sign` are used for codes only.
struct Kept {
  void* data;
  float* scale;
  int64_t format;
  bool has_sign;
};

// Elements [first, first + n) into a buffer and back. For codes, `first` starts a block, and first + n ends one, or the
// row. `narrow` rounds to nearest.
void widen(const Kept& kept, int64_t first, int64_t n, float* out);
void widen(const Kept& kept, int64_t first, int64_t n, double* out);
void narrow(const float* in, int64_t first, int64_t n, const Kept& kept);
void narrow(const double* in, int64_t first, int64_t n, const Kept& kept);

// float32 parameters stored as bfloat16 and the remainder of the rounding.
void widen_master(const bfloat16* parameter, const int16_t* remainder, int64_t n, float* out);
void narrow_master(const float* in, int64_t n, bfloat16* parameter, int16_t* remainder);

// 16-bit parameters, rounded with the random bits of the counters from `counter` on, eight elements each.
void narrow_stochastic(const float* in, int64_t first, int64_t n, const Kept& kept, uint64_t seed, uint64_t counter);

// A run as T: in place if it is stored so; else, with T = W, in the buffer, from which close() writes it back.
template <class T>
HFNN_INLINE bool in_place(const Kept& kept) {
  return kept.format == (std::is_same_v<T, double> ? Optim::kFloat64 : Optim::kFloat32);
}
template <class T>
HFNN_INLINE T* open(const Kept& kept, int64_t first, int64_t n, Wide<T>* buffer) {
  if constexpr (!std::is_same_v<T, bfloat16>)
    if (!in_place<T>(kept)) return widen(kept, first, n, buffer), buffer;
  return static_cast<T*>(kept.data) + first;
}
template <class T>
HFNN_INLINE void close(const T* run, int64_t first, int64_t n, const Kept& kept) {
  if constexpr (!std::is_same_v<T, bfloat16>)
    if (!in_place<T>(kept)) narrow(run, first, n, kept);
}

}  // namespace hfnn
