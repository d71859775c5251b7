// Tensors made and made dense. The functions of torch::stable look their op up by name in every
// call; these do not where there is nothing to do but allocate, or nothing at all.
#pragma once

#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <optional>
#include <stdexcept>
#include <vector>

// Weak: torch 2.13 and newer have it.
extern "C" __attribute__((weak)) const char* torch_exception_get_what_without_backtrace();

namespace grouped_linear {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using Shape = std::vector<int64_t>;

// A dense tensor on like's device. Its bytes are unspecified, on a CPU also where torch is told to
// fill them (torch.utils.deterministic).
inline Tensor new_tensor(const Tensor& like, const Shape& shape, ScalarType dtype) {
  Shape strides(shape.size(), 1);
  for (size_t d = shape.size(); d-- > 1;)
    strides[d - 1] = strides[d] * std::max<int64_t>(shape[d], 1);
  int32_t device_type = 0;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(like.get(), &device_type));
  const auto dtype_code = torch::stable::detail::to<int32_t>(torch::stable::detail::from(dtype));
  AtenTensorHandle made = nullptr;
  const AOTITorchError error =
      aoti_torch_empty_strided(static_cast<int64_t>(shape.size()), shape.data(), strides.data(),
                               dtype_code, device_type, like.get_device_index(), &made);
  if (error != AOTI_TORCH_SUCCESS)
    throw std::runtime_error(torch_exception_get_what_without_backtrace
                                 ? torch_exception_get_what_without_backtrace()
                                 : "grouped_linear: out of memory, torch could not allocate");
  return Tensor(made);
}

inline Tensor as_dense(const Tensor& t) {
  return t.is_contiguous() ? t : torch::stable::contiguous(t);
}

inline std::optional<Tensor> as_dense(const std::optional<Tensor>& t) {
  if (!t) return std::nullopt;
  return as_dense(*t);
}

// t itself where the elements of its last dimension are side by side, else a dense copy.
inline Tensor with_dense_rows(const Tensor& t) {
  return t.stride(t.dim() - 1) == 1 ? t : torch::stable::contiguous(t);
}

inline std::optional<Tensor> with_dense_rows(const std::optional<Tensor>& t) {
  if (!t) return std::nullopt;
  return with_dense_rows(*t);
}

}  // namespace grouped_linear
