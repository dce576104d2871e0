// What the CPU optimizers do with a row of optim.h's table: its arrays as runs of W, its group, the factor of its
// gradients.
#pragma once
#include "optim_formats.h"

namespace hfnn {

template <class T>
HFNN_INLINE T* pointer(int64_t address) {
  return reinterpret_cast<T*>(uintptr_t(address));
}

HFNN_INLINE Kept parameter_of(const int64_t* row) {
  return {pointer<void>(row[Optim::kParam]), nullptr, row[Optim::kCodes] & 15, true};
}
HFNN_INLINE Kept gradient_of(const int64_t* row) {
  return {pointer<void>(row[Optim::kGrad]), nullptr, row[Optim::kCodes] >> 4 & 15, true};
}
// The first state is signed, as Adam's is.
HFNN_INLINE Kept state_of(const int64_t* row, int64_t s) {
  return {pointer<void>(row[Optim::kState + s]), pointer<float>(row[Optim::kScale + s]), row[Optim::kCodes] >> 8 & 15,
          s == 0};
}

template <class W>
HFNN_INLINE W* open_parameter(const int64_t* row, int64_t first, int64_t n, W* buffer) {
  if constexpr (std::is_same_v<W, float>)
    if (row[Optim::kRemainder]) {
      widen_master(pointer<bfloat16>(row[Optim::kParam]) + first, pointer<int16_t>(row[Optim::kRemainder]) + first, n,
                   buffer);
      return buffer;
    }
  return open<W>(parameter_of(row), first, n, buffer);
}

// How parameters are stored; see Optim::update.
struct Keeping {
  double ema_decay;
  int64_t seed, offset;
};

// counter: for the first random bits of the run. Overwrites p.
template <class W>
HFNN_INLINE void close_parameter(const Keeping& keeping, const int64_t* row, W* p, int64_t first, int64_t n,
                                 uint64_t counter) {
  const Kept kept = parameter_of(row);
  const bool narrow = kept.format == Optim::kBfloat16 || kept.format == Optim::kFloat16;
  if constexpr (std::is_same_v<W, float>) {
    if (row[Optim::kRemainder])
      narrow_master(p, n, static_cast<bfloat16*>(kept.data) + first, pointer<int16_t>(row[Optim::kRemainder]) + first);
    else if (keeping.seed >= 0 && narrow)
      narrow_stochastic(p, first, n, kept, uint64_t(keeping.seed), uint64_t(keeping.offset) + counter);
    else
      close(p, first, n, kept);
  } else {
    close(p, first, n, kept);
  }
  if (keeping.ema_decay < 0 || !row[Optim::kEma]) return;
  float* ema = pointer<float>(row[Optim::kEma]) + first;
  const W* master = open_parameter(row, first, n, p);
  const W rest = W(1 - keeping.ema_decay);
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) ema[i] = float(W(ema[i]) + rest * (master[i] - W(ema[i])));
}

// Rounds a state to its storage format: later steps will read these values.
template <class W>
HFNN_INLINE void keep(W* run, int64_t first, int64_t n, const Kept& kept) {
  if (in_place<W>(kept)) return;
  narrow(run, first, n, kept);
  widen(kept, first, n, run);
}

// f(W{}) with the dtype of a row's arithmetic.
template <class F>
HFNN_INLINE void with_row(const int64_t* row, F f) {
  if ((row[Optim::kCodes] & 15) == Optim::kFloat64)
    f(double{});
  else
    f(float{});
}

inline const double* group_of(const Tensor& hyper, const int64_t* row) {
  return hyper.as<double>() + row[Optim::kGroup] * Optim::kHyper;
}
inline double step_of(const int64_t* row) { return *pointer<float>(row[Optim::kStep]); }

inline bool found_inf(const Tensor& control) { return control.as<float>()[Optim::kFoundInf] != 0; }

// The factor of the gradients. Writes the norm to `norm`. A NaN norm makes every gradient NaN.
inline double gradient_factor(const Tensor& control, const Tensor& squares, float* norm) {
  const float* c = control.as<float>();
  if (!squares) return 1 / double(c[Optim::kGradScale]);
  double total = 0;
  for (int64_t p = 0; p < squares.shape[0]; ++p) total += squares.as<double>()[p];
  const double root = std::sqrt(total), clip = c[Optim::kMaxNorm] / (root + 1e-6);
  *norm = float(root);
  return (clip >= 1 ? 1 : clip) / c[Optim::kGradScale];
}

inline void expect(const char* name, const Tensor& t, std::initializer_list<int64_t> shape, Dtype dtype) {
  expect_shape(name, t, shape);
  expect_dtype(name, t, dtype);
}
inline void expect_call(const Tensor& rows, const Tensor& hyper, const Tensor& control, const Tensor& squares) {
  expect("rows", rows, {rows.shape[0], Optim::kColumns}, Dtype::int64);
  expect("hyper", hyper, {hyper.shape[0], Optim::kHyper}, Dtype::float64);
  expect("control", control, {Optim::kControl}, Dtype::float32);
  if (squares) expect("squares", squares, {squares.shape[0]}, Dtype::float64);
}

// The cost of all rows, in elements. A row alone costs as much as a few hundred.
inline int64_t work_of(const Tensor& rows) {
  const int64_t *row = rows.as<int64_t>(), *end = row + rows.shape[0] * Optim::kColumns;
  int64_t elements = 0;
  for (; row < end; row += Optim::kColumns) elements += row[Optim::kNumel] + 256;
  return elements;
}

}  // namespace hfnn
