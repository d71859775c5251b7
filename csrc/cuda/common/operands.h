// SPDX-License-Identifier: Apache-2.0
// How launchers see tensors: as pointers to elements of a type, and whether kernels can read and
// write 16 bytes at once.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <optional>
#include <type_traits>

#include "checks.h"
#include "tensors.h"

namespace grouped_linear::cuda {

inline int64_t item_size(const Tensor& t) { return static_cast<int64_t>(t.element_size()); }

inline bool is_aligned(const Tensor& t) {
  return reinterpret_cast<uintptr_t>(t.const_data_ptr()) % 16 == 0;
}

// Whether every row of a matrix is aligned: the first one is, and so is the step from row to row.
inline bool has_aligned_rows(const Tensor& t) {
  return is_aligned(t) && t.stride(0) * item_size(t) % 16 == 0;
}

// t itself where its rows can be read 16 bytes at a time, else a dense copy: the allocator aligns
// new memory to 512 bytes.
inline Tensor with_aligned_rows(const Tensor& t) {
  return t.stride(1) == 1 && has_aligned_rows(t) ? t : dense_copy(t);
}

// Whether elements lie next to one another along `inner`, and all other steps are whole vectors.
inline bool has_vector_strides(const Tensor& t, int64_t inner) {
  const auto sizes = t.sizes(), strides = t.strides();
  const int64_t item = item_size(t);
  bool whole = strides[inner] == 1;
  for (int64_t d = 0; d < t.dim(); ++d)
    if (d != inner && sizes[d] > 1)
      whole = whole && strides[d] * item % 16 == 0 && strides[d] >= sizes[inner];
  return whole;
}
// Whether t can be read along `inner` 16 bytes at a time.
inline bool is_vector_readable(const Tensor& t, int64_t inner) {
  return is_aligned(t) && has_vector_strides(t, inner);
}
inline Tensor vector_readable(const Tensor& t, int64_t inner) {
  return is_vector_readable(t, inner) ? t : dense_copy(t);
}

// A dense tensor that kernels write, and may read, 16 bytes at a time; or none. It may be a view
// that begins anywhere in a larger buffer: then a copy is used, and copied back after the launch.
class AlignedOutput {
 public:
  explicit AlignedOutput(const std::optional<Tensor>& t)
      : own_(t), used_(t && !is_aligned(*t) ? dense_copy(*t) : t) {}

  const std::optional<Tensor>& used() const { return used_; }
  void copy_back() {
    if (own_ && !is_aligned(*own_)) torch::stable::copy_(*own_, *used_);
  }

 private:
  std::optional<Tensor> own_, used_;
};

template <typename T>
const T* data(const Tensor& t) {
  return static_cast<const T*>(t.const_data_ptr());
}
template <typename T>
T* mutable_data(const Tensor& t) {
  return static_cast<T*>(t.mutable_data_ptr());
}

// Null for a tensor that was not asked for: none, or one without elements.
template <typename T>
T* mutable_data_or_null(const Tensor& t) {
  return t.numel() > 0 ? mutable_data<T>(t) : nullptr;
}
template <typename T>
T* mutable_data_or_null(const std::optional<Tensor>& t) {
  return t ? mutable_data_or_null<T>(*t) : nullptr;
}
template <typename T>
const T* data_or_null(const std::optional<Tensor>& t) {
  return t ? data<T>(*t) : nullptr;
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

// The same for the types of indices.
template <typename Run>
void for_index(ScalarType dtype, const Run& run) {
  if (dtype == ScalarType::Int)
    run(std::type_identity<int32_t>());
  else
    run(std::type_identity<int64_t>());
}

}  // namespace grouped_linear::cuda
