// SPDX-License-Identifier: Apache-2.0
// Quantization with one scale a group: what current and delayed scaling share.
#pragma once

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

}  // namespace grouped_linear::cpu
