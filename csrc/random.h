// Philox4x32-10 (Salmon et al., SC 2011) over many columns at once, stochastic rounding, and initial values.
// Integers only (and one float multiply for initial values), so any vectorisation gives the same bits.
#pragma once
#include "kernels.h"
#include "lanes.h"

namespace embcache {
namespace EC_NS {

constexpr int kDraw = 64;  // columns drawn together

// Random words of columns first .. first + 63 of a row (first a multiple of 4: columns are drawn in fours).
static inline void draw(uint64_t key, uint64_t id, int64_t first, uint32_t stream, uint32_t* words) {
  uint32_t c0[16], c1[16], c2[16], c3[16];
  for (int i = 0; i < 16; ++i) {
    c0[i] = (uint32_t)id;
    c1[i] = (uint32_t)(id >> 32);
    c2[i] = (uint32_t)(first / 4) + (uint32_t)i;
    c3[i] = stream;
  }
  uint32_t k0 = (uint32_t)key, k1 = (uint32_t)(key >> 32);
  for (int round = 0; round < 10; ++round) {
    for (int i = 0; i < 16; ++i) {
      const uint64_t p0 = (uint64_t)0xD2511F53u * c0[i], p1 = (uint64_t)0xCD9E8D57u * c2[i];
      c0[i] = (uint32_t)(p1 >> 32) ^ c1[i] ^ k0;
      c1[i] = (uint32_t)p1;
      c2[i] = (uint32_t)(p0 >> 32) ^ c3[i] ^ k1;
      c3[i] = (uint32_t)p0;
    }
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  for (int i = 0; i < 16; ++i) {
    words[4 * i] = c0[i];
    words[4 * i + 1] = c1[i];
    words[4 * i + 2] = c2[i];
    words[4 * i + 3] = c3[i];
  }
}

// Stochastic rounding: a random integer below one unit of the kept mantissa is added and the rest cut off, so the
// magnitude goes up with the probability of the dropped fraction. NaN and infinity stay.
EC_INLINE uint16_t round_bf16(float f, uint32_t random) {
  const uint32_t x = float_bits(f), a = x & 0x7fffffffu;
  const uint32_t special = (x >> 16) | (a > 0x7f800000u ? 0x40u : 0u);
  return (uint16_t)(a < 0x7f800000u ? (x + (random >> 16)) >> 16 : special);
}
EC_INLINE uint16_t round_f16(float f, uint32_t random) {
  const uint32_t x = float_bits(f), sign = (x >> 16) & 0x8000u, a = x & 0x7fffffffu;
  if (a > 0x7f800000u) return (uint16_t)(sign | 0x7e00u | ((a >> 13) & 0x3ffu));
  if (a >= 0x47800000u) return (uint16_t)(sign | 0x7c00u);  // 65536 and beyond
  if (a < 0x38800000u) {                                    // below 2^-14 the unit is 2^-24
    const float units = bits_float(a) * 0x1p24f;            // exact
    const uint32_t whole = (uint32_t)units;
    const uint64_t fraction = (uint64_t)((units - (float)whole) * 0x1p32f);
    return (uint16_t)(sign | (whole + (uint32_t)((random + fraction) >> 32)));
  }
  return (uint16_t)(sign | ((a + (random >> 19) - 0x38000000u) >> 13));
}

constexpr uint64_t kTruncatedLow = 97711073;  // round(Phi(-2) * 2^32)

// Standard normal in units of 2^-28: linear interpolation in the inverse CDF of embcache.init.normal_table().
EC_INLINE int32_t normal_fixed(const int32_t* table, uint32_t x, bool truncated) {
  uint64_t u = x & 0x7fffffffu;
  if (truncated) u = kTruncatedLow + (u * (0x80000000ull - kTruncatedLow) >> 31);
  const uint64_t w = u + 64;
  const int s = 63 - __builtin_clzll(w) - 6;
  const int64_t i = (int64_t)s * 64 + (int64_t)(w >> s) - 64;
  const int64_t low = table[i], step = table[i + 1] - low;
  const int64_t z = low + (step * (int64_t)(w - ((w >> s) << s)) >> s);
  return (int32_t)(x >> 31 ? -z : z);
}

// Initial weights of n columns of an id, from first + skip on, first a multiple of 4; skip + n <= 64.
static inline void initial(const Init& a, uint64_t id, int64_t first, int skip, int n, float* out) {
  const int code = a.code;
  const float p0 = a.p0, p1 = a.p1;
  if (code == 0) {
    for (int i = 0; i < n; ++i) out[i] = p0;
    return;
  }
  uint32_t words[kDraw];
  draw(a.key, id, first, 0, words);
  const uint32_t* x = words + skip;
  if (code == 1) {
    const float step = p0 / 8388608.0f;
    for (int i = 0; i < n; ++i) out[i] = (float)((int32_t)(x[i] >> 8) - 8388608) * step;
  } else {
    for (int i = 0; i < n; ++i) out[i] = (float)normal_fixed(a.normal, x[i], code == 3) * 0x1p-28f * p0;
  }
  if (p1 != 0.0f)
    for (int i = 0; i < n; ++i) out[i] = out[i] + p1;
}

}  // namespace EC_NS
}  // namespace embcache
