// Dot products of all pairs of feature vectors of a sample, forward and backward (DLRM, Naumov et al. 2019).
//
// Included once by each instruction set's translation unit; everything here has internal linkage. A vector lane is one
// output element and sums run over k in ascending order with a multiplication and an addition (no contraction), so the
// bits depend neither on the vector width nor on how samples are split over threads.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

namespace embcache_interaction {
namespace {

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#elif defined(__AVX2__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif
constexpr int kRows = 4;             // rows of a register tile
constexpr int kCols = 2 * kLanes;    // its columns: two vectors

typedef float Vec __attribute__((vector_size(kLanes * sizeof(float))));

inline Vec load(const float* p) {
  Vec v;
  std::memcpy(&v, p, sizeof(v));
  return v;
}

inline void store(float* p, const Vec& v) { std::memcpy(p, &v, sizeof(v)); }

inline float bf16_to_float(uint16_t x) {
  const uint32_t bits = static_cast<uint32_t>(x) << 16;
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

inline uint16_t float_to_bf16(float value) {  // to nearest, ties to even; NaN stays NaN
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  return static_cast<uint16_t>((bits & 0x7fffffffu) > 0x7f800000u ? 0x7fc0u : rounded);
}

inline void read_row(const float* from, float* to, int64_t n) { std::memcpy(to, from, n * sizeof(float)); }
inline void read_row(const uint16_t* from, float* to, int64_t n) {
  for (int64_t i = 0; i < n; ++i) to[i] = bf16_to_float(from[i]);
}
inline void write_row(const float* from, float* to, int64_t n) { std::memcpy(to, from, n * sizeof(float)); }
inline void write_row(const float* from, uint16_t* to, int64_t n) {
  for (int64_t i = 0; i < n; ++i) to[i] = float_to_bf16(from[i]);
}

inline int64_t round_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

// What a call works on. T is the type of the dense vector, of the output and of their gradients: float or bf16 bits.
template <typename T>
struct Shape {
  int64_t features, dim;                          // sparse vectors, width
  const T* dense;                                 // [B, dim] or null
  const float* sparse;                            // [B, features * dim]
  int64_t dense_stride, sparse_stride;            // elements from sample to sample
  int64_t vectors() const { return features + (dense != nullptr); }
  int64_t prefix() const { return dense != nullptr ? dim : 0; }  // columns before the products
};

// Pointers to the vectors of sample b; the dense one is widened into `buffer` where it is bf16.
template <typename T>
inline void rows_of(const Shape<T>& s, int64_t b, float* buffer, const float** rows) {
  int64_t n = 0;
  if (s.dense != nullptr) {
    read_row(s.dense + b * s.dense_stride, buffer, s.dim);
    rows[n++] = buffer;
  }
  for (int64_t f = 0; f < s.features; ++f) rows[n++] = s.sparse + b * s.sparse_stride + f * s.dim;
}

// out[b] = [dense, <x_i, x_j> for j < i], samples [begin, end).
template <typename T>
void forward(const Shape<T>& s, int64_t begin, int64_t end, T* out, int64_t out_stride) {
  const int64_t n = s.vectors(), dim = s.dim, padded = round_up(n, kCols);
  std::vector<float> transposed(dim * padded), buffer(dim), tile(kRows * padded);
  std::vector<const float*> rows(n);
  for (int64_t b = begin; b < end; ++b) {
    T* to = out + b * out_stride;
    rows_of(s, b, buffer.data(), rows.data());
    if (s.dense != nullptr) std::memcpy(to, s.dense + b * s.dense_stride, dim * sizeof(T));
    T* pairs = to + s.prefix();
    for (int64_t j = 0; j + 1 < n; ++j) {
      const float* row = rows[j];
      float* column = transposed.data() + j;
      for (int64_t k = 0; k < dim; ++k) column[k * padded] = row[k];
    }
    for (int64_t i0 = 0; i0 < n; i0 += kRows) {
      const int64_t last = std::min<int64_t>(i0 + kRows, n) - 1;  // rows past the end repeat the last and are dropped
      const float* x0 = rows[i0];
      const float* x1 = rows[std::min(i0 + 1, last)];
      const float* x2 = rows[std::min(i0 + 2, last)];
      const float* x3 = rows[std::min(i0 + 3, last)];
      for (int64_t j0 = 0; j0 < last; j0 += kCols) {
        Vec a00{}, a01{}, a10{}, a11{}, a20{}, a21{}, a30{}, a31{};
        const float* from = transposed.data() + j0;
        for (int64_t k = 0; k < dim; ++k, from += padded) {
          const Vec y0 = load(from), y1 = load(from + kLanes);
          a00 += x0[k] * y0, a01 += x0[k] * y1;
          a10 += x1[k] * y0, a11 += x1[k] * y1;
          a20 += x2[k] * y0, a21 += x2[k] * y1;
          a30 += x3[k] * y0, a31 += x3[k] * y1;
        }
        float* t = tile.data() + j0;
        store(t, a00), store(t + kLanes, a01), t += padded;
        store(t, a10), store(t + kLanes, a11), t += padded;
        store(t, a20), store(t + kLanes, a21), t += padded;
        store(t, a30), store(t + kLanes, a31);
      }
      for (int64_t i = i0; i <= last; ++i) write_row(tile.data() + (i - i0) * padded, pairs + i * (i - 1) / 2, i);
    }
  }
}

// grad_x_i = sum_j g_ij x_j with the symmetric g_ij = grad of <x_i, x_j>, g_ii = 0; the dense vector's own gradient is
// added last. grad_dense and grad_sparse have the strides given.
template <typename T>
void backward(const Shape<T>& s, int64_t begin, int64_t end, const T* grad, int64_t grad_stride, T* grad_dense,
              int64_t grad_dense_stride, float* grad_sparse, int64_t grad_sparse_stride) {
  const int64_t n = s.vectors(), dim = s.dim, whole = dim / kCols * kCols, padded_n = round_up(n, kRows);
  std::vector<float> buffer(dim), first(dim), triangle(n * (n - 1) / 2 + 1), weights(padded_n * n);
  std::vector<const float*> rows(n);
  std::vector<float*> outputs(padded_n);
  std::vector<float> dropped(dim);
  for (int64_t b = begin; b < end; ++b) {
    rows_of(s, b, buffer.data(), rows.data());
    const T* from = grad + b * grad_stride;
    read_row(from + s.prefix(), triangle.data(), n * (n - 1) / 2);
    // weights[j][i], i fastest: a tile reads kRows weights of one j side by side
    const float* g = triangle.data();
    for (int64_t i = 0; i < n; ++i) {
      weights[i * padded_n + i] = 0.0f;
      for (int64_t j = 0; j < i; ++j, ++g) weights[i * padded_n + j] = weights[j * padded_n + i] = *g;
    }
    int64_t at = 0;
    if (s.dense != nullptr) outputs[at++] = first.data();
    for (int64_t f = 0; f < s.features; ++f) outputs[at++] = grad_sparse + b * grad_sparse_stride + f * dim;
    for (; at < padded_n; ++at) outputs[at] = dropped.data();
    for (int64_t i0 = 0; i0 < n; i0 += kRows) {
      float* const* to = outputs.data() + i0;
      for (int64_t d = 0; d < whole; d += kCols) {
        Vec a00{}, a01{}, a10{}, a11{}, a20{}, a21{}, a30{}, a31{};
        const float* w = weights.data() + i0;
        for (int64_t j = 0; j < n; ++j, w += padded_n) {
          const Vec y0 = load(rows[j] + d), y1 = load(rows[j] + d + kLanes);
          a00 += w[0] * y0, a01 += w[0] * y1;
          a10 += w[1] * y0, a11 += w[1] * y1;
          a20 += w[2] * y0, a21 += w[2] * y1;
          a30 += w[3] * y0, a31 += w[3] * y1;
        }
        store(to[0] + d, a00), store(to[0] + d + kLanes, a01);
        store(to[1] + d, a10), store(to[1] + d + kLanes, a11);
        store(to[2] + d, a20), store(to[2] + d + kLanes, a21);
        store(to[3] + d, a30), store(to[3] + d + kLanes, a31);
      }
      for (int64_t d = whole; d < dim; ++d) {
        float a[kRows] = {};
        for (int64_t j = 0; j < n; ++j) {
          for (int r = 0; r < kRows; ++r) a[r] += weights[j * padded_n + i0 + r] * rows[j][d];
        }
        for (int r = 0; r < kRows; ++r) to[r][d] = a[r];
      }
    }
    if (s.dense != nullptr) {
      read_row(from, buffer.data(), dim);
      for (int64_t d = 0; d < dim; ++d) first[d] += buffer[d];
      write_row(first.data(), grad_dense + b * grad_dense_stride, dim);
    }
  }
}

}  // namespace
}  // namespace embcache_interaction
