// The dot interaction's kernels, compiled once per instruction set (EC_ISA, EC_NS); see lanes.h and interaction.h.
#ifndef EC_ISA
#define EC_ISA 0
#endif
#ifndef EC_NS
#define EC_NS portable
#endif
#include "lanes.h"
#include "interaction.h"

#if defined(__clang__)
#define EC_SHUFFLE(a, b, i, j, k, l) __builtin_shufflevector(a, b, i, j, k, l)
#else
#define EC_SHUFFLE(a, b, i, j, k, l) __builtin_shuffle(a, b, (I4){i, j, k, l})
#endif

namespace embcache {
namespace EC_NS {
namespace {

constexpr int kTile = EC_ISA == 2 ? 8 : EC_ISA == 1 ? 4 : 2;  // rows of a register tile, 16 columns wide

EC_INLINE int64_t round_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

// Elements that are bf16 bits or floats.
EC_INLINE void widen(const void* from, int64_t at, int bf16, float* to, int64_t n) {
  if (bf16)
    for (int64_t i = 0; i < n; ++i) to[i] = bits_float((uint32_t)((const uint16_t*)from)[at + i] << 16);
  else
    memcpy(to, (const float*)from + at, n * sizeof(float));
}

EC_INLINE void narrow(const float* from, void* to, int64_t at, int bf16, int64_t n) {
  if (!bf16) {
    memcpy((float*)to + at, from, n * sizeof(float));
    return;
  }
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) F16<true>::store((uint16_t*)to + at + i, v_load(from + i));
  if (i < n) F16<true>::store_n((uint16_t*)to + at + i, v_load_n(from + i, (int)(n - i)), (int)(n - i));
}

// Parts of the scratch memory, in floats; every part begins at a multiple of 16.
struct Scratch {
  float *first, *own, *dropped, *grad, *matrix, *tile;
  const float** rows;
  float** outputs;

  static int64_t layout(const Interaction& a, char* base, Scratch* to) {
    const int64_t n = a.vectors(), dim = round_up(a.dim, kLanes), columns = round_up(n, kLanes);
    const int64_t matrix = columns * (a.dim > n ? a.dim : n);
    int64_t at = 0;
    const auto take = [&](int64_t floats) {
      float* p = (float*)(base + at);
      at += round_up(floats, kLanes) * (int64_t)sizeof(float);
      return p;
    };
    const Scratch s = {take(dim), take(dim), take(dim), take(a.pairs() + 1), take(matrix), take(kTile * columns),
                       (const float**)take(2 * (n + kTile)), (float**)take(2 * (n + kTile))};
    if (to) *to = s;
    return at;
  }
};

int64_t scratch_bytes(const Interaction& a) { return Scratch::layout(a, nullptr, nullptr); }

// Addresses of the vectors of sample b; a dense one in bf16 is widened into s.first.
EC_INLINE void find_rows(const Interaction& a, int64_t b, const Scratch& s) {
  int64_t n = 0;
  if (a.dense) {
    if (a.bf16) widen(a.dense, b * a.dense_stride, 1, s.first, a.dim);
    s.rows[n++] = a.bf16 ? s.first : (const float*)a.dense + b * a.dense_stride;
  }
  for (int64_t f = 0; f < a.features; ++f) s.rows[n++] = a.sparse + b * a.sparse_stride + f * a.dim;
}

// matrix[k][j] = rows[j][k] for j < n, four by four in registers.
EC_INLINE void transpose(const Scratch& s, int64_t n, int64_t dim, int64_t columns) {
  typedef float F4 __attribute__((vector_size(16)));
  typedef int32_t I4 __attribute__((vector_size(16)));
  const int64_t whole_n = n / 4 * 4, whole_dim = dim / 4 * 4;
  for (int64_t j = 0; j < whole_n; j += 4) {
    for (int64_t k = 0; k < whole_dim; k += 4) {
      F4 a, b, c, d;
      memcpy(&a, s.rows[j] + k, 16);
      memcpy(&b, s.rows[j + 1] + k, 16);
      memcpy(&c, s.rows[j + 2] + k, 16);
      memcpy(&d, s.rows[j + 3] + k, 16);
      const F4 ab = EC_SHUFFLE(a, b, 0, 4, 1, 5), cd = EC_SHUFFLE(c, d, 0, 4, 1, 5);
      const F4 ef = EC_SHUFFLE(a, b, 2, 6, 3, 7), gh = EC_SHUFFLE(c, d, 2, 6, 3, 7);
      const F4 out[4] = {EC_SHUFFLE(ab, cd, 0, 1, 4, 5), EC_SHUFFLE(ab, cd, 2, 3, 6, 7), EC_SHUFFLE(ef, gh, 0, 1, 4, 5),
                         EC_SHUFFLE(ef, gh, 2, 3, 6, 7)};
      for (int i = 0; i < 4; ++i) memcpy(s.matrix + (k + i) * columns + j, &out[i], 16);
    }
    for (int64_t k = whole_dim; k < dim; ++k)
      for (int64_t i = j; i < j + 4; ++i) s.matrix[k * columns + i] = s.rows[i][k];
  }
  for (int64_t j = whole_n; j < n; ++j)
    for (int64_t k = 0; k < dim; ++k) s.matrix[k * columns + j] = s.rows[j][k];
}

void forward(const Interaction& a, int64_t begin, int64_t end, void* out, int64_t out_stride, void* scratch) {
  Scratch s;
  Scratch::layout(a, (char*)scratch, &s);
  const int64_t n = a.vectors(), dim = a.dim, columns = round_up(n, kLanes);
  memset(s.matrix, 0, dim * columns * sizeof(float));
  for (int64_t b = begin; b < end; ++b) {
    find_rows(a, b, s);
    int64_t at = b * out_stride;
    if (a.dense) {
      narrow(s.rows[0], out, at, a.bf16, dim);
      at += dim;
    }
    transpose(s, n - 1, dim, columns);  // the last vector is never a column
    const int64_t size = a.bf16 ? 2 : 4, width = a.width();
    memset((char*)out + (b * out_stride + width) * size, 0, (out_stride - width) * size);  // the padding
    for (int64_t i0 = 0; i0 < n; i0 += kTile) {
      const int64_t last = (i0 + kTile < n ? i0 + kTile : n) - 1;
      const float* x[kTile];  // rows past the end repeat the last one and are dropped
      for (int r = 0; r < kTile; ++r) x[r] = s.rows[i0 + r < last ? i0 + r : last];
      for (int64_t j0 = 0; j0 < last; j0 += kLanes) {
        V sum[kTile];
        for (int r = 0; r < kTile; ++r) sum[r] = v_zero();
        const float* column = s.matrix + j0;
        for (int64_t k = 0; k < dim; ++k, column += columns) {
          const V y = v_load(column);
          for (int r = 0; r < kTile; ++r) sum[r] = sum[r] + v_set1(x[r][k]) * y;
        }
        for (int r = 0; r < kTile; ++r) v_store(s.tile + r * columns + j0, sum[r]);
      }
      for (int64_t i = i0; i <= last; ++i)
        narrow(s.tile + (i - i0) * columns, out, at + i * (i - 1) / 2, a.bf16, i);
    }
  }
}

// grad x_i = sum over j of g_ij x_j with g symmetric, g_ii = 0; the dense vector's direct gradient is added last.
void backward(const Interaction& a, int64_t begin, int64_t end, const InteractionGrads& g, void* scratch) {
  Scratch s;
  Scratch::layout(a, (char*)scratch, &s);
  const int64_t n = a.vectors(), dim = a.dim, columns = round_up(n, kLanes);
  for (int64_t b = begin; b < end; ++b) {
    find_rows(a, b, s);
    widen(g.out, b * g.out_stride + (a.dense ? dim : 0), a.bf16, s.grad, a.pairs());
    const float* pair = s.grad;
    for (int64_t i = 0; i < n; ++i) {
      s.matrix[i * columns + i] = 0.0f;
      for (int64_t j = 0; j < i; ++j, ++pair) s.matrix[i * columns + j] = s.matrix[j * columns + i] = *pair;
    }
    int64_t m = 0;
    float* const own = a.bf16 ? s.own : (float*)g.dense + b * g.dense_stride;  // gradient of the dense vector
    if (a.dense) s.outputs[m++] = own;
    for (int64_t f = 0; f < a.features; ++f) s.outputs[m++] = g.sparse + b * g.sparse_stride + f * dim;
    for (; m < n + kTile; ++m) s.outputs[m] = s.dropped;
    for (int64_t i0 = 0; i0 < n; i0 += kTile) {
      for (int64_t d = 0; d < dim; d += kLanes) {
        V sum[kTile];
        for (int r = 0; r < kTile; ++r) sum[r] = v_zero();
        const float* weight = s.matrix + i0;  // [j][i]: the tile's weights of one j lie side by side
        const int part = dim - d < kLanes ? (int)(dim - d) : kLanes;
        for (int64_t j = 0; j < n; ++j, weight += columns) {
          const V y = part == kLanes ? v_load(s.rows[j] + d) : v_load_n(s.rows[j] + d, part);
          for (int r = 0; r < kTile; ++r) sum[r] = sum[r] + v_set1(weight[r]) * y;
        }
        for (int r = 0; r < kTile; ++r) {
          if (part == kLanes)
            v_store(s.outputs[i0 + r] + d, sum[r]);
          else
            v_store_n(s.outputs[i0 + r] + d, sum[r], part);
        }
      }
    }
    if (a.dense) {
      widen(g.out, b * g.out_stride, a.bf16, s.dropped, dim);
      for (int64_t d = 0; d < dim; ++d) own[d] = own[d] + s.dropped[d];
      if (a.bf16) narrow(own, g.dense, b * g.dense_stride, 1, dim);
    }
  }
}

}  // namespace

#define EC_STRING2(x) #x
#define EC_STRING(x) EC_STRING2(x)

extern const InteractionKernels interaction;
const InteractionKernels interaction = {EC_STRING(EC_NS), scratch_bytes, forward, backward};

}  // namespace EC_NS
}  // namespace embcache
