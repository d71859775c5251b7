// Rows of SwiGLU, in the dtype of its operands: float32 inside, rounded once.
#pragma once

#include "rows.h"

namespace grouped_linear::cpu {

// h[i] = silu(gate[i]) * up[i] for n elements.
void swiglu_row(const void* gate, const void* up, ScalarType dtype, int64_t n, void* h);

// Columns [col, col + n) of a row of d_gate_up [2 * K].
void swiglu_grad_row(const char* dh, const char* gate_up, ScalarType dtype, int64_t K, int64_t col,
                     int64_t n, char* d_gate_up);

}  // namespace grouped_linear::cpu
