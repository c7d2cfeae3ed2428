// Pooled lookup and its gradient by weight, over lanes. Part of kernels_isa.cpp.
#pragma once
#include "kernels.h"
#include "lanes.h"

namespace embcache {
namespace EC_NS {

constexpr int64_t kBytesAhead = 4096;  // prefetch distance of the lookup: as many rows as this, 4 to 16
constexpr int64_t kBagsAhead = 8;   // and of its output, in bags
constexpr int kBlock = EC_ISA ? 8 : 4;  // column blocks of 16 that are summed in registers at once

EC_INLINE void prefetch_read(const uint8_t* p, int64_t bytes) {
  for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(p + i, 0, 3);
}
EC_INLINE void prefetch_write(uint8_t* p, int64_t bytes) {
  for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(p + i, 1, 3);
}
EC_INLINE int64_t offset_of(const Bags& b, int64_t bag) {
  if (!b.offsets) return bag;
  return b.wide_offsets ? ((const int64_t*)b.offsets)[bag] : ((const int32_t*)b.offsets)[bag];
}

// The rows of one table as a lookup reads them.
template <class I>
struct Rows {
  const uint8_t* slab;
  int64_t row_bytes, bytes;  // bytes: of the weights, rounded so that an unaligned row is covered
  const I* slots;
  const float* weights;
  int64_t limit;  // end of the positions, for the prefetch
  int64_t ahead;  // prefetch distance in positions
};

// acc = the sum over positions [p, e) of kN * 16 columns from `col` on.
template <class S, class I, int kN, bool kWeighted, bool kPrefetch>
EC_INLINE void pool_block(const Rows<I>& r, int64_t p, int64_t e, int64_t col, V* acc) {
  for (int i = 0; i < kN; ++i) acc[i] = v_zero();
  for (; p < e; ++p) {
    if (kPrefetch) {
      const int64_t q = p + r.ahead < r.limit ? p + r.ahead : r.limit - 1;
      prefetch_read(r.slab + (int64_t)r.slots[q] * r.row_bytes, r.bytes);
    }
    const typename S::type* row = (const typename S::type*)(r.slab + (int64_t)r.slots[p] * r.row_bytes) + col;
    if (kWeighted) {
      const V w = v_set1(r.weights[p]);
      for (int i = 0; i < kN; ++i) acc[i] = acc[i] + S::load(row + 16 * i) * w;
    } else {
      for (int i = 0; i < kN; ++i) acc[i] = acc[i] + S::load(row + 16 * i);
    }
  }
}

template <class S, class I, bool kWeighted>
EC_INLINE V pool_tail(const Rows<I>& r, int64_t p, int64_t e, int64_t col, int n) {
  V acc = v_zero();
  for (; p < e; ++p) {
    const typename S::type* row = (const typename S::type*)(r.slab + (int64_t)r.slots[p] * r.row_bytes) + col;
    const V x = S::load_n(row, n);
    acc = acc + (kWeighted ? x * v_set1(r.weights[p]) : x);
  }
  return acc;
}

EC_INLINE void store_out(const Vectors& out, int64_t at, V a, int n) {
  if (out.dtype == kFloat32) {
    n == 16 ? v_store((float*)out.base + at, a) : v_store_n((float*)out.base + at, a, n);
  } else if (out.dtype == kBFloat16) {
    F16<true>::store_n((uint16_t*)out.base + at, a, n);
  } else {
    F16<false>::store_n((uint16_t*)out.base + at, a, n);
  }
}

template <class S, class I, int kN, bool kWeighted, bool kPrefetch>
EC_INLINE void pool_columns(const Rows<I>& r, int64_t p, int64_t e, int64_t col, bool mean, V length,
                            const Vectors& out, int64_t at) {
  V acc[kN];
  pool_block<S, I, kN, kWeighted, kPrefetch>(r, p, e, col, acc);
  for (int i = 0; i < kN; ++i) store_out(out, at + col + 16 * i, mean ? acc[i] / length : acc[i], 16);
}

template <class S, class I, bool kWeighted>
static void pool_run(const Bags& b, const Vectors& out) {
  const int64_t dim = b.table->dim;
  const int64_t out_size = out.dtype == kFloat32 ? 4 : 2, out_bytes = dim * out_size;
  Rows<I> r = {b.table->slab, b.table->row_bytes, dim * (int64_t)sizeof(typename S::type), (const I*)b.values,
               b.weights, offset_of(b, b.end), 16};
  if (r.row_bytes % 64) r.bytes += 60;
  while (r.ahead > 4 && r.ahead * r.bytes > kBytesAhead) r.ahead /= 2;
  for (int64_t bag = b.begin; bag < b.end; ++bag) {
    const int64_t p = offset_of(b, bag), e = b.offsets ? offset_of(b, bag + 1) : bag + 1;
    const bool mean = b.mean && e > p;
    const V length = v_set1((float)(e - p));
    const int64_t at = (bag - out.first) * out.stride;
    prefetch_write((uint8_t*)out.base + (at + kBagsAhead * out.stride) * out_size, out_bytes);
    int64_t col = 0;
    if (dim >= 16 * kBlock) {
      pool_columns<S, I, kBlock, kWeighted, true>(r, p, e, 0, mean, length, out, at);
      for (col = 16 * kBlock; col + 16 * kBlock <= dim; col += 16 * kBlock)
        pool_columns<S, I, kBlock, kWeighted, false>(r, p, e, col, mean, length, out, at);
    } else if (dim >= 64) {
      pool_columns<S, I, 4, kWeighted, true>(r, p, e, 0, mean, length, out, at), col = 64;
    } else if (dim >= 16) {
      pool_columns<S, I, 1, kWeighted, true>(r, p, e, 0, mean, length, out, at), col = 16;
    }
    if (dim - col >= 64) pool_columns<S, I, 4, kWeighted, false>(r, p, e, col, mean, length, out, at), col += 64;
    if (dim - col >= 32) pool_columns<S, I, 2, kWeighted, false>(r, p, e, col, mean, length, out, at), col += 32;
    if (dim - col >= 16) pool_columns<S, I, 1, kWeighted, false>(r, p, e, col, mean, length, out, at), col += 16;
    if (col < dim) {
      const V acc = pool_tail<S, I, kWeighted>(r, p, e, col, (int)(dim - col));
      store_out(out, at + col, mean ? acc / length : acc, (int)(dim - col));
    }
  }
}

template <class S>
static void pool_storage(const Bags& b, const Vectors& out) {
  if (b.wide_values)
    b.weights ? pool_run<S, int64_t, true>(b, out) : pool_run<S, int64_t, false>(b, out);
  else
    b.weights ? pool_run<S, int32_t, true>(b, out) : pool_run<S, int32_t, false>(b, out);
}

static void pool(const Bags& b, const Vectors& out) {
  if (b.table->dtype == kFloat32)
    pool_storage<F32>(b, out);
  else
    b.table->dtype == kBFloat16 ? pool_storage<F16<true>>(b, out) : pool_storage<F16<false>>(b, out);
}

template <class S, class G>
static void dot_run(const Bags& b, const Vectors& grads, float* out) {
  const int64_t dim = b.table->dim;
  for (int64_t bag = b.begin; bag < b.end; ++bag) {
    const int64_t p = offset_of(b, bag), e = b.offsets ? offset_of(b, bag + 1) : bag + 1;
    const typename G::type* g = (const typename G::type*)grads.base + (bag - grads.first) * grads.stride;
    for (int64_t i = p; i < e; ++i) {
      const int64_t slot = b.wide_values ? ((const int64_t*)b.values)[i] : ((const int32_t*)b.values)[i];
      const typename S::type* row = (const typename S::type*)(b.table->slab + slot * b.table->row_bytes);
      V acc = v_zero();
      int64_t d = 0;
      for (; d + 16 <= dim; d += 16) acc = acc + G::load(g + d) * S::load(row + d);
      if (d < dim) acc = acc + G::load_n(g + d, (int)(dim - d)) * S::load_n(row + d, (int)(dim - d));
      const float sum = v_sum(acc);
      out[i] = b.mean ? sum / (float)(e - p) : sum;
    }
  }
}

template <class S>
static void dot_storage(const Bags& b, const Vectors& grads, float* out) {
  if (grads.dtype == kFloat32)
    dot_run<S, F32>(b, grads, out);
  else
    grads.dtype == kBFloat16 ? dot_run<S, F16<true>>(b, grads, out) : dot_run<S, F16<false>>(b, grads, out);
}

static void dot(const Bags& b, const Vectors& grads, float* out) {
  if (b.table->dtype == kFloat32)
    dot_storage<F32>(b, grads, out);
  else
    b.table->dtype == kBFloat16 ? dot_storage<F16<true>>(b, grads, out) : dot_storage<F16<false>>(b, grads, out);
}

}  // namespace EC_NS
}  // namespace embcache
