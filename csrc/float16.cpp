// Conversions between 16 bits and float32, many at once.
#include "cpu.h"
#ifdef __x86_64__
#include <immintrin.h>
#endif

namespace hfnn {

#ifdef __x86_64__
// The software conversions of cpu.h give the same bits but cost several times as much.
#define HFNN_F16C __attribute__((target("avx2,f16c")))

HFNN_F16C static void widen_f16c(const float16* x, float* y, int64_t n) {
  int64_t i = 0;
  for (; i + 8 <= n; i += 8) _mm256_storeu_ps(y + i, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)(x + i))));
  for (; i < n; ++i) y[i] = _cvtsh_ss(x[i].bits);
}

HFNN_F16C static void narrow_f16c(const float* x, float16* y, int64_t n) {
  int64_t i = 0;
  for (; i + 8 <= n; i += 8)
    _mm_storeu_si128((__m128i*)(y + i), _mm256_cvtps_ph(_mm256_loadu_ps(x + i), _MM_FROUND_TO_NEAREST_INT));
  for (; i < n; ++i) y[i].bits = _cvtss_sh(x[i], _MM_FROUND_TO_NEAREST_INT);
}

static const bool has_f16c = __builtin_cpu_supports("avx2");  // every processor with AVX2 has it
#endif

HFNN_CLONES static void widen_bfloat16(const bfloat16* x, float* y, int64_t n) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) y[i] = load(x[i]);
}

HFNN_CLONES static void narrow_bfloat16(const float* x, bfloat16* y, int64_t n) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) store(y[i], x[i]);
}

void widen(Dtype dtype, const void* in, float* y, int64_t n) {
  if (dtype == Dtype::bfloat16) return widen_bfloat16(static_cast<const bfloat16*>(in), y, n);
  const auto* x = static_cast<const float16*>(in);
#ifdef __x86_64__
  if (has_f16c) return widen_f16c(x, y, n);
#endif
  for (int64_t i = 0; i < n; ++i) y[i] = load(x[i]);
}

void narrow(Dtype dtype, const float* x, void* out, int64_t n) {
  if (dtype == Dtype::bfloat16) return narrow_bfloat16(x, static_cast<bfloat16*>(out), n);
  auto* y = static_cast<float16*>(out);
#ifdef __x86_64__
  if (has_f16c) return narrow_f16c(x, y, n);
#endif
  for (int64_t i = 0; i < n; ++i) store(y[i], x[i]);
}

}  // namespace hfnn
