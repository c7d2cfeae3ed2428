// Checks and initial rows. Part of kernels_isa.cpp. Plain integer loops that the compiler vectorises.
#pragma once
#include "kernels.h"
#include "lanes.h"
#include "random.h"

namespace embcache {
namespace EC_NS {

constexpr int64_t kFiniteBlock = 4096;

static bool finite(const void* data, int dtype, int64_t n) {
  for (int64_t at = 0; at < n; at += kFiniteBlock) {
    const int64_t m = n - at < kFiniteBlock ? n - at : kFiniteBlock;
    uint32_t bad = 0;
    if (dtype == kFloat32) {
      const uint32_t* x = (const uint32_t*)data + at;
      for (int64_t i = 0; i < m; ++i) bad |= (x[i] & 0x7f800000u) == 0x7f800000u;
    } else {
      const uint16_t* x = (const uint16_t*)data + at;
      const uint16_t top = dtype == kBFloat16 ? 0x7f80 : 0x7c00;
      uint16_t some = 0;
      for (int64_t i = 0; i < m; ++i) some |= (uint16_t)((x[i] & top) == top);
      bad = some;
    }
    if (bad) return false;
  }
  return true;
}

static bool ids_outside(const void* values, int wide, int64_t n, int64_t rows) {
  if (rows <= 0) return n > 0;
  if (wide) {
    // the sign of v | (rows - 1 - v): set where v is negative or beyond the last row
    const uint64_t* v = (const uint64_t*)values;
    const uint64_t last = (uint64_t)rows - 1;
    uint64_t bad = 0;
    for (int64_t i = 0; i < n; ++i) bad |= v[i] | (last - v[i]);
    return bad >> 63;
  }
  const uint32_t* v = (const uint32_t*)values;
  const uint32_t last = rows > 0x7fffffff ? 0x7fffffffu : (uint32_t)rows - 1;
  uint32_t bad = 0;
  for (int64_t i = 0; i < n; ++i) bad |= v[i] | (last - v[i]);
  return bad >> 31;
}

static void init_rows(const Init& a, int64_t begin, int64_t end) {
  float w[kDraw];
  for (int64_t i = begin; i < end; ++i) {
    uint8_t* row = a.slab + (a.slots ? a.slots[i] : i) * a.row_bytes;
    const uint64_t id = (uint64_t)(a.ids ? a.ids[i] : a.first_id + i);
    for (int64_t at = a.first_column & ~(int64_t)3, end = a.first_column + a.dim; at < end; at += kDraw) {
      const int skip = at < a.first_column ? (int)(a.first_column - at) : 0;
      const int n = (end - at < kDraw ? (int)(end - at) : kDraw) - skip;
      const int64_t d = at + skip - a.first_column;
      initial(a, id, at, skip, n, w);
      if (a.dtype == kFloat32) {
        memcpy((float*)row + d, w, (size_t)n * 4);
        continue;
      }
      for (int k = 0; k < n; k += 16) {
        const int m = n - k < 16 ? n - k : 16;
        uint16_t* to = (uint16_t*)row + d + k;
        const V x = v_load_n(w + k, m);
        a.dtype == kBFloat16 ? F16<true>::store_n(to, x, m) : F16<false>::store_n(to, x, m);
      }
    }
    memcpy(row + a.state_offset, a.state, (size_t)a.state_floats * 4);
  }
}

}  // namespace EC_NS
}  // namespace embcache
