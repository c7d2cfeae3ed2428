// The inner kernels, as plain data and function pointers: what dispatch.cpp chooses between and what lookup.cpp and
// update.cpp drive. Nothing here knows of torch or of threads. Compiled once per instruction set by kernels_isa.cpp.
#pragma once
#include <stdint.h>
#include "rules.h"

namespace embcache {

enum { kPoolSum = 0, kPoolMean = 1, kPoolNone = 2 };
enum { kFloat32 = 0, kBFloat16 = 1, kFloat16 = 2 };
enum { kFlagRound = 1, kFlagRowSteps = 8 };
constexpr int kRules = 8;

// Gradients of equal ids are summed in ascending position; a group of more than kChunk positions is summed in chunks
// of kChunk, and the chunk sums are then added in ascending order. This alone decides the association of the sum.
constexpr int64_t kChunk = 1024;

// A table may be some columns of a wider one: `first` is then the column it begins with and `whole` their number.
struct Table {
  uint8_t* slab;
  int64_t capacity, row_bytes, dim, state_offset, first, whole;
  int dtype, rule, flags;
  uint64_t key;         // of stochastic rounding
  uint32_t step;        // its stream
  uint8_t* written;     // bitmap or null
  const int64_t* slot_ids;  // id of each slot, or null: slot == id
  Hyper hyper;
};

// A run of bags of one feature. Bag b holds positions [offset(b), offset(b + 1)); without offsets, position b alone.
struct Bags {
  const Table* table;
  const void* values;   // int32 or int64 slots
  const void* offsets;  // int32 or int64, or null
  const float* weights; // by position, or null
  int wide_values, wide_offsets, mean;
  int64_t begin, end;   // bags
};

// Where a bag's vector lies: base + (bag - first) * stride elements of `dtype`.
struct Vectors {
  void* base;
  int dtype;
  int64_t first, stride;
};

// The sorted (slot, payload) pairs of one table or of a part of it. A payload is the row of `grads` to add or, with
// weights, a position p: then the row is rows[p] and the factor weights[p].
struct Groups {
  const uint64_t* pairs;  // slot << payload_bits | payload, ascending
  int payload_bits;
  const uint32_t* starts;  // [count + 1] where each group of equal slots begins
  int64_t count;
  const float* grads;
  int64_t stride;
  const float* weights;
  const uint32_t* rows;
};

// Rows slots[i] (or i) get the initial values of ids[i] (or first_id + i).
struct Init {
  uint8_t* slab;
  int64_t capacity, row_bytes, dim, state_offset;
  int dtype;
  const int64_t *slots, *ids;
  int64_t first_id, n;
  int code;  // 0 constant p0, 1 uniform on [-p0, p0) + p1, 2 normal p0 * z + p1, 3 that truncated at two sigma
  float p0, p1;
  uint64_t key;
  const int32_t* normal;  // 1602 knots
  const float* state;
  int64_t state_floats;
  int64_t first_column;  // of the slab, in the rows that ids have
};

constexpr int kSums = 3;  // what rules sum over the columns of a row: two sums of theirs, and w * w for max_norm

// Row i: slots[i], distinct, with the summed gradient grads[i * dim ..]; given[i * kSums ..] (or null) are the sums to
// use in place of those over the columns there are. Where `found` is not null, those go there and no row changes.
struct Summed {
  const int64_t* slots;
  const float *grads, *given;
  float* found;
};

struct Kernels {
  const char* name;
  void (*pool)(const Bags&, const Vectors& out);
  void (*dot)(const Bags&, const Vectors& grads, float* out);
  // dst[i, :] = src row i in fp32, times scale[i] where scale is not null; n rows
  void (*gather_grads)(float* dst, const void* src, int dtype, int64_t stride, int64_t dim, int64_t n,
                       const float* scale);
  // Sums and applies groups [begin, end); a group of more than `largest` positions is left out. `scratch`: 3 * padded dim.
  void (*update)(const Table&, const Groups&, int64_t begin, int64_t end, int64_t largest, float* scratch);
  // Sum of `n` pairs from `from` on, in ascending order, not yet times the multiplier.
  void (*sum_range)(const Table&, const Groups&, int64_t from, int64_t n, float* out);
  // Applies the rule to one row, whose summed gradient is g (times the multiplier).
  void (*apply)(const Table&, int64_t slot, float* g, float* scratch);
  // The rule on rows [begin, end); `scratch`: padded dim floats and a row.
  void (*apply_rows)(const Table&, const Summed&, int64_t begin, int64_t end, float* scratch);
  bool (*finite)(const void* data, int dtype, int64_t n);
  // Whether any of n ids is outside [0, rows).
  bool (*ids_outside)(const void* values, int wide, int64_t n, int64_t rows);
  void (*init_rows)(const Init&, int64_t begin, int64_t end);
};

inline int64_t padded(int64_t dim) { return (dim + 15) / 16 * 16; }

}  // namespace embcache
