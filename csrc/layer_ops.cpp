// A layer's forward under block scaling, and its backward, each as one op: the ops that they are made
// of, one after the other. An op costs the host 4 us of an eager step besides its launch (H200's host).

#include "checks.h"
#include "ops.h"
#include "tensors.h"

namespace grouped_linear {
namespace {

// [E, rows, cols] seen as [E, cols, rows].
Tensor turned(const Tensor& t) {
  const int64_t sizes[] = {t.size(0), t.size(2), t.size(1)};
  const int64_t strides[] = {t.stride(0), t.stride(2), t.stride(1)};
  AtenTensorHandle view = nullptr;
  TORCH_ERROR_CODE_CHECK(
      aoti_torch__reinterpret_tensor(t.get(), 3, sizes, strides, t.storage_offset(), &view));
  return Tensor(view);
}

}  // namespace

#define GROUPED_LINEAR_LAYER_OPS                                                                   \
  std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> block_scaled_linear(                  \
      const Tensor& x, const Tensor& w, const Tensor& m_splits, const std::optional<Tensor>& bias, \
      double amax_epsilon, bool power_of_two_scales, bool squares, bool columnwise_x,              \
      bool columnwise_w) {                                                                         \
    check_block_scaled_linear(x, w, m_splits, bias);                                               \
    const Tensor offs = splits_to_offsets(m_splits, x.size(0), 1, 1, std::nullopt);                \
    const auto [q, scale, x_t, scale_x_t, no_sums] =                                               \
        group_quantize(x, offs, std::nullopt, amax_epsilon, power_of_two_scales, true,             \
                       columnwise_x, false, squares, std::nullopt);                                \
    const auto [w_q, scale_w, w_t] =                                                               \
        quantize_weight(w, amax_epsilon, power_of_two_scales, columnwise_w);                       \
    const Tensor y = grouped_scaled_mm(q, w_q, scale, scale_w, offs, bias, x.scalar_type());       \
    return {y, offs, x_t, scale_x_t, w_t, scale_w};                                                \
  }                                                                                                \
  std::tuple<Tensor, Tensor, Tensor> block_scaled_linear_grad(                                     \
      const Tensor& dy, const Tensor& offs, const std::optional<Tensor>& x_t,                      \
      const std::optional<Tensor>& scale_x_t, const std::optional<Tensor>& w_t,                    \
      const std::optional<Tensor>& scale_w, double amax_epsilon, bool power_of_two_scales,         \
      bool bias_grad, std::optional<ScalarType> out_dtype) {                                       \
    check_block_scaled_linear_grad(dy, offs, x_t, scale_x_t, w_t, scale_w);                        \
    const auto [q, scale, dy_t, scale_dy_t, db] =                                                  \
        group_quantize(dy, offs, std::nullopt, amax_epsilon, power_of_two_scales, w_t.has_value(), \
                       x_t.has_value(), bias_grad, false, std::nullopt);                           \
    const ScalarType dtype = dy.scalar_type(), dw_dtype = out_dtype.value_or(dtype);               \
    const Tensor dx =                                                                              \
        w_t ? grouped_scaled_mm(q, *w_t, scale, turned(*scale_w), offs, std::nullopt, dtype)       \
            : new_tensor(dy, {0}, dtype);                                                          \
    const Tensor dw =                                                                              \
        x_t ? grouped_scaled_mm_wgrad(dy_t, *x_t, scale_dy_t, *scale_x_t, offs, dw_dtype)          \
            : new_tensor(dy, {0}, dw_dtype);                                                       \
    return {dx, dw, db};                                                                           \
  }

namespace cpu {
GROUPED_LINEAR_LAYER_OPS
}  // namespace cpu

#ifdef GROUPED_LINEAR_CUDA
namespace cuda {
GROUPED_LINEAR_LAYER_OPS
}  // namespace cuda
#endif

}  // namespace grouped_linear
