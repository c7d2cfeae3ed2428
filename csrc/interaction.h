// Dot products of all pairs of feature vectors of a sample, forward and backward (DLRM, Naumov et al. 2019): plain data
// and function pointers. interaction_isa.cpp is compiled once per instruction set, interaction.cpp chooses and binds.
//
// Each output element is one lane, and sums run over their index in ascending order with one multiplication and one
// addition a term: the bits depend neither on the vector width nor on which thread has which samples.
#pragma once
#include <stdint.h>

namespace embcache {

// The vectors of a batch: per sample the dense one, where there is one, then `features` sparse ones, all of width `dim`.
// Dense values, the output and their gradients are bf16 (`bf16` != 0) or fp32; the sparse side is fp32.
struct Interaction {
  int64_t features, dim;
  int bf16;
  const void* dense;   // or null
  const float* sparse;
  int64_t dense_stride, sparse_stride;  // elements from sample to sample

  int64_t vectors() const { return features + (dense ? 1 : 0); }
  int64_t pairs() const { return vectors() * (vectors() - 1) / 2; }
  int64_t width() const { return pairs() + (dense ? dim : 0); }
};

struct InteractionGrads {
  const void* out;  // gradient of the output
  void* dense;
  float* sparse;
  int64_t out_stride, dense_stride, sparse_stride;
};

struct InteractionKernels {
  const char* name;
  int64_t (*scratch)(const Interaction&);  // bytes that a call of the two below needs, 64-byte aligned
  void (*forward)(const Interaction&, int64_t begin, int64_t end, void* out, int64_t out_stride, void* scratch);
  void (*backward)(const Interaction&, int64_t begin, int64_t end, const InteractionGrads&, void* scratch);
};

}  // namespace embcache
