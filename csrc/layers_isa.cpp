// Bias, ReLU and their gradients, compiled once per instruction set (EC_ISA, EC_NS); see lanes.h and layers.h.
#ifndef EC_ISA
#define EC_ISA 0
#endif
#ifndef EC_NS
#define EC_NS portable
#endif
#include "lanes.h"
#include "layers.h"

namespace embcache {
namespace EC_NS {
namespace {

template <class W>
EC_INLINE V part(const typename W::type* p, int n) {
  return n == kLanes ? W::load(p) : W::load_n(p, n);
}

template <class W>
EC_INLINE void put(typename W::type* p, V v, int n) {
  n == kLanes ? W::store(p, v) : W::store_n(p, v, n);
}

EC_INLINE int lanes_at(int64_t c, int64_t columns) { return columns - c < kLanes ? (int)(columns - c) : kLanes; }

template <class W>
EC_INLINE void bias_relu_rows(typename W::type* x, int64_t stride, int64_t columns, const float* bias, int relu,
                              int64_t begin, int64_t end) {
  for (int64_t r = begin; r < end; ++r) {
    typename W::type* row = x + r * stride;
    for (int64_t c = 0; c < columns; c += kLanes) {
      const int n = lanes_at(c, columns);
      const V v = part<W>(row + c, n) + part<F32>(bias + c, n);
      put<W>(row + c, relu ? ec_select(ec_gt(v_zero(), v), v_zero(), v) : v, n);  // NaN stays NaN
    }
  }
}

void bias_relu(void* x, int bf16, int64_t stride, int64_t columns, const float* bias, int relu, int64_t begin,
               int64_t end) {
  if (bf16)
    bias_relu_rows<F16<true>>((uint16_t*)x, stride, columns, bias, relu, begin, end);
  else
    bias_relu_rows<F32>((float*)x, stride, columns, bias, relu, begin, end);
}

template <class W>
EC_INLINE void relu_backward_rows(const typename W::type* grad, int64_t grad_stride, const typename W::type* output,
                                  int64_t output_stride, typename W::type* to, int64_t to_stride, int64_t columns,
                                  float* sum, int64_t begin, int64_t end) {
  memset(sum, 0, columns * sizeof(float));
  for (int64_t r = begin; r < end; ++r) {
    const typename W::type* g = grad + r * grad_stride;
    const typename W::type* o = output + r * output_stride;
    typename W::type* t = to + r * to_stride;
    for (int64_t c = 0; c < columns; c += kLanes) {
      const int n = lanes_at(c, columns);
      V v = part<W>(g + c, n);
      if (output) {
        v = ec_select(ec_gt(part<W>(o + c, n), v_zero()), v, v_zero());
        put<W>(t + c, v, n);
      }
      put<F32>(sum + c, part<F32>(sum + c, n) + v, n);
    }
  }
}

void relu_backward(const void* grad, int64_t grad_stride, const void* output, int64_t output_stride, void* to,
                   int64_t to_stride, int bf16, int64_t columns, float* sum, int64_t begin, int64_t end) {
  if (bf16)
    relu_backward_rows<F16<true>>((const uint16_t*)grad, grad_stride, (const uint16_t*)output, output_stride,
                                  (uint16_t*)to, to_stride, columns, sum, begin, end);
  else
    relu_backward_rows<F32>((const float*)grad, grad_stride, (const float*)output, output_stride, (float*)to, to_stride,
                            columns, sum, begin, end);
}

}  // namespace

#define EC_STRING2(x) #x
#define EC_STRING(x) EC_STRING2(x)

extern const LayerKernels layers;
const LayerKernels layers = {EC_STRING(EC_NS), bias_relu, relu_backward};

}  // namespace EC_NS
}  // namespace embcache
