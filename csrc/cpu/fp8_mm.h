// Products of FP8 matrices whose scales change every 128 elements of the sum, or never.
#pragma once

#include <vector>

#include "cpu/matmul.h"

namespace grouped_linear::cpu {

// One operand [rows, depth] of a product that sums over `depth`, in blocks of 128 of it: block b of
// row r is dense at q + r * row_stride + b * block_stride, and is multiplied by
// scale[r / scale_rows * scale_row_stride + b * scale_block_stride].
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

// out [M, N] = a [M, depth] @ b [N, depth].T + bias. bias: a row of out's dtype, or null.
struct ScaledProduct {
  ScaledOperand a, b;
  int64_t depth;
  Matrix out;
  const void* bias = nullptr;
};

// Products are summed in float32 and rounded once, with what out held before where `add` is set.
void multiply(const std::vector<ScaledProduct>& products, bool add = false);

}  // namespace grouped_linear::cpu
