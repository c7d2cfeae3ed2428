// torch.ops.embcache.dot_interaction and its backward: checks, instruction set, threads.
#include "interaction.h"
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <string.h>
#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>
#include "engine.h"
#include "scratch.h"

using torch::stable::Tensor;

namespace embcache {

namespace portable { extern const InteractionKernels interaction; }
#if defined(__x86_64__)
namespace avx2 { extern const InteractionKernels interaction; }
namespace avx512 { extern const InteractionKernels interaction; }
#endif

namespace {

using torch::headeronly::ScalarType;

const InteractionKernels& chosen_kernels() {
#if defined(__x86_64__)
  for (const InteractionKernels* k : {&avx2::interaction, &avx512::interaction})
    if (!strcmp(k->name, active().name)) return *k;
#endif
  return portable::interaction;
}

[[noreturn]] void refuse(const std::string& what) { throw std::runtime_error("embcache.dot_interaction: " + what); }

bool has_type(const Tensor& t, int32_t type) {
  int32_t actual = -1;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(t.get(), &actual));
  return actual == type;
}

// 1 for bf16, 0 for fp32.
int is_bf16(const char* what, const Tensor& t) {
  if (has_type(t, aoti_torch_dtype_bfloat16())) return 1;
  if (!has_type(t, aoti_torch_dtype_float32())) refuse(std::string(what) + " must be float32 or bfloat16");
  return 0;
}

// A CPU matrix whose rows are contiguous: as it is, or copied.
Tensor with_contiguous_rows(const char* what, const Tensor& t, int64_t rows, int64_t columns) {
  if (!t.is_cpu()) refuse(std::string(what) + " must be on the CPU");
  if (t.dim() != 2 || t.size(0) != rows || t.size(1) != columns)
    refuse(std::string(what) + " must have shape [" + std::to_string(rows) + ", " + std::to_string(columns) + "]");
  return t.stride(1) == 1 || columns == 1 ? t : torch::stable::contiguous(t);
}

Interaction describe(std::optional<Tensor>& dense, Tensor& sparse, int64_t dim) {
  if (dim < 1 || sparse.dim() != 2 || sparse.size(1) % dim) refuse("sparse must have shape [B, F * dim]");
  if (is_bf16("sparse", sparse)) refuse("sparse must be float32");
  sparse = with_contiguous_rows("sparse", sparse, sparse.size(0), sparse.size(1));
  Interaction a = {};
  a.features = sparse.size(1) / dim;
  a.dim = dim;
  a.sparse = (const float*)sparse.data_ptr();
  a.sparse_stride = sparse.stride(0);
  if (dense) {
    a.bf16 = is_bf16("dense", *dense);
    dense = with_contiguous_rows("dense", *dense, sparse.size(0), dim);
    a.dense = dense->data_ptr();
    if (!a.dense) a.dense = "";  // an empty batch has no address, the vector is there all the same
    a.dense_stride = dense->stride(0);
  }
  return a;
}

// Runs f(begin, end, scratch) over the samples, cut evenly over torch's threads.
template <class F>
void over_samples(const InteractionKernels& k, const Interaction& a, int64_t samples, F&& f) {
  const int64_t grain = 1 + (1 << 18) / (a.pairs() * a.dim + 1);  // about 50 microseconds of work a piece
  torch::stable::parallel_for(0, samples, grain, [&](int64_t begin, int64_t end) {
    thread_local Buffer buffer;
    char* scratch = buffer.get<char>(k.scratch(a) + 64);
    scratch += (64 - (uintptr_t)scratch % 64) % 64;
    f(begin, end, (void*)scratch);
  });
}

Tensor forward_op(std::optional<Tensor> dense, Tensor sparse, int64_t dim) {
  const Interaction a = describe(dense, sparse, dim);
  const InteractionKernels& k = chosen_kernels();
  const int64_t samples = sparse.size(0), width = a.width(), stride = (width + 15) / 16 * 16;
  // rows begin at multiples of 16 elements: the product that follows runs faster on them
  Tensor out = torch::stable::empty({samples, stride}, a.bf16 ? ScalarType::BFloat16 : ScalarType::Float);
  if (width) {
    over_samples(k, a, samples, [&](int64_t begin, int64_t end, void* scratch) {
      k.forward(a, begin, end, out.data_ptr(), stride, scratch);
    });
  }
  return torch::stable::narrow(out, 1, 0, width);
}

std::tuple<Tensor, Tensor> backward_op(Tensor grad, std::optional<Tensor> dense, Tensor sparse, int64_t dim) {
  const Interaction a = describe(dense, sparse, dim);
  const InteractionKernels& k = chosen_kernels();
  const int64_t samples = sparse.size(0);
  if (is_bf16("grad", grad) != a.bf16) refuse("grad must have the dtype of the output");
  grad = with_contiguous_rows("grad", grad, samples, a.width());
  const ScalarType type = a.bf16 ? ScalarType::BFloat16 : ScalarType::Float;
  Tensor grad_dense = torch::stable::empty({a.dense ? samples : 0, dim}, type);
  Tensor grad_sparse = torch::stable::empty({samples, sparse.size(1)}, ScalarType::Float);
  const InteractionGrads g = {grad.data_ptr(), grad_dense.data_ptr(), (float*)grad_sparse.data_ptr(),
                              grad.stride(0),  dim,                   sparse.size(1)};
  over_samples(k, a, samples, [&](int64_t begin, int64_t end, void* scratch) {
    k.backward(a, begin, end, g, scratch);
  });
  return {grad_dense, grad_sparse};
}

}  // namespace
}  // namespace embcache

STABLE_TORCH_LIBRARY_FRAGMENT(embcache, m) {
  m.def("dot_interaction(Tensor? dense, Tensor sparse, int dim) -> Tensor");
  m.def("dot_interaction_backward(Tensor grad, Tensor? dense, Tensor sparse, int dim) -> (Tensor, Tensor)");
}

STABLE_TORCH_LIBRARY_IMPL(embcache, CPU, m) {
  m.impl("dot_interaction", TORCH_BOX(&embcache::forward_op));
  m.impl("dot_interaction_backward", TORCH_BOX(&embcache::backward_op));
}
