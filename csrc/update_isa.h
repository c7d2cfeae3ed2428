// Summing the gradients of equal slots and applying a rule to a row, over lanes. Part of kernels_isa.cpp.
#pragma once
#include "kernels.h"
#include "lanes.h"
#include "pool_isa.h"
#include "random.h"

namespace embcache {
namespace EC_NS {

constexpr int64_t kGradsAhead = 8;   // prefetch distance of gradients, in positions
constexpr int64_t kGroupsAhead = 12;  // prefetch distance of rows, in groups

template <>
struct Lift<V> {
  EC_INLINE V of(float x) { return v_set1(x); }
};

template <bool kWeighted>
EC_INLINE const float* grad_row(const Groups& g, int64_t i, float* weight) {
  const uint64_t payload = g.pairs[i] & (((uint64_t)1 << g.payload_bits) - 1);
  if (!kWeighted) return g.grads + (int64_t)payload * g.stride;
  *weight = g.weights[payload];
  return g.grads + (int64_t)g.rows[payload] * g.stride;
}

// acc = the sum of kN * 16 columns of pairs [from, from + n), n >= 1.
template <int kN, bool kWeighted, bool kPrefetch>
EC_INLINE void sum_block(const Groups& g, int64_t from, int64_t n, int64_t col, int64_t bytes, V* acc) {
  const int64_t limit = g.starts[g.count];
  for (int k = 0; k < kN; ++k) acc[k] = v_zero();
  for (int64_t i = from; i < from + n; ++i) {
    float w = 1.0f;
    if (kPrefetch && i + kGradsAhead < limit)
      prefetch_read((const uint8_t*)grad_row<kWeighted>(g, i + kGradsAhead, &w), bytes);
    const float* row = grad_row<kWeighted>(g, i, &w) + col;
    for (int k = 0; k < kN; ++k) {
      V x = v_load(row + 16 * k);
      if (kWeighted) x = x * v_set1(w);
      acc[k] = i == from ? x : acc[k] + x;
    }
  }
}

template <int kN, bool kWeighted, bool kPrefetch>
EC_INLINE void sum_columns(const Groups& g, int64_t from, int64_t n, int64_t col, int64_t bytes, float* out) {
  V acc[kN];
  sum_block<kN, kWeighted, kPrefetch>(g, from, n, col, bytes, acc);
  for (int k = 0; k < kN; ++k) v_store(out + col + 16 * k, acc[k]);
}

template <bool kWeighted>
EC_INLINE void sum_run(int64_t dim, const Groups& g, int64_t from, int64_t n, float* out) {
  const int64_t bytes = dim * 4;
  int64_t col = 0;
  if (dim >= 16 * kBlock) {
    sum_columns<kBlock, kWeighted, true>(g, from, n, 0, bytes, out);
    for (col = 16 * kBlock; col + 16 * kBlock <= dim; col += 16 * kBlock)
      sum_columns<kBlock, kWeighted, false>(g, from, n, col, bytes, out);
  } else if (dim >= 64) {
    sum_columns<4, kWeighted, true>(g, from, n, 0, bytes, out), col = 64;
  }
  if (dim - col >= 64) sum_columns<4, kWeighted, false>(g, from, n, col, bytes, out), col += 64;
  if (dim - col >= 32) sum_columns<2, kWeighted, false>(g, from, n, col, bytes, out), col += 32;
  if (dim - col >= 16) sum_columns<1, kWeighted, false>(g, from, n, col, bytes, out), col += 16;
  if (col < dim) {
    V acc = v_zero();
    for (int64_t i = from; i < from + n; ++i) {
      float w = 1.0f;
      V x = v_load_n(grad_row<kWeighted>(g, i, &w) + col, (int)(dim - col));
      if (kWeighted) x = x * v_set1(w);
      acc = i == from ? x : acc + x;
    }
    v_store(out + col, acc);
  }
}

static EC_NOINLINE void sum_range(const Table& t, const Groups& g, int64_t from, int64_t n, float* out) {
  g.weights ? sum_run<true>(t.dim, g, from, n, out) : sum_run<false>(t.dim, g, from, n, out);
}

// out = the sum of a whole group, by chunks, times the multiplier. `out` and `part` hold padded(dim) floats.
EC_INLINE void sum_group(const Table& t, const Groups& g, int64_t from, int64_t n, float* out, float* part) {
  sum_range(t, g, from, n < kChunk ? n : kChunk, out);
  for (int64_t done = kChunk; done < n; done += kChunk) {
    sum_range(t, g, from + done, n - done < kChunk ? n - done : kChunk, part);
    for (int64_t d = 0; d < t.dim; d += 16) v_store(out + d, v_load(out + d) + v_load(part + d));
  }
  if (t.hyper.multiplier != 1.0f) {
    const V m = v_set1(t.hyper.multiplier);
    for (int64_t d = 0; d < t.dim; d += 16) v_store(out + d, v_load(out + d) * m);
  }
}

// Two tables may not share a bitmap, but two threads may share a byte of one.
EC_INLINE void mark_written(uint8_t* bitmap, int64_t slot) {
  const uint8_t bit = (uint8_t)(1u << (slot & 7));
  if (!(__atomic_load_n(bitmap + (slot >> 3), __ATOMIC_RELAXED) & bit))
    __atomic_fetch_or(bitmap + (slot >> 3), bit, __ATOMIC_RELAXED);
}

template <class R>
struct States {
  static constexpr int kCount = R::kWide ? R::kWide : 1;
  V s[kCount];
  EC_INLINE void load(States& x, const float* st, int64_t dim, int64_t d, int n) {
    for (int k = 0; k < R::kWide; ++k) x.s[k] = n == 16 ? v_load(st + k * dim + d) : v_load_n(st + k * dim + d, n);
  }
  EC_INLINE void store(const States& x, float* st, int64_t dim, int64_t d, int n) {
    for (int k = 0; k < R::kWide; ++k)
      n == 16 ? v_store(st + k * dim + d, x.s[k]) : v_store_n(st + k * dim + d, x.s[k], n);
  }
};

// The n columns from d on: `out` is the row itself (fp32) or a buffer of fp32.
template <class R, class S>
EC_INLINE void apply_columns(const Hyper& h, const Coef& c, const float* g, const typename S::type* w, float* st,
                             int64_t dim, int64_t d, int n, float* out) {
  States<R> x;
  States<R>::load(x, st, dim, d, n);
  const V grad = n == 16 ? v_load(g + d) : v_load_n(g + d, n);
  const V weight = n == 16 ? S::load(w + d) : S::load_n(w + d, n);
  const V next = R::apply(h, c, grad, weight, x.s);
  n == 16 ? v_store(out + d, next) : v_store_n(out + d, next, n);
  if (!R::kReduceWrites) States<R>::store(x, st, dim, d, n);
}

template <class R, class S>
EC_INLINE void reduce_columns(const Hyper& h, const Coef& c, const float* g, const typename S::type* w, float* st,
                              int64_t dim, int64_t d, int n, V& r0, V& r1) {
  States<R> x;
  States<R>::load(x, st, dim, d, n);
  const V grad = n == 16 ? v_load(g + d) : v_load_n(g + d, n);
  const V weight = n == 16 ? S::load(w + d) : S::load_n(w + d, n);
  R::reduce(h, c, grad, weight, x.s, r0, r1);
  if (R::kReduceWrites) States<R>::store(x, st, dim, d, n);
}

// Scales w[0..dim) back to norm max_norm where it is longer; given, found: the sum of squares, as in apply_row.
static EC_NOINLINE void renormalise(float* w, int64_t dim, float max_norm, const float* given, float* found) {
  V acc = v_zero();
  for (int64_t d = 0; d < dim; d += 16) {
    const V x = v_load_n(w + d, dim - d < 16 ? (int)(dim - d) : 16);
    acc = acc + x * x;
  }
  const float squares = v_sum(acc);
  if (found) *found = squares;
  const float norm = ec_sqrt(given ? *given : squares);
  if (!(norm > max_norm)) return;
  const V scale = v_set1(max_norm / norm);
  for (int64_t d = 0; d < dim; d += 16) v_store(w + d, v_load(w + d) * scale);
}

// Writes fp32 weights into a row of 16-bit storage.
template <class S>
static EC_NOINLINE void store_row(const Table& t, const float* from, typename S::type* w) {
  for (int64_t d = 0; d < t.dim; d += 16)
    S::store_n(w + d, v_load(from + d), t.dim - d < 16 ? (int)(t.dim - d) : 16);
}
template <bool kBf16>
static EC_NOINLINE void store_rounded(const Table& t, int64_t slot, const float* from, uint16_t* w) {
  const uint64_t id = (uint64_t)(t.slot_ids ? t.slot_ids[slot] : slot);
  uint32_t words[kDraw];
  for (int64_t at = t.first & ~(int64_t)3, end = t.first + t.dim; at < end; at += kDraw) {
    draw(t.key, id, at, t.step, words);
    const int skip = at < t.first ? (int)(t.first - at) : 0;
    const int n = (end - at < kDraw ? (int)(end - at) : kDraw) - skip;
    const int64_t d = at + skip - t.first;
    for (int i = 0; i < n; ++i)
      w[d + i] = kBf16 ? round_bf16(from[d + i], words[skip + i]) : round_f16(from[d + i], words[skip + i]);
  }
}
EC_INLINE void store_final(const Table& t, int64_t, const float* from, float* w, F32) {
  store_row<F32>(t, from, w);
}
template <bool kBf16>
EC_INLINE void store_final(const Table& t, int64_t slot, const float* from, uint16_t* w, F16<kBf16>) {
  t.flags & kFlagRound ? store_rounded<kBf16>(t, slot, from, w) : store_row<F16<kBf16>>(t, from, w);
}

// One row: both passes of the rule, then max_norm, then storage. `buffer` holds padded(dim) floats. Of a row that lies
// in several tables, given[kSums] (or null) are the sums over all its columns, and found[kSums] takes those over these.
template <class R, class S>
static EC_NOINLINE void apply_row(const Table& t, const Hyper& h, int64_t slot, const float* g, float* buffer,
                                  const float* given, float* found) {
  typedef typename S::type T;
  const int64_t dim = t.dim, full = dim & ~(int64_t)15;
  uint8_t* row = t.slab + slot * t.row_bytes;
  T* w = (T*)row;
  float* st = (float*)(row + t.state_offset);
  float* scalars = st + R::kWide * dim;
  Coef c = {1.0f, 0.0f, 1.0f, 1.0f};
  R::begin(h, scalars, c);
  if (R::kReduce) {
    V r0 = v_zero(), r1 = v_zero();
    for (int64_t d = 0; d < full; d += 16) reduce_columns<R, S>(h, c, g, w, st, dim, d, 16, r0, r1);
    if (full < dim) reduce_columns<R, S>(h, c, g, w, st, dim, full, (int)(dim - full), r0, r1);
    const float s0 = v_sum(r0), s1 = v_sum(r1);
    if (found) found[0] = s0, found[1] = s1;
    R::finish(h, c, given ? given[0] : s0, given ? given[1] : s1, t.whole, scalars);
  }
  const bool direct = sizeof(T) == 4 && h.max_norm <= 0.0f;
  float* out = direct ? (float*)w : buffer;
  for (int64_t d = 0; d < full; d += 16) apply_columns<R, S>(h, c, g, w, st, dim, d, 16, out);
  if (full < dim) apply_columns<R, S>(h, c, g, w, st, dim, full, (int)(dim - full), out);
  if (!direct) {
    if (h.max_norm > 0.0f) renormalise(buffer, dim, h.max_norm, given ? given + 2 : nullptr, found ? found + 2 : nullptr);
    store_final(t, slot, buffer, w, S());
  }
  if (t.written) mark_written(t.written, slot);
}

template <class R, class S>
static void update_run(const Table& t, const Groups& g, int64_t begin, int64_t end, int64_t largest, float* scratch) {
  const Hyper h = t.hyper;
  float *sum = scratch, *part = scratch + padded(t.dim), *buffer = part + padded(t.dim);
  for (int64_t i = begin; i < end; ++i) {
    if (i + kGroupsAhead < end) {
      const int64_t slot = (int64_t)(g.pairs[g.starts[i + kGroupsAhead]] >> g.payload_bits);
      prefetch_write(t.slab + slot * t.row_bytes, t.row_bytes);
    }
    const int64_t from = g.starts[i], n = g.starts[i + 1] - from;
    if (n > largest) continue;
    sum_group(t, g, from, n, sum, part);
    apply_row<R, S>(t, h, (int64_t)(g.pairs[from] >> g.payload_bits), sum, buffer, nullptr, nullptr);
  }
}

template <class R, class S>
static void apply_run(const Table& t, int64_t slot, float* g, float* scratch) {
  const Hyper h = t.hyper;
  apply_row<R, S>(t, h, slot, g, scratch, nullptr, nullptr);
}

template <class R, class S>
static void summed_run(const Table& t, const Summed& rows, int64_t begin, int64_t end, float* scratch) {
  const Hyper h = t.hyper;
  Table copy = t;  // where only the sums are asked for, the rule runs on a copy of the row
  copy.slab = (uint8_t*)(scratch + padded(t.dim));
  copy.written = nullptr, copy.slot_ids = nullptr;
  for (int64_t i = begin; i < end; ++i) {
    const int64_t slot = rows.slots[i];
    if (i + kGroupsAhead < end) prefetch_write(t.slab + rows.slots[i + kGroupsAhead] * t.row_bytes, t.row_bytes);
    const float *g = rows.grads + i * t.dim, *given = rows.given ? rows.given + i * kSums : nullptr;
    if (rows.found) memcpy(copy.slab, t.slab + slot * t.row_bytes, (size_t)t.row_bytes);
    apply_row<R, S>(rows.found ? copy : t, h, rows.found ? 0 : slot, g, scratch, given,
                    rows.found ? rows.found + i * kSums : nullptr);
  }
}

typedef void (*UpdateFn)(const Table&, const Groups&, int64_t, int64_t, int64_t, float*);
typedef void (*ApplyFn)(const Table&, int64_t, float*, float*);
typedef void (*SummedFn)(const Table&, const Summed&, int64_t, int64_t, float*);
#define EC_BY_TYPE(f, R) {f<R, F32>, f<R, F16<true>>, f<R, F16<false>>}
#define EC_BY_RULE(f)                                                                                             \
  {EC_BY_TYPE(f, SGD),         EC_BY_TYPE(f, Adagrad), EC_BY_TYPE(f, RowWiseAdagrad), EC_BY_TYPE(f, Adam), \
   EC_BY_TYPE(f, RowWiseAdam), EC_BY_TYPE(f, LAMB),    EC_BY_TYPE(f, LARS),           EC_BY_TYPE(f, FTRL)}

static void update(const Table& t, const Groups& g, int64_t begin, int64_t end, int64_t largest, float* scratch) {
  static const UpdateFn fn[kRules][3] = EC_BY_RULE(update_run);
  fn[t.rule][t.dtype](t, g, begin, end, largest, scratch);
}

static void apply_one(const Table& t, int64_t slot, float* g, float* scratch) {
  static const ApplyFn fn[kRules][3] = EC_BY_RULE(apply_run);
  fn[t.rule][t.dtype](t, slot, g, scratch);
}

static void apply_rows(const Table& t, const Summed& rows, int64_t begin, int64_t end, float* scratch) {
  static const SummedFn fn[kRules][3] = EC_BY_RULE(summed_run);
  fn[t.rule][t.dtype](t, rows, begin, end, scratch);
}

template <class G>
static void gather_run(float* dst, const typename G::type* src, int64_t stride, int64_t dim, int64_t n,
                       const float* scale) {
  for (int64_t i = 0; i < n; ++i, src += stride, dst += dim) {
    const V k = v_set1(scale ? scale[i] : 1.0f);
    int64_t d = 0;
    for (; d + 16 <= dim; d += 16) v_store(dst + d, scale ? G::load(src + d) * k : G::load(src + d));
    if (d < dim) {
      const V x = G::load_n(src + d, (int)(dim - d));
      v_store_n(dst + d, scale ? x * k : x, (int)(dim - d));
    }
  }
}

static void gather_grads(float* dst, const void* src, int dtype, int64_t stride, int64_t dim, int64_t n,
                         const float* scale) {
  if (dtype == kFloat32)
    gather_run<F32>(dst, (const float*)src, stride, dim, n, scale);
  else if (dtype == kBFloat16)
    gather_run<F16<true>>(dst, (const uint16_t*)src, stride, dim, n, scale);
  else
    gather_run<F16<false>>(dst, (const uint16_t*)src, stride, dim, n, scale);
}

}  // namespace EC_NS
}  // namespace embcache
