// Sixteen float lanes, the only place where instruction sets differ.
//
// Every kernel is written once over `V` (16 floats) and compiled several times with EC_ISA = 0 (portable: 16-byte
// vectors of the compiler, SSE2 on x86-64 and NEON on aarch64), 1 (AVX2 + F16C) or 2 (AVX-512), each into a namespace
// of its own, EC_NS. Each function below is one IEEE operation per lane or a fixed tree, so all sets give equal bits.
// No function here has external linkage and nothing of the C++ library is used: a template shared with the
// baseline code could otherwise be emitted with instructions the machine lacks.
#pragma once
#include <math.h>
#include <stdint.h>
#include <string.h>
#if EC_ISA >= 1
#include <immintrin.h>
#endif

#define EC_INLINE static inline __attribute__((always_inline))
#define EC_NOINLINE __attribute__((noinline))

namespace embcache {
namespace EC_NS {

constexpr int kLanes = 16;

#if EC_ISA == 2

struct V { __m512 v; };
struct Mask { __mmask16 m; };
EC_INLINE V v_set1(float x) { return {_mm512_set1_ps(x)}; }
EC_INLINE V v_load(const float* p) { return {_mm512_loadu_ps(p)}; }
EC_INLINE void v_store(float* p, V a) { _mm512_storeu_ps(p, a.v); }
EC_INLINE __mmask16 first_n(int n) { return (__mmask16)((1u << n) - 1u); }
EC_INLINE V v_load_n(const float* p, int n) { return {_mm512_maskz_loadu_ps(first_n(n), p)}; }
EC_INLINE void v_store_n(float* p, V a, int n) { _mm512_mask_storeu_ps(p, first_n(n), a.v); }
EC_INLINE V operator+(V a, V b) { return {_mm512_add_ps(a.v, b.v)}; }
EC_INLINE V operator-(V a, V b) { return {_mm512_sub_ps(a.v, b.v)}; }
EC_INLINE V operator*(V a, V b) { return {_mm512_mul_ps(a.v, b.v)}; }
EC_INLINE V operator/(V a, V b) { return {_mm512_div_ps(a.v, b.v)}; }
EC_INLINE V ec_sqrt(V a) { return {_mm512_sqrt_ps(a.v)}; }
EC_INLINE V ec_abs(V a) { return {_mm512_abs_ps(a.v)}; }
EC_INLINE Mask ec_gt(V a, V b) { return {_mm512_cmp_ps_mask(a.v, b.v, _CMP_GT_OQ)}; }
EC_INLINE Mask ec_eq(V a, V b) { return {_mm512_cmp_ps_mask(a.v, b.v, _CMP_EQ_OQ)}; }
EC_INLINE V ec_select(Mask m, V yes, V no) { return {_mm512_mask_blend_ps(m.m, no.v, yes.v)}; }
EC_INLINE V v_load_bf16(const uint16_t* p) {
  return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16))};
}
EC_INLINE V v_load_f16(const uint16_t* p) { return {_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p))}; }
EC_INLINE void v_store_f16(uint16_t* p, V a) {
  _mm256_storeu_si256((__m256i*)p, _mm512_cvtps_ph(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}

#elif EC_ISA == 1

struct V { __m256 a, b; };
struct Mask { __m256 a, b; };
EC_INLINE V v_set1(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
EC_INLINE V v_load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
EC_INLINE void v_store(float* p, V x) {
  _mm256_storeu_ps(p, x.a);
  _mm256_storeu_ps(p + 8, x.b);
}
alignas(64) static const int32_t kFirst[32] = {-1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1};
EC_INLINE __m256i first_n(int n, int half) { return _mm256_loadu_si256((const __m256i*)(kFirst + 16 - n + 8 * half)); }
EC_INLINE V v_load_n(const float* p, int n) {
  return {_mm256_maskload_ps(p, first_n(n, 0)), _mm256_maskload_ps(p + 8, first_n(n, 1))};
}
EC_INLINE void v_store_n(float* p, V x, int n) {
  _mm256_maskstore_ps(p, first_n(n, 0), x.a);
  _mm256_maskstore_ps(p + 8, first_n(n, 1), x.b);
}
EC_INLINE V operator+(V x, V y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
EC_INLINE V operator-(V x, V y) { return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)}; }
EC_INLINE V operator*(V x, V y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
EC_INLINE V operator/(V x, V y) { return {_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)}; }
EC_INLINE V ec_sqrt(V x) { return {_mm256_sqrt_ps(x.a), _mm256_sqrt_ps(x.b)}; }
EC_INLINE V ec_abs(V x) {
  const __m256 m = _mm256_castsi256_ps(_mm256_set1_epi32(0x7fffffff));
  return {_mm256_and_ps(x.a, m), _mm256_and_ps(x.b, m)};
}
EC_INLINE Mask ec_gt(V x, V y) { return {_mm256_cmp_ps(x.a, y.a, _CMP_GT_OQ), _mm256_cmp_ps(x.b, y.b, _CMP_GT_OQ)}; }
EC_INLINE Mask ec_eq(V x, V y) { return {_mm256_cmp_ps(x.a, y.a, _CMP_EQ_OQ), _mm256_cmp_ps(x.b, y.b, _CMP_EQ_OQ)}; }
EC_INLINE V ec_select(Mask m, V yes, V no) {
  return {_mm256_blendv_ps(no.a, yes.a, m.a), _mm256_blendv_ps(no.b, yes.b, m.b)};
}
EC_INLINE __m256 widen_bf16(const uint16_t* p) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)), 16));
}
EC_INLINE V v_load_bf16(const uint16_t* p) { return {widen_bf16(p), widen_bf16(p + 8)}; }
EC_INLINE V v_load_f16(const uint16_t* p) {
  return {_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)), _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)(p + 8)))};
}
EC_INLINE void v_store_f16(uint16_t* p, V x) {
  _mm_storeu_si128((__m128i*)p, _mm256_cvtps_ph(x.a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
  _mm_storeu_si128((__m128i*)(p + 8), _mm256_cvtps_ph(x.b, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}

#else

typedef float Q __attribute__((vector_size(16)));
typedef int32_t QI __attribute__((vector_size(16)));
struct V { Q q[4]; };
struct Mask { QI q[4]; };
#define EC_EACH(expr)            \
  V r;                           \
  for (int i = 0; i < 4; ++i) r.q[i] = expr; \
  return r
EC_INLINE V v_set1(float x) { EC_EACH((Q{x, x, x, x})); }
EC_INLINE V v_load(const float* p) {
  V r;
  memcpy(&r, p, 64);
  return r;
}
EC_INLINE void v_store(float* p, V a) { memcpy(p, &a, 64); }
EC_INLINE V v_load_n(const float* p, int n) {
  float t[16] = {};
  for (int i = 0; i < n; ++i) t[i] = p[i];
  return v_load(t);
}
EC_INLINE void v_store_n(float* p, V a, int n) {
  float t[16];
  v_store(t, a);
  for (int i = 0; i < n; ++i) p[i] = t[i];
}
EC_INLINE V operator+(V a, V b) { EC_EACH(a.q[i] + b.q[i]); }
EC_INLINE V operator-(V a, V b) { EC_EACH(a.q[i] - b.q[i]); }
EC_INLINE V operator*(V a, V b) { EC_EACH(a.q[i] * b.q[i]); }
EC_INLINE V operator/(V a, V b) { EC_EACH(a.q[i] / b.q[i]); }
EC_INLINE V ec_sqrt(V a) {
  V r;
  for (int i = 0; i < 4; ++i)
    for (int j = 0; j < 4; ++j) r.q[i][j] = __builtin_sqrtf(a.q[i][j]);
  return r;
}
EC_INLINE V ec_abs(V a) { EC_EACH((Q)((QI)a.q[i] & 0x7fffffff)); }
EC_INLINE Mask ec_gt(V a, V b) {
  Mask r;
  for (int i = 0; i < 4; ++i) r.q[i] = a.q[i] > b.q[i];
  return r;
}
EC_INLINE Mask ec_eq(V a, V b) {
  Mask r;
  for (int i = 0; i < 4; ++i) r.q[i] = a.q[i] == b.q[i];
  return r;
}
EC_INLINE V ec_select(Mask m, V yes, V no) { EC_EACH((Q)((m.q[i] & (QI)yes.q[i]) | (~m.q[i] & (QI)no.q[i]))); }
#undef EC_EACH

#endif

EC_INLINE float bits_float(uint32_t u) {
  float f;
  memcpy(&f, &u, 4);
  return f;
}
EC_INLINE uint32_t float_bits(float f) {
  uint32_t u;
  memcpy(&u, &f, 4);
  return u;
}

#if EC_ISA == 0
// IEEE half <-> float in integers, with the bits of F16C (quiet NaN keeps its upper payload).
static inline float widen_f16(uint16_t h) {
  const uint32_t sign = (uint32_t)(h & 0x8000) << 16, exp = (h >> 10) & 31, man = h & 1023;
  if (exp == 0) {
    const float f = (float)man * 0x1p-24f;
    return bits_float(float_bits(f) | sign);
  }
  if (exp == 31) return bits_float(sign | 0x7f800000u | (man << 13) | (man ? 0x400000u : 0u));
  return bits_float(sign | ((exp + 112) << 23) | (man << 13));
}
static inline uint16_t narrow_f16(float f) {
  const uint32_t x = float_bits(f), sign = (x >> 16) & 0x8000, a = x & 0x7fffffff;
  if (a > 0x7f800000u) return (uint16_t)(sign | 0x7e00 | ((a >> 13) & 0x3ff));
  if (a >= 0x477ff000u) return (uint16_t)(sign | 0x7c00);  // rounds to 65536 or beyond
  if (a < 0x38800000u) {                                   // below 2^-14: in units of 2^-24, ties to even by the adder
    const uint32_t t = float_bits(bits_float(a) + 0.5f);
    return (uint16_t)(sign | (t - 0x3f000000u));
  }
  return (uint16_t)(sign | ((a + 0xfffu + ((a >> 13) & 1u) - 0x38000000u) >> 13));
}
EC_INLINE V v_load_bf16(const uint16_t* p) {
  float t[16];
  for (int i = 0; i < 16; ++i) t[i] = bits_float((uint32_t)p[i] << 16);
  return v_load(t);
}
EC_INLINE V v_load_f16(const uint16_t* p) {
  float t[16];
  for (int i = 0; i < 16; ++i) t[i] = widen_f16(p[i]);
  return v_load(t);
}
EC_INLINE void v_store_f16(uint16_t* p, V a) {
  float t[16];
  v_store(t, a);
  for (int i = 0; i < 16; ++i) p[i] = narrow_f16(t[i]);
}
#endif

// Ties to even; NaN stays NaN.
EC_INLINE void v_store_bf16(uint16_t* p, V a) {
  float t[16];
  v_store(t, a);
  for (int i = 0; i < 16; ++i) {
    const uint32_t x = float_bits(t[i]);
    const uint32_t even = (x + 0x7fffu + ((x >> 16) & 1u)) >> 16;
    p[i] = (uint16_t)((x & 0x7fffffffu) > 0x7f800000u ? (x >> 16) | 0x40u : even);
  }
}

// The sum of the lanes by the fixed tree 8, 4, 2, 1.
EC_INLINE float v_sum(V a) {
  float t[16];
  v_store(t, a);
  for (int step = 8; step; step >>= 1)
    for (int i = 0; i < step; ++i) t[i] = t[i] + t[i + step];
  return t[0];
}

EC_INLINE V v_zero() { return v_set1(0.0f); }

// How a row's weights are stored. `load`/`store` move 16 weights, the `_n` forms the first n of them (rest 0).
struct F32 {
  typedef float type;
  EC_INLINE V load(const float* p) { return v_load(p); }
  EC_INLINE V load_n(const float* p, int n) { return v_load_n(p, n); }
  EC_INLINE void store(float* p, V a) { v_store(p, a); }
  EC_INLINE void store_n(float* p, V a, int n) { v_store_n(p, a, n); }
};
template <bool kBf16>
struct F16 {
  typedef uint16_t type;
  EC_INLINE V load(const uint16_t* p) { return kBf16 ? v_load_bf16(p) : v_load_f16(p); }
  EC_INLINE V load_n(const uint16_t* p, int n) {
    uint16_t t[16] = {};
    for (int i = 0; i < n; ++i) t[i] = p[i];
    return load(t);
  }
  EC_INLINE void store(uint16_t* p, V a) { kBf16 ? v_store_bf16(p, a) : v_store_f16(p, a); }
  EC_INLINE void store_n(uint16_t* p, V a, int n) {
    uint16_t t[16];
    store(t, a);
    for (int i = 0; i < n; ++i) p[i] = t[i];
  }
};

}  // namespace EC_NS
}  // namespace embcache
