// How kernels see tensors: the type of their elements, and whether 16 bytes can be read at once.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <type_traits>

#include "checks.h"
#include "tensors.h"

namespace grouped_linear::cuda {

inline int64_t item_size(const Tensor& t) { return static_cast<int64_t>(t.element_size()); }

inline bool is_aligned(const Tensor& t) {
  return reinterpret_cast<uintptr_t>(t.const_data_ptr()) % 16 == 0;
}

// Every row of a matrix: the first one, and the way from one to the next.
inline bool has_aligned_rows(const Tensor& t) {
  return is_aligned(t) && t.stride(0) * item_size(t) % 16 == 0;
}

// In new memory, which the allocator aligns to 512 bytes.
inline Tensor dense_copy(const Tensor& t) {
  return t.is_contiguous() ? torch::stable::clone(t) : torch::stable::contiguous(t);
}

// t itself where its rows can be read 16 bytes at a time, else a dense copy.
inline Tensor with_aligned_rows(const Tensor& t) {
  return t.stride(1) == 1 && has_aligned_rows(t) ? t : dense_copy(t);
}

// Calls run with the type, in a std::type_identity, that dtype names.
template <typename Run>
void for_element(ScalarType dtype, const Run& run) {
  switch (dtype) {
    case ScalarType::BFloat16: run(std::type_identity<__nv_bfloat16>()); break;
    case ScalarType::Half: run(std::type_identity<__half>()); break;
    default: run(std::type_identity<float>());
  }
}

// The same of numbers of rows.
template <typename Run>
void for_index(ScalarType dtype, const Run& run) {
  if (dtype == ScalarType::Int)
    run(std::type_identity<int32_t>());
  else
    run(std::type_identity<int64_t>());
}

}  // namespace grouped_linear::cuda
