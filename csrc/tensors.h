// SPDX-License-Identifier: Apache-2.0
// New tensors, views and dense copies. The functions of torch::stable look up their op by name in
// every call; these only do so if there is something to copy.
#pragma once

#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <initializer_list>
#include <optional>
#include <stdexcept>
#include <tuple>

#include "layout.h"

// Weak, because only torch 2.13 and newer define it.
extern "C" __attribute__((weak)) const char* torch_exception_get_what_without_backtrace();

namespace grouped_linear {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// Sizes or strides of at most three dimensions. A std::vector would allocate memory in every call.
class Shape {
 public:
  Shape() = default;
  Shape(std::initializer_list<int64_t> sizes) {
    for (const int64_t size : sizes) sizes_[dim_++] = size;
  }
  static Shape of(const Tensor& t) {
    Shape shape;
    for (int64_t d = 0; d < t.dim(); ++d) shape.sizes_[shape.dim_++] = t.size(d);
    return shape;
  }

  int64_t dim() const { return dim_; }
  const int64_t* data() const { return sizes_; }
  const int64_t* begin() const { return sizes_; }
  const int64_t* end() const { return sizes_ + dim_; }
  bool operator==(const Shape& other) const {
    return std::equal(begin(), end(), other.begin(), other.end());
  }
  Shape dense_strides() const {
    Shape strides = *this;
    uint64_t stride = 1;  // torch refuses what overflows
    for (int64_t d = dim_; d-- > 0; stride *= std::max<int64_t>(sizes_[d], 1))
      strides.sizes_[d] = static_cast<int64_t>(stride);
    return strides;
  }

 private:
  int64_t sizes_[3]{}, dim_ = 0;
};

inline int32_t code_of(ScalarType dtype) {
  return torch::stable::detail::to<int32_t>(torch::stable::detail::from(dtype));
}

inline int32_t device_type_of(const Tensor& t) {
  int32_t type = 0;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(t.get(), &type));
  return type;
}

// Why a function of torch that returned an error did so.
inline const char* torch_reason() {
  return torch_exception_get_what_without_backtrace
             ? torch_exception_get_what_without_backtrace()
             : "grouped_linear: a function of torch failed, its message is on stderr";
}

// A dense tensor on like's device. Its bytes are unspecified. On a CPU they stay so even if
// torch.utils.deterministic.fill_uninitialized_memory is set.
inline Tensor new_tensor(const Tensor& like, const Shape& shape, ScalarType dtype) {
  const Shape strides = shape.dense_strides();
  AtenTensorHandle made = nullptr;
  const AOTITorchError error =
      aoti_torch_empty_strided(shape.dim(), shape.data(), strides.data(), code_of(dtype),
                               device_type_of(like), like.get_device_index(), &made);
  if (error != AOTI_TORCH_SUCCESS) throw std::runtime_error(torch_reason());
  return Tensor(made);
}

// A dense copy in new memory. torch::stable::contiguous would do, but keeps torch's reason for
// itself where there is no memory.
inline Tensor dense_copy(const Tensor& t) {
  Tensor copy = new_tensor(t, Shape::of(t), t.scalar_type());
  torch::stable::copy_(copy, t);
  return copy;
}

// A dense tensor over existing memory, which must outlive it.
inline Tensor tensor_over(void* first, const Tensor& like, const Shape& shape, ScalarType dtype) {
  const Shape strides = shape.dense_strides();
  AtenTensorHandle made = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_create_tensor_from_blob(
      first, shape.dim(), shape.data(), strides.data(), 0, code_of(dtype), device_type_of(like),
      like.get_device_index(), &made));
  return Tensor(made);
}

// t [E, rows, cols] as a view [E, cols, rows].
inline Tensor transposed(const Tensor& t) {
  const int64_t sizes[] = {t.size(0), t.size(2), t.size(1)};
  const int64_t strides[] = {t.stride(0), t.stride(2), t.stride(1)};
  AtenTensorHandle view = nullptr;
  constexpr int64_t offset = 0;  // from t's first element
  TORCH_ERROR_CODE_CHECK(aoti_torch__reinterpret_tensor(t.get(), 3, sizes, strides, offset, &view));
  return Tensor(view);
}

// The shapes of group_quantize's outputs for [T, K] in E groups; outputs that are not requested are
// empty.
struct QuantizedShapes {
  Shape q, scale, q_t, scale_t, bias_grad;

  QuantizedShapes(int64_t T, int64_t K, int64_t E, bool rowwise, bool columnwise, bool sums) {
    const int64_t blocks = padded_rows(T, E) / kBlock;
    const auto shape_if = [](bool requested, const Shape& shape) {
      return requested ? shape : Shape{0};
    };
    q = shape_if(rowwise, {T, K});
    scale = shape_if(rowwise, {ceil_div(K, kBlock), round_up(T, kScaleRowMultiple)});
    q_t = shape_if(columnwise, {blocks, K, kBlock});
    scale_t = shape_if(columnwise, {blocks, K});
    bias_grad = shape_if(sums, {E, K});
  }
};

struct Quantized {
  Tensor q, scale, q_t, scale_t, bias_grad;
  bool share_scales;  // in scale_t, see kShareWithin

  // allocate: new_tensor, or a backend's own.
  Quantized(Tensor (*allocate)(const Tensor& like, const Shape& shape, ScalarType dtype),
            const Tensor& like, const QuantizedShapes& shapes, bool share_scales)
      : q(allocate(like, shapes.q, ScalarType::Float8_e4m3fn)),
        scale(allocate(like, shapes.scale, ScalarType::Float)),
        q_t(allocate(like, shapes.q_t, ScalarType::Float8_e4m3fn)),
        scale_t(allocate(like, shapes.scale_t, ScalarType::Float)),
        bias_grad(allocate(like, shapes.bias_grad, ScalarType::Float)),
        share_scales(share_scales) {}

  Quantized(const Tensor& q, const Tensor& scale, const Tensor& q_t, const Tensor& scale_t,
            const Tensor& bias_grad, bool share_scales)
      : q(q),
        scale(scale),
        q_t(q_t),
        scale_t(scale_t),
        bias_grad(bias_grad),
        share_scales(share_scales) {}

  std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> all() const {
    return {q, scale, q_t, scale_t, bias_grad};
  }
};

struct QuantizedWeight {
  Tensor q, scale;
  std::optional<Tensor> q_t;  // none or empty if it is not requested
};

// The operands of a GEMM's second product: a [T, r] and b [E, N, r], or neither.
struct LowRank {
  std::optional<Tensor> a, b;
};

inline Tensor as_dense(const Tensor& t) { return t.is_contiguous() ? t : dense_copy(t); }

inline std::optional<Tensor> as_dense(const std::optional<Tensor>& t) {
  if (!t) return std::nullopt;
  return as_dense(*t);
}

// t with another dtype, in new memory where it has one.
inline std::optional<Tensor> converted(const std::optional<Tensor>& t, ScalarType dtype) {
  if (!t || t->scalar_type() == dtype) return t;
  Tensor copy = new_tensor(*t, Shape::of(*t), dtype);
  torch::stable::copy_(copy, *t);
  return copy;
}

// t if the elements of its last dimension are adjacent, else a dense copy.
inline Tensor with_dense_rows(const Tensor& t) {
  return t.stride(t.dim() - 1) == 1 ? t : dense_copy(t);
}

inline std::optional<Tensor> with_dense_rows(const std::optional<Tensor>& t) {
  if (!t) return std::nullopt;
  return with_dense_rows(*t);
}

}  // namespace grouped_linear
