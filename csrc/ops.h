// One declaration an op, and one of what an op of several is made of. cpu/ and cuda/ each define them
// in their own namespace.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <optional>
#include <tuple>
#include <vector>

#include "tensors.h"

#define GROUPED_LINEAR_DECLARE_OPS                                                                 \
  using torch::headeronly::ScalarType;                                                             \
  using torch::stable::Tensor;                                                                     \
  Tensor splits_to_offsets(const Tensor& m_splits, int64_t num_rows, int64_t alignment,            \
                           int64_t stride, std::optional<ScalarType> dtype);                       \
  std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> group_quantize(                               \
      const Tensor& x, const Tensor& offs, const std::optional<Tensor>& rows, double amax_epsilon, \
      bool power_of_two_scales, bool rowwise, bool columnwise, bool bias_grad, bool share_scales,  \
      const std::optional<Tensor>& factor);                                                        \
  void quantize_rows(const Tensor& x, const Tensor& offs, double amax_epsilon,                     \
                     bool power_of_two_scales, const Quantized& out);                              \
  void quantize_rows_and_weight(const Tensor& x, const Tensor& offs, const Tensor& w,              \
                                double amax_epsilon, bool power_of_two_scales,                     \
                                const Quantized& of_x, const QuantizedWeight& of_w);               \
  std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> group_quantize_swiglu(                        \
      const Tensor& gate_up, const Tensor& offs, double amax_epsilon, bool power_of_two_scales,    \
      bool rowwise, bool columnwise, bool keep_h, bool share_scales, double alpha, double beta,    \
      std::optional<double> limit, bool interleaved);                                              \
  std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> group_quantize_swiglu_grad(                   \
      const Tensor& dh, const Tensor& gate_up, const Tensor& offs, double amax_epsilon,            \
      bool power_of_two_scales, bool rowwise, bool columnwise, bool bias_grad, double alpha,       \
      double beta, std::optional<double> limit, bool interleaved);                                 \
  std::tuple<Tensor, Tensor, Tensor, Tensor> sort_by_expert(const Tensor& experts,                 \
                                                            int64_t num_experts);                  \
  Tensor gather_sum(const Tensor& y, const Tensor& rows, const std::optional<Tensor>& weight);     \
  Tensor gather_dot(const Tensor& a, const Tensor& y, const Tensor& rows);                         \
  Tensor swiglu(const Tensor& gate_up, const Tensor& offs, double alpha, double beta,              \
                std::optional<double> limit, bool interleaved);                                    \
  Tensor swiglu_grad(const Tensor& dh, const Tensor& gate_up, const Tensor& offs, double alpha,    \
                     double beta, std::optional<double> limit, bool interleaved);                  \
  std::tuple<Tensor, Tensor, Tensor, Tensor> group_quantize_current(                               \
      const Tensor& x, const Tensor& offs, ScalarType dtype, double amax_epsilon,                  \
      bool power_of_two_scales, bool rowwise, bool columnwise, bool bias_grad);                    \
  std::tuple<Tensor, Tensor, Tensor> group_quantize_delayed_(                                      \
      const std::optional<Tensor>& amax, const Tensor& x, const Tensor& offs, const Tensor& scale, \
      ScalarType dtype, bool rowwise, bool columnwise, bool bias_grad);                            \
  std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> group_quantize_mx(                            \
      const Tensor& x, const Tensor& offs, bool rowwise, bool columnwise, bool bias_grad);         \
  std::tuple<Tensor, Tensor, Tensor> group_round_mx(                                               \
      const Tensor& x, const Tensor& offs, bool rowwise, bool columnwise, bool bias_grad);         \
  Tensor group_dequantize(const Tensor& q, const Tensor& scale, const Tensor& offs,                \
                          ScalarType dtype);                                                       \
  Tensor group_dequantize_t(const Tensor& q_t, const Tensor& scale_t, const Tensor& offs,          \
                            int64_t num_rows, ScalarType dtype);                                   \
  Tensor grouped_bias_grad(const Tensor& dy, const Tensor& offs);                                  \
  std::tuple<Tensor, Tensor, Tensor> quantize_weight(const Tensor& w, double amax_epsilon,         \
                                                     bool power_of_two_scales, bool columnwise);   \
  std::tuple<Tensor, Tensor, Tensor> quantize_weight_list(                                         \
      const std::vector<Tensor>& w, double amax_epsilon, bool power_of_two_scales,                 \
      bool columnwise);                                                                            \
  std::tuple<Tensor, Tensor, Tensor> quantize_weight_current(                                      \
      const Tensor& w, double amax_epsilon, bool power_of_two_scales, bool columnwise);            \
  std::tuple<Tensor, Tensor> quantize_weight_delayed_(                                             \
      const std::optional<Tensor>& amax, const Tensor& w, const Tensor& scale, bool columnwise);   \
  void refresh_weight_(const std::vector<Tensor>& w, const std::optional<Tensor>& refresh,         \
                       const Tensor& q, const Tensor& scale, const std::optional<Tensor>& q_t,     \
                       double amax_epsilon, bool power_of_two_scales);                             \
  void refresh_weight_current_(const std::vector<Tensor>& w, const std::optional<Tensor>& refresh, \
                               const Tensor& q, const Tensor& scale,                               \
                               const std::optional<Tensor>& q_t, double amax_epsilon,              \
                               bool power_of_two_scales);                                          \
  void refresh_weight_delayed_(const std::optional<Tensor>& amax, const std::vector<Tensor>& w,    \
                               const Tensor& state, const std::optional<Tensor>& refresh,          \
                               const Tensor& q, const Tensor& scale,                               \
                               const std::optional<Tensor>& q_t);                                  \
  void refresh_weight_mx_(const std::vector<Tensor>& w, const std::optional<Tensor>& refresh,      \
                          const Tensor& w_rowwise, const std::optional<Tensor>& w_columnwise);     \
  void update_scales_(const std::vector<Tensor>& scale, const std::vector<Tensor>& amax,           \
                      const std::vector<Tensor>& amax_history, const std::vector<double>& fp8_max, \
                      int64_t margin, bool most_recent);                                           \
  Tensor grouped_mm(const Tensor& a, const Tensor& b, const Tensor& offs,                          \
                    const std::optional<Tensor>& bias, std::optional<ScalarType> out_dtype);       \
  Tensor grouped_mm_list(const Tensor& a, const std::vector<Tensor>& b, const Tensor& offs,        \
                         const std::optional<Tensor>& bias, std::optional<ScalarType> out_dtype,   \
                         bool transpose_b);                                                        \
  Tensor grouped_scaled_mm(                                                                        \
      const Tensor& a, const Tensor& b, const Tensor& scale_a, const Tensor& scale_b,              \
      const Tensor& offs, const std::optional<Tensor>& bias, std::optional<ScalarType> out_dtype); \
  Tensor grouped_mm_wgrad(const Tensor& dy, const Tensor& x, const Tensor& offs,                   \
                          std::optional<ScalarType> out_dtype);                                    \
  Tensor grouped_scaled_mm_wgrad(const Tensor& dy_t, const Tensor& x_t, const Tensor& scale_dy_t,  \
                                 const Tensor& scale_x_t, const Tensor& offs,                      \
                                 std::optional<ScalarType> out_dtype);                             \
  void grouped_mm_wgrad_(const Tensor& main_grad, const Tensor& dy, const Tensor& x,               \
                         const Tensor& offs, const std::optional<Tensor>& overwrite);              \
  void grouped_scaled_mm_wgrad_(const Tensor& main_grad, const Tensor& dy_t, const Tensor& x_t,    \
                                const Tensor& scale_dy_t, const Tensor& scale_x_t,                 \
                                const Tensor& offs, const std::optional<Tensor>& overwrite);       \
  std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> block_scaled_linear(                  \
      const Tensor& x, const Tensor& w, const Tensor& m_splits, const std::optional<Tensor>& bias, \
      double amax_epsilon, bool power_of_two_scales, bool share_scales, bool columnwise_x,         \
      bool columnwise_w);                                                                          \
  std::tuple<Tensor, Tensor, Tensor> block_scaled_linear_grad(                                     \
      const Tensor& dy, const Tensor& offs, const std::optional<Tensor>& x_t,                      \
      const std::optional<Tensor>& scale_x_t, const std::optional<Tensor>& w_t,                    \
      const std::optional<Tensor>& scale_w, double amax_epsilon, bool power_of_two_scales,         \
      bool bias_grad, std::optional<ScalarType> out_dtype);                                        \
  void grouped_mm_wgrad_list_(const std::vector<Tensor>& main_grad, const Tensor& dy,              \
                              const Tensor& x, const Tensor& offs,                                 \
                              const std::optional<Tensor>& overwrite);                             \
  void grouped_scaled_mm_wgrad_list_(const std::vector<Tensor>& main_grad, const Tensor& dy_t,     \
                                     const Tensor& x_t, const Tensor& scale_dy_t,                  \
                                     const Tensor& scale_x_t, const Tensor& offs,                  \
                                     const std::optional<Tensor>& overwrite)

namespace grouped_linear::cpu {
GROUPED_LINEAR_DECLARE_OPS;
}
namespace grouped_linear::cuda {
GROUPED_LINEAR_DECLARE_OPS;
}
#undef GROUPED_LINEAR_DECLARE_OPS
