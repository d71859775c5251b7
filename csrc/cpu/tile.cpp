#include "tile.h"

#include <bit>
#include <cstring>

#include "numerics.h"

namespace grouped_linear::cpu {
namespace {

// As bits, magnitudes of floats are ordered as integers; what is kInfinity or more is not finite.
inline uint32_t finite_magnitude(float value) {
  const uint32_t magnitude = std::bit_cast<uint32_t>(value) & kMagnitude;
  return magnitude < kInfinity ? magnitude : 0;
}

GROUPED_LINEAR_EVERY_WIDTH uint32_t amax_of_row(const float* row) {
  uint32_t amax = 0;
  for (int64_t c = 0; c < kBlock; ++c) amax = std::max(amax, finite_magnitude(row[c]));
  return amax;
}

GROUPED_LINEAR_EVERY_WIDTH void raise_amax(const float* row, uint32_t* amax) {
  for (int64_t c = 0; c < kBlock; ++c) amax[c] = std::max(amax[c], finite_magnitude(row[c]));
}

GROUPED_LINEAR_EVERY_WIDTH void add_row(const float* row, float* sums) {
  for (int64_t c = 0; c < kBlock; ++c) sums[c] += row[c];
}

GROUPED_LINEAR_EVERY_WIDTH void quantize_row(const float* row, float factor, uint8_t* q) {
  for (int64_t c = 0; c < kBlock; ++c) q[c] = to_e4m3(row[c] * factor);
}

GROUPED_LINEAR_EVERY_WIDTH void quantize_row_by_cols(const float* row, const float* factor,
                                                     uint8_t* q) {
  for (int64_t c = 0; c < kBlock; ++c) q[c] = to_e4m3(row[c] * factor[c]);
}

// Transposes 8 x 8 bytes held as eight words, by exchanging 1 x 1, 2 x 2 and 4 x 4 blocks.
inline void transpose_words(uint64_t w[8]) {
  constexpr uint64_t masks[3] = {0x00ff00ff00ff00ff, 0x0000ffff0000ffff, 0x00000000ffffffff};
  for (int step = 0; step < 3; ++step) {
    const int distance = 1 << step, shift = 8 << step;
    for (int i = 0; i < 8; ++i) {
      if (i & distance) continue;
      const uint64_t low = w[i], high = w[i + distance], mask = masks[step];
      w[i] = (low & mask) | ((high & mask) << shift);
      w[i + distance] = ((low >> shift) & mask) | (high & ~mask);
    }
  }
}

// Eight rows of bytes -> eight bytes of each of 128 columns.
GROUPED_LINEAR_EVERY_WIDTH void transpose_strip(const uint8_t q[8][kBlock], uint64_t* columns) {
  static_assert(std::endian::native == std::endian::little);
  for (int64_t c = 0; c < kBlock; c += 8) {
    uint64_t w[8];
    for (int r = 0; r < 8; ++r) std::memcpy(&w[r], &q[r][c], 8);
    transpose_words(w);
    for (int r = 0; r < 8; ++r) columns[c + r] = w[r];
  }
}

}  // namespace

BlockScale block_scale(uint32_t amax_bits, ScaleRule rule) {
  const float amax = std::max(std::bit_cast<float>(amax_bits), rule.amax_epsilon);
  if (amax == 0) return {1, 1};
  float factor = std::min(kE4m3Max / amax, 0x1p126f);  // the cap keeps 1 / factor a normal number
  if (rule.power_of_two) factor = std::bit_cast<float>(std::bit_cast<uint32_t>(factor) & kInfinity);
  return {factor, 1 / factor};
}

void Tile::load(const void* first, ScalarType dtype, int64_t stride, int64_t rows, int64_t cols) {
  rows_ = rows;
  cols_ = cols;
  const char* row = static_cast<const char*>(first);
  for (int64_t r = 0; r < rows; ++r, row += stride * element_size(dtype)) {
    load_row(row, dtype, cols, values_[r]);
    std::memset(values_[r] + cols, 0, (kBlock - cols) * sizeof(float));
  }
  std::memset(values_[rows], 0, (kBlock - rows) * sizeof(values_[0]));
}

void Tile::row_amax(uint32_t amax_bits[kBlock]) const {
  for (int64_t r = 0; r < rows_; ++r) amax_bits[r] = amax_of_row(values_[r]);
}

void Tile::col_amax(uint32_t amax_bits[kBlock]) const {
  std::memset(amax_bits, 0, kBlock * sizeof(uint32_t));
  for (int64_t r = 0; r < rows_; ++r) raise_amax(values_[r], amax_bits);
}

void Tile::col_sums(float* sums) const {
  float tile_sums[kBlock] = {};
  for (int64_t r = 0; r < rows_; ++r) add_row(values_[r], tile_sums);
  std::memcpy(sums, tile_sums, cols_ * sizeof(float));
}

void Tile::quantize_rows(const float row_factor[kBlock], uint8_t* q, int64_t stride) const {
  uint8_t row[kBlock];
  for (int64_t r = 0; r < rows_; ++r) {
    quantize_row(values_[r], row_factor[r], row);
    std::memcpy(q + r * stride, row, cols_);
  }
}

void Tile::quantize_cols(const float col_factor[kBlock], uint8_t* q_t, int64_t stride,
                         int64_t rows_written) const {
  uint8_t strip[8][kBlock];
  uint64_t columns[kBlock];
  for (int64_t r = 0; r < rows_written; r += 8) {
    for (int64_t i = 0; i < 8; ++i) quantize_row_by_cols(values_[r + i], col_factor, strip[i]);
    transpose_strip(strip, columns);
    const int64_t count = std::min<int64_t>(8, rows_written - r);
    for (int64_t c = 0; c < cols_; ++c) std::memcpy(q_t + c * stride + r, &columns[c], count);
  }
}

}  // namespace grouped_linear::cpu
