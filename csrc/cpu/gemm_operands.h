// SPDX-License-Identifier: Apache-2.0
// Operands of the grouped GEMMs, as torch's kernels and fp8_mm.h read them.
#pragma once

#include <vector>

#include "cpu/fp8_mm.h"
#include "cpu/matmul.h"
#include "tensors.h"

namespace grouped_linear::cpu {

// a's rows, dense along K. In bf16 zeros follow them up to a multiple of 32.
Tensor separate_rows(const Tensor& a);

// [t | low] along the last dimension: a sum of two products is one product of such operands.
Tensor beside(const Tensor& t, const Tensor& low);

// out = a @ b + bias of one group, rounded once. a and b have one dtype; bias: a row of out's, or
// null.
void multiply_group(const Matrix& out, const Matrix& a, const Matrix& b, const void* bias);

// Rows from `begin` on, of group e, of q [T, K]; scale [ceil(K / 128), >= T] or [E].
ScaledOperand rowwise_operand(const Tensor& q, const Tensor& scale, int64_t e, int64_t begin);

// The numbered columns of scale, one after another.
Tensor gathered_columns(const Tensor& scale, const std::vector<int64_t>& numbers);

// A second product's operands in float32. b [E, N, r] is read as [E, r, N].
struct FloatLowRank {
  std::vector<float> a, b;
  int64_t r = 0, N = 0;

  FloatLowRank(const LowRank& low, int64_t rows);

  LowRankProduct of(int64_t e, int64_t first_row) const {
    return {r, a.data() + first_row * r, b.data() + e * r * N};
  }
};

}  // namespace grouped_linear::cpu
