// What surrounds the matrix products of a perceptron, in one pass each: bias and ReLU forward, ReLU's mask and the bias
// gradient backward. Plain data and function pointers; layers_isa.cpp is compiled once per instruction set.
#pragma once
#include <stdint.h>

namespace embcache {

constexpr int64_t kRowChunk = 128;  // the bias gradient sums chunks of this many rows, then the chunks in ascending order

struct LayerKernels {
  const char* name;
  // x[r, c] = max(x[r, c] + bias[c], 0), or without the maximum; rows [begin, end) of `stride` elements, fp32 or bf16
  void (*bias_relu)(void* x, int bf16, int64_t stride, int64_t columns, const float* bias, int relu, int64_t begin,
                    int64_t end);
  // to[r, c] = output[r, c] > 0 ? grad[r, c] : 0, and sum[c] = the sum of that over the rows in ascending order; without
  // `output` there is no mask and nothing is written to `to`
  void (*relu_backward)(const void* grad, int64_t grad_stride, const void* output, int64_t output_stride, void* to,
                        int64_t to_stride, int bf16, int64_t columns, float* sum, int64_t begin, int64_t end);
};

}  // namespace embcache
