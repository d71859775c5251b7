// SPDX-License-Identifier: Apache-2.0
// One scale a group from the group's own amax: one pass for the amax, one to quantize.

#include "checks.h"
#include "cpu/fp8.h"
#include "cpu/per_group.h"
#include "ops.h"

namespace grouped_linear::cpu {
namespace {

// The factors of quantize_activations and refresh_weight.
auto current_factors(double amax_epsilon, bool power_of_two_scales) {
  const ScaleRule rule{static_cast<float>(amax_epsilon), power_of_two_scales};
  return [rule](const GroupedRows& rows, ScalarType format, float* scales) {
    const std::vector<float> amax = finite_amax_of_groups(rows);
    std::vector<float> factors(rows.groups);
    for (int64_t e = 0; e < rows.groups; ++e) {
      const BlockScale group = block_scale(amax[e], rule, fp8_max(format));
      factors[e] = group.factor;
      scales[e] = group.scale;
    }
    return factors;
  };
}

}  // namespace

std::tuple<Tensor, Tensor, Tensor, Tensor> group_quantize_current(
    const Tensor& x, const Tensor& offs, ScalarType dtype, double amax_epsilon,
    bool power_of_two_scales, bool rowwise, bool columnwise, bool bias_grad) {
  check_group_quantize_current(x, offs, dtype, amax_epsilon, rowwise, columnwise);
  return quantize_activations("group_quantize_current", x, offs, std::nullopt, dtype, rowwise,
                              columnwise, bias_grad,
                              current_factors(amax_epsilon, power_of_two_scales));
}

std::tuple<Tensor, Tensor, Tensor> quantize_weight_current(const Tensor& w, double amax_epsilon,
                                                           bool power_of_two_scales,
                                                           bool columnwise) {
  check_quantize_weight("quantize_weight_current", w, amax_epsilon);
  return quantize_new_weight(w, columnwise, std::nullopt,
                             current_factors(amax_epsilon, power_of_two_scales));
}

void refresh_weight_current_(const Tensor& q, const Tensor& scale, const std::optional<Tensor>& q_t,
                             const std::vector<Tensor>& w, const std::optional<Tensor>& refresh,
                             double amax_epsilon, bool power_of_two_scales) {
  check_refresh_weight_current(w, refresh, q, scale, q_t, amax_epsilon);
  if (refresh && !*refresh->const_data_ptr<bool>()) return;
  refresh_weight(q, scale, q_t, w, std::nullopt,
                 current_factors(amax_epsilon, power_of_two_scales));
}

}  // namespace grouped_linear::cpu
