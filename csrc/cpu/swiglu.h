// SwiGLU of rows: computed in float32 and rounded once to the operands' dtype.
#pragma once

#include "cpu/rows.h"
#include "swiglu_math.h"

namespace grouped_linear::cpu {

// Columns [col, col + n) of h [K], from a row of gate_up [2 * K].
void swiglu_row(const SwigluForm& form, const char* gate_up, ScalarType dtype, int64_t K,
                int64_t col, int64_t n, char* h);

// Columns [col, col + n) of a row of d_gate_up [2 * K]; col and n are even.
void swiglu_grad_row(const SwigluForm& form, const char* dh, const char* gate_up, ScalarType dtype,
                     int64_t K, int64_t col, int64_t n, char* d_gate_up);

}  // namespace grouped_linear::cpu
