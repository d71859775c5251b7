// SPDX-License-Identifier: Apache-2.0
// SwiGLU of rows: computed in float32 and rounded once to the operands' dtype.
#pragma once

#include "cpu/rows.h"
#include "swiglu_math.h"

namespace grouped_linear::cpu {

// Columns [col, col + n) of h [K], from a row of gate_up [2 * K].
void swiglu_row(const SwigluForm& form, const char* gate_up, ScalarType dtype, int64_t K,
                int64_t col, int64_t n, char* h);

// The results of SwiGLU's backward in an expert layer: see swiglu_grad in csrc/library.cpp.
struct SwigluGrads {
  Tensor d_gate_up, h, d_weight;
};
SwigluGrads swiglu_grads(const char* op, const Tensor& dh, const Tensor& gate_up,
                         const Tensor& weight, const Tensor& offs, const SwigluForm& form);

}  // namespace grouped_linear::cpu
