// Bringing equal slots together: a least-significant-digit radix sort of packed (slot, payload) pairs, then the list
// of where each slot begins. Stable and exact, so the order inside a group is that of the payloads.
#pragma once
#include <stdint.h>
#include <string.h>
#include <algorithm>

namespace embcache {

inline int bit_length(uint64_t x) { return x ? 64 - __builtin_clzll(x) : 0; }

// Sorts n keys by bits [low, low + bits); keys arrive ascending in the bits below. Returns where the result is.
inline uint64_t* radix_sort(uint64_t* keys, uint64_t* spare, int64_t n, int low, int bits) {
  if (n < 128) {
    std::sort(keys, keys + n);
    return keys;
  }
  constexpr int kMaxDigit = 11, kMaxPasses = 8;
  const int widest = n < 2048 ? 8 : kMaxDigit;
  const int passes = std::max(1, (bits + widest - 1) / widest), digit = (bits + passes - 1) / passes;
  if (passes > kMaxPasses) {
    std::sort(keys, keys + n);
    return keys;
  }
  const uint64_t mask = ((uint64_t)1 << digit) - 1;
  static thread_local uint32_t count[kMaxPasses][1 << kMaxDigit];
  for (int p = 0; p < passes; ++p) memset(count[p], 0, (size_t)(mask + 1) * 4);
  for (int64_t i = 0; i < n; ++i) {
    uint64_t k = keys[i] >> low;
    for (int p = 0; p < passes; ++p, k >>= digit) ++count[p][k & mask];
  }
  for (int p = 0; p < passes; ++p) {
    const int shift = low + p * digit;
    uint32_t* c = count[p];
    if (c[keys[0] >> shift & mask] == (uint64_t)n) continue;  // one bucket: nothing moves
    uint32_t sum = 0;
    for (uint64_t b = 0; b <= mask; ++b) {
      const uint32_t m = c[b];
      c[b] = sum;
      sum += m;
    }
    for (int64_t i = 0; i < n; ++i) spare[c[keys[i] >> shift & mask]++] = keys[i];
    std::swap(keys, spare);
  }
  return keys;
}

// starts[i] = where the i-th distinct slot begins, starts[count] = n; room for n + 1. Returns count.
inline int64_t find_groups(const uint64_t* keys, int64_t n, int low, uint32_t* starts) {
  int64_t count = 0;
  uint64_t last = n ? ~(keys[0] >> low) : 0;
  for (int64_t i = 0; i < n; ++i) {
    const uint64_t slot = keys[i] >> low;
    starts[count] = (uint32_t)i;  // kept only where a group begins
    count += slot != last;
    last = slot;
  }
  starts[count] = (uint32_t)n;
  return count;
}

}  // namespace embcache
