// The AVX-512 intrinsics that csrc/lanes.h uses, restated from Intel's guide for a processor that has AVX2 only, so
// that the AVX-512 path can be run and compared there. Forced in front of kernels_isa.cpp by test_kernel_build.py.
#pragma once
#include <immintrin.h>
#include <math.h>
#include <stdint.h>
#include <string.h>

namespace emulated {
struct F { float x[16]; };
struct I { uint32_t x[16]; };
typedef uint16_t M;

#define EACH(type, expr)                          \
  {                                               \
    type r;                                       \
    for (int i = 0; i < 16; ++i) r.x[i] = (expr); \
    return r;                                     \
  }
static inline F set1(float v) EACH(F, v)
static inline F load(const float* p) EACH(F, p[i])
static inline F maskz_load(M m, const float* p) EACH(F, m >> i & 1 ? p[i] : 0.0f)
static inline void store(float* p, F a) { memcpy(p, a.x, 64); }
static inline void mask_store(float* p, M m, F a) {
  for (int i = 0; i < 16; ++i)
    if (m >> i & 1) p[i] = a.x[i];
}
static inline F add(F a, F b) EACH(F, a.x[i] + b.x[i])
static inline F sub(F a, F b) EACH(F, a.x[i] - b.x[i])
static inline F mul(F a, F b) EACH(F, a.x[i] * b.x[i])
static inline F div(F a, F b) EACH(F, a.x[i] / b.x[i])
static inline F root(F a) EACH(F, sqrtf(a.x[i]))
static inline F absolute(F a) EACH(F, fabsf(a.x[i]))
static inline F blend(M m, F a, F b) EACH(F, m >> i & 1 ? b.x[i] : a.x[i])
static inline M compare(F a, F b, int how) {
  M m = 0;
  for (int i = 0; i < 16; ++i) m |= (M)((how == _CMP_GT_OQ ? a.x[i] > b.x[i] : a.x[i] == b.x[i]) << i);
  return m;
}
static inline I widen(__m256i a) {
  uint16_t t[16];
  memcpy(t, &a, 32);
  EACH(I, t[i])
}
static inline I shift_left(I a, int n) EACH(I, a.x[i] << n)
static inline F as_float(I a) {
  F r;
  memcpy(&r, &a, 64);
  return r;
}
static inline F half_to_float(__m256i a) {
  F r;
  _mm256_storeu_ps(r.x, _mm256_cvtph_ps(_mm256_castsi256_si128(a)));
  _mm256_storeu_ps(r.x + 8, _mm256_cvtph_ps(_mm256_extracti128_si256(a, 1)));
  return r;
}
static inline __m256i float_to_half(F a) {
  const __m128i low = _mm256_cvtps_ph(_mm256_loadu_ps(a.x), 0), high = _mm256_cvtps_ph(_mm256_loadu_ps(a.x + 8), 0);
  return _mm256_inserti128_si256(_mm256_castsi128_si256(low), high, 1);
}
#undef EACH
}  // namespace emulated

#define __m512 emulated::F
#define __mmask16 emulated::M
#define _mm512_set1_ps emulated::set1
#define _mm512_loadu_ps emulated::load
#define _mm512_storeu_ps emulated::store
#define _mm512_maskz_loadu_ps emulated::maskz_load
#define _mm512_mask_storeu_ps emulated::mask_store
#define _mm512_add_ps emulated::add
#define _mm512_sub_ps emulated::sub
#define _mm512_mul_ps emulated::mul
#define _mm512_div_ps emulated::div
#define _mm512_sqrt_ps emulated::root
#define _mm512_abs_ps emulated::absolute
#undef _mm512_cmp_ps_mask
#define _mm512_cmp_ps_mask emulated::compare
#define _mm512_mask_blend_ps emulated::blend
#undef _mm512_slli_epi32
#define _mm512_slli_epi32 emulated::shift_left
#define _mm512_cvtepu16_epi32 emulated::widen
#define _mm512_castsi512_ps emulated::as_float
#define _mm512_cvtph_ps emulated::half_to_float
#undef _mm512_cvtps_ph
#define _mm512_cvtps_ph(a, how) emulated::float_to_half(a)
