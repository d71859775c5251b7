// SPDX-License-Identifier: Apache-2.0
// The rules of every op, stated once for CPU and CUDA. meta_kernels/ states the same rules with the
// same sentences for fake tensors; tests/test_errors.py compares the two.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <optional>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

#include "layout.h"
#include "swiglu_math.h"
#include "tensors.h"

namespace grouped_linear {

struct Scoring;  // routing_math.h

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// Raises RuntimeError with a sentence alone. STD_TORCH_CHECK would put a function, file and line
// first.
template <typename... Parts>
[[noreturn]] void fail(const Parts&... parts) {
  std::ostringstream sentence;
  (sentence << ... << parts);
  throw std::runtime_error(sentence.str());
}

template <typename... Parts>
void check(bool rule_holds, const Parts&... parts) {
  if (!rule_holds) fail(parts...);
}

// A tensor's dtype, also where it is the undefined one that None becomes: it has none to ask for,
// and a rule on its dimensions refuses it.
inline ScalarType dtype_of(const Tensor& t) {
  return t.defined() ? t.scalar_type() : ScalarType::Undefined;
}

void check_splits_to_offsets(const Tensor& m_splits, int64_t num_rows, int64_t alignment,
                             int64_t stride, ScalarType dtype);
void check_group_quantize(const Tensor& x, const Tensor& offs, const std::optional<Tensor>& rows,
                          double amax_epsilon, bool rowwise, bool columnwise);
Scoring check_topk_experts(const Tensor& logits, int64_t k, const std::optional<Tensor>& bias,
                           const std::string& score_function, bool normalize, double scale);
Scoring check_topk_experts_grad(const Tensor& d_weights, const Tensor& logits,
                                const Tensor& experts, const std::string& score_function,
                                bool normalize, double scale);
void check_sort_by_expert(const Tensor& experts, int64_t num_experts);
void check_gather_sum(const Tensor& y, const Tensor& rows, const std::optional<Tensor>& weight,
                      const std::optional<Tensor>& offs);
void check_gather_dot(const Tensor& a, const Tensor& y, const Tensor& rows);
void check_scatter_rows(const Tensor& x, const Tensor& rows, int64_t num_rows);
void check_swiglu(const char* op, const Tensor& gate_up, const Tensor& offs);
void check_swiglu_grad(const char* op, const Tensor& dh, const Tensor& gate_up,
                       const Tensor& weight, const Tensor& offs);
SwigluForm checked_form(const char* op, double alpha, double beta, std::optional<double> limit,
                        bool interleaved, double cubic);
void check_group_quantize_swiglu(const Tensor& gate_up, const Tensor& offs, double amax_epsilon,
                                 bool rowwise, bool columnwise);
void check_group_quantize_swiglu_grad(const Tensor& dh, const Tensor& gate_up, const Tensor& weight,
                                      const Tensor& offs, double amax_epsilon, bool rowwise,
                                      bool columnwise);
void check_group_quantize_current(const Tensor& x, const Tensor& offs, ScalarType dtype,
                                  double amax_epsilon, bool rowwise, bool columnwise);
void check_group_quantize_delayed(const std::optional<Tensor>& amax, const Tensor& x,
                                  const Tensor& offs, const Tensor& scale, ScalarType dtype,
                                  bool rowwise, bool columnwise);
void check_quantize_weight_delayed(const std::optional<Tensor>& amax, const Tensor& w,
                                   const Tensor& scale);
void check_update_scales(const std::vector<Tensor>& scale, const std::vector<Tensor>& amax,
                         const std::vector<Tensor>& amax_history,
                         const std::vector<double>& fp8_max, int64_t margin);
void check_group_quantize_mx(const char* op, const Tensor& x, const Tensor& offs, bool rowwise,
                             bool columnwise);
void check_group_dequantize(const Tensor& q, const Tensor& scale, const Tensor& offs,
                            ScalarType dtype);
void check_group_dequantize_t(const Tensor& q_t, const Tensor& scale_t, const Tensor& offs,
                              int64_t num_rows, ScalarType dtype);
void check_grouped_bias_grad(const Tensor& dy, const Tensor& offs);
void check_layouts(const char* op, bool rowwise, bool columnwise);
void check_quantize_weight(const char* op, const Tensor& w, double amax_epsilon,
                           std::optional<int64_t> mxfp4_dim = std::nullopt);
void check_quantize_weight_list(const std::vector<Tensor>& w, double amax_epsilon);
void check_refresh_weight(const std::vector<Tensor>& w, const std::optional<Tensor>& refresh,
                          const Tensor& q, const Tensor& scale, const std::optional<Tensor>& q_t,
                          double amax_epsilon, std::optional<int64_t> mxfp4_dim);
void check_refresh_weight_current(const std::vector<Tensor>& w,
                                  const std::optional<Tensor>& refresh, const Tensor& q,
                                  const Tensor& scale, const std::optional<Tensor>& q_t,
                                  double amax_epsilon);
void check_refresh_weight_delayed(const std::optional<Tensor>& amax, const std::vector<Tensor>& w,
                                  const Tensor& state, const std::optional<Tensor>& refresh,
                                  const Tensor& q, const Tensor& scale,
                                  const std::optional<Tensor>& q_t);
void check_refresh_weight_mx(const std::vector<Tensor>& w, const std::optional<Tensor>& refresh,
                             const Tensor& w_rowwise, const std::optional<Tensor>& w_columnwise);
void check_transpose_weight(const Tensor& q);
void check_adam_weight(const Tensor& q, const Tensor& scale, const std::optional<Tensor>& q_t,
                       const Tensor& master, const Tensor& grad, const Tensor& exp_avg,
                       const Tensor& exp_avg_sq, const std::optional<Tensor>& max_exp_avg_sq,
                       const Tensor& step, const std::optional<Tensor>& lr_tensor,
                       const std::optional<Tensor>& grad_scale,
                       const std::optional<Tensor>& found_inf, double lr, double beta1,
                       double beta2, double weight_decay, double eps, double amax_epsilon,
                       std::optional<int64_t> mxfp4_dim);
void check_grouped_mm(const char* op, const Tensor& a, const Tensor& b, const Tensor& offs,
                      const std::optional<Tensor>& bias, ScalarType out_dtype,
                      const std::optional<Tensor>& rows, const LowRank& low = {});
void check_grouped_mm_swiglu(const Tensor& a, const Tensor& b, const Tensor& offs,
                             const std::optional<Tensor>& bias, const std::optional<Tensor>& rows);
void check_grouped_mm_swiglu_grad(const Tensor& a, const Tensor& b, const Tensor& gate_up,
                                  const Tensor& weight, const Tensor& offs,
                                  const std::optional<Tensor>& rows);
void check_grouped_mm_list(const Tensor& a, const std::vector<Tensor>& b, const Tensor& offs,
                           const std::optional<Tensor>& bias, ScalarType out_dtype,
                           bool transpose_b, const std::optional<Tensor>& rows);
void check_grouped_scaled_mm(const Tensor& a, const Tensor& b, const Tensor& scale_a,
                             const Tensor& scale_b, const Tensor& offs,
                             const std::optional<Tensor>& bias, ScalarType out_dtype,
                             const std::optional<Tensor>& rows, const LowRank& low);
void check_quantize_mxfp4(const Tensor& w);
void check_dequantize_mxfp4(const Tensor& q, const Tensor& scale, ScalarType dtype);
// The dtype of grouped_mm_mxfp4's result: a's, or bfloat16 where that is FP8.
ScalarType mxfp4_out_dtype(const Tensor& a, std::optional<ScalarType> requested);
// low: b [E, N, r], as backends see it, where the result has N columns.
void check_grouped_mm_mxfp4(const Tensor& a, const Tensor& b, const Tensor& scale_b,
                            const Tensor& offs, const std::optional<Tensor>& bias,
                            const std::optional<Tensor>& scale_a, ScalarType out_dtype,
                            bool transpose_b, const std::optional<Tensor>& rows,
                            const LowRank& low);
void check_addmm(const Tensor& c, const Tensor& a, const Tensor& b);
void check_grouped_mm_wgrad(const char* op, const Tensor& dy, const Tensor& x, const Tensor& offs,
                            ScalarType out_dtype, const std::optional<Tensor>& dy_rows,
                            const std::optional<Tensor>& x_rows);
void check_grouped_scaled_mm_wgrad(const char* op, const Tensor& dy_t, const Tensor& x_t,
                                   const Tensor& scale_dy_t, const Tensor& scale_x_t,
                                   const Tensor& offs, ScalarType out_dtype);
void check_main_grad(const char* op, const Tensor& main_grad, const Tensor& dy, int64_t E,
                     int64_t N, int64_t K, const std::optional<Tensor>& overwrite);
// main_grad: E tensors [N, K].
void check_main_grad_list(const char* op, const std::vector<Tensor>& main_grad, const Tensor& dy,
                          int64_t E, int64_t N, int64_t K, const std::optional<Tensor>& overwrite);

void check_block_scaled_linear(const Tensor& x, const Tensor& w, const Tensor& m_splits,
                               const std::optional<Tensor>& bias);
void check_block_scaled_linear_grad(const Tensor& dy, const Tensor& offs,
                                    const std::optional<Tensor>& x_t,
                                    const std::optional<Tensor>& scale_x_t,
                                    const std::optional<Tensor>& w_t,
                                    const std::optional<Tensor>& scale_w);

}  // namespace grouped_linear
