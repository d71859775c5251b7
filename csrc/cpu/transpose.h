// SPDX-License-Identifier: Apache-2.0
// Transposes blocks of 16 x 16 elements in vector registers.
#pragma once

#include "cpu/rows.h"

namespace grouped_linear::cpu {

// Interleaves the elements of vectors 0 .. 7 with those of vectors 8 .. 15.
template <typename Vector>
GROUPED_LINEAR_INLINE void interleave(const Vector (&from)[16], Vector (&to)[16]) {
  for (int i = 0; i < 8; ++i) {
    const Vector a = from[i], b = from[i + 8];
    to[2 * i] =
        __builtin_shufflevector(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
    to[2 * i + 1] =
        __builtin_shufflevector(a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
  }
}

// Transposes 16 vectors of 16 elements. Interleaving four times gathers a column in one vector.
template <typename Vector>
GROUPED_LINEAR_INLINE void transpose_16x16(Vector (&rows)[16]) {
  Vector interleaved[16];
  interleave(rows, interleaved);
  interleave(interleaved, rows);
  interleave(rows, interleaved);
  interleave(interleaved, rows);
}

}  // namespace grouped_linear::cpu
