// SPDX-License-Identifier: Apache-2.0
// GEMMs of FP8 matrices with a scale for every k-block of 128, or with one scale.
#pragma once

#include <vector>

#include "cpu/matmul.h"

namespace grouped_linear::cpu {

// One operand [rows, K]. K-block b of row r is dense at q + r * row_stride + b * block_stride, and
// its scale is scale[r / scale_rows * scale_row_stride + b * scale_block_stride].
struct ScaledOperand {
  const uint8_t* q;
  ScalarType format;
  int64_t row_stride, block_stride;
  const float* scale;
  int64_t scale_rows, scale_row_stride, scale_block_stride;

  const uint8_t* block(int64_t r, int64_t b) const { return q + r * row_stride + b * block_stride; }
  float scale_of(int64_t r, int64_t b) const {
    return scale[r / scale_rows * scale_row_stride + b * scale_block_stride];
  }
};

// A second product in float32: a [M, r] @ b [r, N], both dense.
struct LowRankProduct {
  int64_t r = 0;
  const float *a = nullptr, *b = nullptr;
};

// out [M, N] = a [M, K] @ b [N, K].T + low + bias. bias: a row of out's dtype, or null.
struct ScaledProduct {
  ScaledOperand a, b;
  int64_t K;
  Matrix out;
  const void* bias = nullptr;
  LowRankProduct low = {};
};

// Sums are float32 and rounded once. `add` adds the old values of out before that.
void multiply(const std::vector<ScaledProduct>& products, bool add = false);

}  // namespace grouped_linear::cpu
