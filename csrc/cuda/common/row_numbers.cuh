// SPDX-License-Identifier: Apache-2.0
// Rows that an operand gathers from its source, by number.
#pragma once

#include <cstdint>

namespace grouped_linear::cuda {

// The numbers of gathered rows, int32 or int64, of a source of `rows` rows.
struct RowNumbers {
  const void* numbers;  // null: row i is row i of the source
  int rows;
  bool wide;  // the numbers are int64

  // The number in memory, not clamped. The first use of the value waits for the load.
  __device__ __forceinline__ int64_t raw(int i) const {
    if (wide) return static_cast<const int64_t*>(numbers)[i];
    return static_cast<const int32_t*>(numbers)[i];
  }
  // Clamped into the source, which must have a row.
  __device__ __forceinline__ int clamped(int64_t number) const {
    return static_cast<int>(min(max(number, int64_t{0}), int64_t{rows} - 1));
  }
  __device__ __forceinline__ int row(int i) const {
    return numbers == nullptr ? i : clamped(raw(i));
  }
};

}  // namespace grouped_linear::cuda
