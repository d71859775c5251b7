// SPDX-License-Identifier: Apache-2.0
// Quantization with one scale a group: what current and delayed scaling share.
#pragma once

#include "cpu/fp8.h"
#include "cpu/tiles.h"

namespace grouped_linear::cpu {

// Where results go; null for what is not requested.
struct PerGroupOutputs {
  uint8_t* q;                  // [rows, K]
  uint8_t* q_t;                // [Tp / 128, K, 128], or [E, K, N] of a weight
  float* bias_grad = nullptr;  // [E, K]
  float* amax = nullptr;       // [E], raised to the largest magnitude of each group
};

// The largest finite magnitude of each group.
std::vector<float> finite_amax_of_groups(const GroupedRows& rows);

// q = x * factor of its group, in the format.
void quantize_per_group(const GroupedRows& rows, const std::vector<float>& factor,
                        ScalarType format, const PerGroupOutputs& out);

// Activations. factors(rows, format, scales) returns the factors and writes the scales.
template <typename Factors>
std::tuple<Tensor, Tensor, Tensor, Tensor> quantize_activations(
    const char* op, const Tensor& x, const Tensor& offs, const std::optional<Tensor>& amax,
    ScalarType dtype, bool rowwise, bool columnwise, bool bias_grad, const Factors& factors) {
  const GroupedRows rows(op, x, offs);
  const int64_t T = x.size(0), K = x.size(1), E = offs.size(0);
  const Tensor q = output_if(rowwise, x, {T, K}, dtype);
  const Tensor scale = new_output(x, {E}, ScalarType::Float);
  const Tensor q_t = output_if(columnwise, x, {padded_rows(T, E) / kBlock, K, kBlock}, dtype);
  const Tensor grad = output_if(bias_grad, x, {E, K}, ScalarType::Float);
  quantize_per_group(rows, factors(rows, dtype, scale.mutable_data_ptr<float>()), dtype,
                     {pointer_if<uint8_t>(rowwise, q), pointer_if<uint8_t>(columnwise, q_t),
                      pointer_if<float>(bias_grad, grad), pointer_if<float>(amax)});
  return {q, scale, q_t, grad};
}

// A weight, into tensors that are there.
template <typename Factors>
void refresh_weight(const Tensor& q, const Tensor& scale, const std::optional<Tensor>& q_t,
                    const std::vector<Tensor>& w, const std::optional<Tensor>& amax,
                    const Factors& factors) {
  const GroupedRows rows(w);
  const auto of_groups = factors(rows, E4m3::kType, static_cast<float*>(scale.data_ptr()));
  quantize_per_group(
      rows, of_groups, E4m3::kType,
      {pointer_if<uint8_t>(true, q), pointer_if<uint8_t>(q_t), nullptr, pointer_if<float>(amax)});
}
template <typename Factors>
std::tuple<Tensor, Tensor, Tensor> quantize_new_weight(const Tensor& w, bool columnwise,
                                                       const std::optional<Tensor>& amax,
                                                       const Factors& factors) {
  const int64_t E = w.size(0), N = w.size(1), K = w.size(2);
  const Tensor q = new_output(w, {E, N, K}, E4m3::kType);
  const Tensor scale = new_output(w, {E}, ScalarType::Float);
  const Tensor q_t = output_if(columnwise, w, {E, K, N}, E4m3::kType);
  refresh_weight(q, scale, columnwise ? std::optional(q_t) : std::nullopt, {w}, amax, factors);
  return {q, scale, q_t};
}

}  // namespace grouped_linear::cpu
