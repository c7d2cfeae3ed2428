// torch.ops.embcache.bias_relu_ and relu_backward: checks, instruction set, threads.
#include "layers.h"
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <string.h>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>
#include "engine.h"

using torch::stable::Tensor;

namespace embcache {

namespace portable { extern const LayerKernels layers; }
#if defined(__x86_64__)
namespace avx2 { extern const LayerKernels layers; }
namespace avx512 { extern const LayerKernels layers; }
#endif

namespace {

const LayerKernels& chosen_kernels() {
#if defined(__x86_64__)
  for (const LayerKernels* k : {&avx2::layers, &avx512::layers})
    if (!strcmp(k->name, active().name)) return *k;
#endif
  return portable::layers;
}

[[noreturn]] void refuse(const std::string& what) { throw std::runtime_error("embcache: " + what); }

int32_t type_of(const Tensor& t) {
  int32_t type = -1;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(t.get(), &type));
  return type;
}

// A CPU matrix with contiguous rows, fp32 or bf16; returns whether bf16.
int check_matrix(const char* op, const char* what, const Tensor& t) {
  const int bf16 = type_of(t) == aoti_torch_dtype_bfloat16();
  if (!t.is_cpu() || t.dim() != 2 || (t.stride(1) != 1 && t.size(1) > 1) ||
      (!bf16 && type_of(t) != aoti_torch_dtype_float32()))
    refuse(std::string(op) + ": " + what + " must be a float32 or bfloat16 CPU matrix with contiguous rows");
  return bf16;
}

void check_like(const char* op, const char* what, const Tensor& t, const Tensor& like) {
  if (check_matrix(op, what, t) != check_matrix(op, what, like) || t.size(0) != like.size(0) ||
      t.size(1) != like.size(1))
    refuse(std::string(op) + ": " + what + " must have the shape and dtype of the first argument");
}

void bias_relu_op(Tensor x, Tensor bias, bool relu) {
  const int bf16 = check_matrix("bias_relu_", "x", x);
  if (!bias.is_cpu() || type_of(bias) != aoti_torch_dtype_float32() || !bias.is_contiguous() ||
      bias.numel() != x.size(1))
    refuse("bias_relu_: bias must be float32, contiguous, one value a column");
  const LayerKernels& k = chosen_kernels();
  const int64_t columns = x.size(1), grain = 1 + (1 << 14) / (columns + 1);
  torch::stable::parallel_for(0, x.size(0), grain, [&](int64_t begin, int64_t end) {
    k.bias_relu(x.data_ptr(), bf16, x.stride(0), columns, (const float*)bias.data_ptr(), relu, begin, end);
  });
}

Tensor relu_backward_op(Tensor grad, std::optional<Tensor> output, Tensor to) {
  const char* op = "relu_backward";
  const int bf16 = check_matrix(op, "grad", grad);
  if (output) {
    check_like(op, "output", *output, grad);
    check_like(op, "to", to, grad);
  }
  const LayerKernels& k = chosen_kernels();
  const int64_t rows = grad.size(0), columns = grad.size(1), chunks = (rows + kRowChunk - 1) / kRowChunk;
  std::vector<float> partial(chunks * columns);
  const int64_t grain = 1 + (1 << 14) / (kRowChunk * (columns + 1));
  torch::stable::parallel_for(0, chunks, grain, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i)
      k.relu_backward(grad.data_ptr(), grad.stride(0), output ? output->data_ptr() : nullptr,
                      output ? output->stride(0) : 0, output ? to.data_ptr() : nullptr, output ? to.stride(0) : 0, bf16,
                      columns, partial.data() + i * columns, i * kRowChunk,
                      (i + 1) * kRowChunk < rows ? (i + 1) * kRowChunk : rows);
  });
  Tensor sum = torch::stable::empty({columns}, torch::headeronly::ScalarType::Float);
  float* s = (float*)sum.data_ptr();
  for (int64_t c = 0; c < columns; ++c) s[c] = chunks ? partial[c] : 0.0f;
  for (int64_t i = 1; i < chunks; ++i)
    for (int64_t c = 0; c < columns; ++c) s[c] = s[c] + partial[i * columns + c];
  return sum;
}

}  // namespace
}  // namespace embcache

STABLE_TORCH_LIBRARY_FRAGMENT(embcache, m) {
  m.def("bias_relu_(Tensor(a!) x, Tensor bias, bool relu) -> ()");
  m.def("relu_backward(Tensor grad, Tensor? output, Tensor(a!) to) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(embcache, CPU, m) {
  m.impl("bias_relu_", TORCH_BOX(&embcache::bias_relu_op));
  m.impl("relu_backward", TORCH_BOX(&embcache::relu_backward_op));
}
