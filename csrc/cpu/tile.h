// A 128 x 128 tile in float32, and what block scaling does with it.
#pragma once

#include <cstdint>

#include "rows.h"

namespace grouped_linear::cpu {

struct ScaleRule {
  float amax_epsilon;
  bool power_of_two;
};

// What a block is multiplied by to quantize it, and by to dequantize it.
struct BlockScale {
  float factor, scale;
};

// amax_bits: the block's largest finite magnitude, as the bits of a float32.
//   amax = max(amax, epsilon); factor = 448 / amax, at most 2^126, rounded down to a power of two
//   on request; 1 where amax is 0. scale = 1 / factor.
BlockScale block_scale(uint32_t amax_bits, ScaleRule rule);

class Tile {
 public:
  // rows x cols elements, `stride` elements between rows; the rest of the tile is zero.
  void load(const void* first, ScalarType dtype, int64_t stride, int64_t rows, int64_t cols);

  // The largest finite magnitude of every row and of every column, as bits.
  void row_amax(uint32_t amax_bits[kBlock]) const;
  void col_amax(uint32_t amax_bits[kBlock]) const;

  // sums[c] = the tile's column c, added from the first row to the last.
  void col_sums(float* sums) const;

  // q[r * stride + c] = e4m3(tile[r][c] * row_factor[r])
  void quantize_rows(const float row_factor[kBlock], uint8_t* q, int64_t stride) const;
  // q_t[c * stride + r] = e4m3(tile[r][c] * col_factor[c]), `rows_written` elements a column.
  void quantize_cols(const float col_factor[kBlock], uint8_t* q_t, int64_t stride,
                     int64_t rows_written) const;

 private:
  int64_t rows_ = 0, cols_ = 0;
  alignas(64) float values_[kBlock][kBlock];
};

}  // namespace grouped_linear::cpu
