// Quantization with one scale a group: what current and delayed scaling share.
#pragma once

#include <functional>
#include <vector>

#include "rows.h"

namespace grouped_linear::cpu {

// Rows of K elements, and which of them are each group's: those of x [T, K] as offs say, or the
// rows of every expert of a dense weight [E, N, K].
struct GroupedRows {
  GroupedRows(const char* op, const Tensor& x, const Tensor& offs);
  explicit GroupedRows(const Tensor& weight);

  // One block's share of one column of q_t, which has `pitch` bytes a column.
  uint8_t* column_of(uint8_t* q_t, const RowBlock& block, int64_t col) const;

  Tensor values;  // keeps them alive
  int64_t groups, features, row_bytes, pitch;
  bool is_weight;
  std::vector<RowBlock> blocks;
};

// The largest magnitude of each group, as bits. What is not finite does not count, or counts as
// infinity.
std::vector<uint32_t> group_amax(const GroupedRows& rows, bool finite_only);

// Where results go; null for what is not asked for.
struct PerGroupOutputs {
  uint8_t* q;        // [rows, K]
  uint8_t* q_t;      // [Tp / 128, K, 128], or [E, K, N] of a weight
  float* bias_grad;  // [E, K]
  float* amax;       // [E], raised to the largest magnitude of each group
};

// q = x * factor of its group, in the format.
void quantize_per_group(const GroupedRows& rows, const std::vector<float>& factor,
                        ScalarType format, const PerGroupOutputs& out);

}  // namespace grouped_linear::cpu
