// SPDX-License-Identifier: Apache-2.0
// What TMA is told about the operands, the scales and the output.
#pragma once

#include <cuda.h>

#include <cstdint>

namespace grouped_linear::cuda::sm90 {

struct TensorMaps {
  CUtensorMap a, b, scale_a, scale_b, out;
  CUtensorMap narrow_b;  // M-grouped: b in boxes of kNarrowTileN rows
};

// Coordinates in a tensor map of rows that ends at any row the kernel names: groups end anywhere.
//
// The map's dimensions are columns, 2^30 rows, rows again, and one whose stride is 2^34 bytes less
// a row's. The coordinate 2^30 of the last one moves an address by 2^64, which is nothing, and 2^30
// rows back. Row r of the rows before `end` is then at (2^30 - (end - r), end, 2^30). From `end`
// on, rows lie outside the map: they are not stored, and are loaded as zeros. Triton arranges its
// "ragged" tensor maps like this.
//
// end - r must be at most 2^30. The host refuses what could have a larger group (launch.h).
struct RaggedRows {
  static constexpr int kOrigin = 1 << 30;
  int c1, c2;
  __device__ RaggedRows(int row, int end) : c1(kOrigin - (end - row)), c2(end) {}
};

}  // namespace grouped_linear::cuda::sm90
