// SPDX-License-Identifier: Apache-2.0
// One scale a group from the group's own amax: one pass for the amax, one to quantize.

#include "checks.h"
#include "cpu/fp8.h"
#include "cpu/per_group.h"
#include "ops.h"

namespace grouped_linear::cpu {
namespace {

// Writes every group's scale and returns the factors.
std::vector<float> current_factors(const GroupedRows& rows, ScaleRule rule, ScalarType format,
                                   float* scales) {
  const std::vector<float> amax = finite_amax_of_groups(rows);
  std::vector<float> factors(rows.groups);
  for (int64_t e = 0; e < rows.groups; ++e) {
    const BlockScale group = block_scale(amax[e], rule, fp8_max(format));
    factors[e] = group.factor;
    scales[e] = group.scale;
  }
  return factors;
}

}  // namespace

std::tuple<Tensor, Tensor, Tensor, Tensor> group_quantize_current(
    const Tensor& x, const Tensor& offs, ScalarType dtype, double amax_epsilon,
    bool power_of_two_scales, bool rowwise, bool columnwise, bool bias_grad) {
  const char* op = "group_quantize_current";
  check_group_quantize_current(x, offs, dtype, amax_epsilon, rowwise, columnwise);
  const GroupedRows rows(op, x, offs);
  const int64_t T = x.size(0), K = x.size(1), E = offs.size(0);

  const Tensor q = output_if(rowwise, x, {T, K}, dtype);
  const Tensor scale = new_output(x, {E}, ScalarType::Float);
  const Tensor q_t = output_if(columnwise, x, {padded_rows(T, E) / kBlock, K, kBlock}, dtype);
  const Tensor grad = output_if(bias_grad, x, {E, K}, ScalarType::Float);

  const ScaleRule rule{static_cast<float>(amax_epsilon), power_of_two_scales};
  const auto factors = current_factors(rows, rule, dtype, scale.mutable_data_ptr<float>());
  quantize_per_group(rows, factors, dtype,
                     {pointer_if<uint8_t>(rowwise, q), pointer_if<uint8_t>(columnwise, q_t),
                      pointer_if<float>(bias_grad, grad)});
  return {q, scale, q_t, grad};
}

std::tuple<Tensor, Tensor, Tensor> quantize_weight_current(const Tensor& w, double amax_epsilon,
                                                           bool power_of_two_scales,
                                                           bool columnwise) {
  check_quantize_weight("quantize_weight_current", w, amax_epsilon);
  const GroupedRows rows({w});
  const int64_t E = w.size(0), N = w.size(1), K = w.size(2);

  constexpr ScalarType e4m3 = E4m3::kType;
  const Tensor q = new_output(w, {E, N, K}, e4m3);
  const Tensor scale = new_output(w, {E}, ScalarType::Float);
  const Tensor q_t = output_if(columnwise, w, {E, K, N}, e4m3);

  const ScaleRule rule{static_cast<float>(amax_epsilon), power_of_two_scales};
  const auto factors = current_factors(rows, rule, e4m3, scale.mutable_data_ptr<float>());
  quantize_per_group(rows, factors, e4m3,
                     {pointer_if<uint8_t>(true, q), pointer_if<uint8_t>(columnwise, q_t)});
  return {q, scale, q_t};
}

void refresh_weight_current_(const Tensor& q, const Tensor& scale, const std::optional<Tensor>& q_t,
                             const std::vector<Tensor>& w, const std::optional<Tensor>& refresh,
                             double amax_epsilon, bool power_of_two_scales) {
  check_refresh_weight_current(w, refresh, q, scale, q_t, amax_epsilon);
  if (refresh && !*refresh->const_data_ptr<bool>()) return;
  const GroupedRows rows(w);

  constexpr ScalarType e4m3 = E4m3::kType;
  const ScaleRule rule{static_cast<float>(amax_epsilon), power_of_two_scales};
  const auto factors = current_factors(rows, rule, e4m3, static_cast<float*>(scale.data_ptr()));
  quantize_per_group(rows, factors, e4m3, {pointer_if<uint8_t>(true, q), pointer_if<uint8_t>(q_t)});
}

}  // namespace grouped_linear::cpu
