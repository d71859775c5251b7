// One scale a group from the group's own amax: one pass for the amax, one to quantize.

#include <bit>

#include "../checks.h"
#include "../experts.h"
#include "../ops.h"
#include "fp8.h"
#include "per_group.h"
#include "tile.h"

namespace grouped_linear::cpu {
namespace {

// Writes every group's scale and returns the factors.
std::vector<float> current_factors(const GroupedRows& rows, ScaleRule rule, ScalarType format,
                                   float* scales) {
  const auto amax_bits = group_amax(rows, true);
  std::vector<float> factors(rows.groups);
  for (int64_t e = 0; e < rows.groups; ++e) {
    const float amax = std::bit_cast<float>(amax_bits[e]);
    const BlockScale group = block_scale(amax, rule, largest_of(format));
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

  using Shape = std::vector<int64_t>;
  const auto output = [&x](bool wanted, const Shape& shape, ScalarType type) {
    return torch::stable::new_empty(x, wanted ? shape : Shape{0}, type);
  };
  Tensor q = output(rowwise, {T, K}, dtype);
  Tensor scale = output(true, {E}, ScalarType::Float);
  Tensor q_t = output(columnwise, {padded_rows(T, E) / kBlock, K, kBlock}, dtype);
  Tensor grad = output(bias_grad, {E, K}, ScalarType::Float);

  const ScaleRule rule{static_cast<float>(amax_epsilon), power_of_two_scales};
  const auto factors = current_factors(rows, rule, dtype, scale.mutable_data_ptr<float>());
  quantize_per_group(rows, factors, dtype,
                     {rowwise ? static_cast<uint8_t*>(q.data_ptr()) : nullptr,
                      columnwise ? static_cast<uint8_t*>(q_t.data_ptr()) : nullptr,
                      bias_grad ? grad.mutable_data_ptr<float>() : nullptr, nullptr});
  return {q, scale, q_t, grad};
}

std::tuple<Tensor, Tensor, Tensor> quantize_weight_current(const Tensor& w, double amax_epsilon,
                                                           bool power_of_two_scales,
                                                           bool columnwise) {
  check_quantize_weight("quantize_weight_current", w, amax_epsilon);
  const GroupedRows rows(w);
  const int64_t E = w.size(0), N = w.size(1), K = w.size(2);

  using Shape = std::vector<int64_t>;
  constexpr ScalarType e4m3 = ScalarType::Float8_e4m3fn;
  Tensor q = torch::stable::new_empty(w, Shape{E, N, K}, e4m3);
  Tensor scale = torch::stable::new_empty(w, Shape{E}, ScalarType::Float);
  Tensor q_t = torch::stable::new_empty(w, columnwise ? Shape{E, K, N} : Shape{0}, e4m3);

  const ScaleRule rule{static_cast<float>(amax_epsilon), power_of_two_scales};
  const auto factors = current_factors(rows, rule, e4m3, scale.mutable_data_ptr<float>());
  quantize_per_group(
      rows, factors, e4m3,
      {static_cast<uint8_t*>(q.data_ptr()),
       columnwise ? static_cast<uint8_t*>(q_t.data_ptr()) : nullptr, nullptr, nullptr});
  return {q, scale, q_t};
}

void refresh_weight_current_(const std::vector<Tensor>& w, const std::optional<Tensor>& refresh,
                             const Tensor& q, const Tensor& scale, const std::optional<Tensor>& q_t,
                             double amax_epsilon, bool power_of_two_scales) {
  check_refresh_weight_current(w, refresh, q, scale, q_t, amax_epsilon);
  if (refresh && !*refresh->const_data_ptr<bool>()) return;
  const GroupedRows rows(packed(w));

  constexpr ScalarType e4m3 = ScalarType::Float8_e4m3fn;
  const ScaleRule rule{static_cast<float>(amax_epsilon), power_of_two_scales};
  const auto factors = current_factors(rows, rule, e4m3, static_cast<float*>(scale.data_ptr()));
  quantize_per_group(rows, factors, e4m3,
                     {static_cast<uint8_t*>(q.data_ptr()),
                      q_t ? static_cast<uint8_t*>(q_t->data_ptr()) : nullptr, nullptr, nullptr});
}

}  // namespace grouped_linear::cpu
