// SPDX-License-Identifier: Apache-2.0
// One scale a group from earlier steps. One pass also raises amax, for later steps.

#include <algorithm>
#include <bit>
#include <cmath>

#include "checks.h"
#include "cpu/fp8.h"
#include "cpu/per_group.h"
#include "ops.h"

namespace grouped_linear::cpu {
namespace {

// The factors of quantize_activations and refresh_weight: those of `given`, or where that is 0,
// because no step has been seen yet, a group's own, as of current scaling.
auto delayed_factors(const Tensor& given) {
  return [&](const GroupedRows& rows, ScalarType format, float* used) {
    const Tensor dense = as_dense(given);
    const float* scales = dense.const_data_ptr<float>();
    std::vector<float> factors(rows.groups), amax;
    for (int64_t e = 0; e < rows.groups; ++e) {
      if (scales[e] != 0) {
        factors[e] = 1 / scales[e];
        used[e] = scales[e];
        continue;
      }
      if (amax.empty()) amax = finite_amax_of_groups(rows);
      const BlockScale own = block_scale(amax[e], ScaleRule{}, fp8_max(format));
      factors[e] = own.factor;
      used[e] = own.scale;
    }
    return factors;
  };
}

}  // namespace

std::tuple<Tensor, Tensor, Tensor, Tensor> group_quantize_delayed(
    const Tensor& x, const Tensor& offs, const Tensor& scale, const std::optional<Tensor>& amax,
    ScalarType dtype, bool rowwise, bool columnwise, bool bias_grad) {
  check_group_quantize_delayed(amax, x, offs, scale, dtype, rowwise, columnwise);
  return quantize_activations("group_quantize_delayed", x, offs, amax, dtype, rowwise, columnwise,
                              bias_grad, delayed_factors(scale));
}

std::tuple<Tensor, Tensor, Tensor> quantize_weight_delayed(const Tensor& w, const Tensor& scale,
                                                           const std::optional<Tensor>& amax,
                                                           bool columnwise) {
  check_quantize_weight_delayed(amax, w, scale);
  return quantize_new_weight(w, columnwise, amax, delayed_factors(scale));
}

void refresh_weight_delayed_(const Tensor& q, const Tensor& scale, const std::optional<Tensor>& q_t,
                             const std::optional<Tensor>& amax, const std::vector<Tensor>& w,
                             const Tensor& state, const std::optional<Tensor>& refresh) {
  check_refresh_weight_delayed(amax, w, state, refresh, q, scale, q_t);
  if (refresh && !*refresh->const_data_ptr<bool>()) return;
  refresh_weight(q, scale, q_t, w, amax, delayed_factors(state));
}

void update_scales_(const std::vector<Tensor>& scale, const std::vector<Tensor>& amax,
                    const std::vector<Tensor>& amax_history, const std::vector<double>& fp8_max,
                    int64_t margin, bool most_recent) {
  check_update_scales(scale, amax, amax_history, fp8_max, margin);
  for (size_t i = 0; i < scale.size(); ++i) {
    const int64_t E = scale[i].size(0), steps = amax_history[i].size(0);
    auto* scales = static_cast<float*>(scale[i].data_ptr());
    auto* latest = static_cast<float*>(amax[i].data_ptr());
    auto* history = static_cast<float*>(amax_history[i].data_ptr());
    std::copy_backward(history, history + (steps - 1) * E, history + steps * E);
    for (int64_t e = 0; e < E; ++e) {
      const uint32_t now = std::bit_cast<uint32_t>(latest[e]) & kMagnitude;
      const bool finite = now < kInfinity;
      history[e] = finite ? std::bit_cast<float>(now) : 0;
      uint32_t largest = finite ? now : 0;
      for (int64_t h = 1; h < steps && !most_recent; ++h)
        largest = std::max(largest, std::bit_cast<uint32_t>(history[h * E + e]) & kMagnitude);
      if (finite && largest > 0 && largest < kInfinity) {
        float factor = static_cast<float>(fp8_max[i]) / std::bit_cast<float>(largest);
        factor = factor * std::ldexp(1.0f, static_cast<int>(-margin));
        scales[e] = 1 / std::min(std::max(factor, 0x1p-126f), 0x1p126f);
      }
      latest[e] = 0;
    }
  }
}

}  // namespace grouped_linear::cpu
