// SPDX-License-Identifier: Apache-2.0
#include "cpu/byte_tile.h"

#include <algorithm>

#include "cpu/prefetch.h"
#include "cpu/tile_avx512.h"
#include "cpu/transpose.h"

namespace grouped_linear::cpu {
namespace {

constexpr int64_t kSide = 16;
using Vector [[gnu::vector_size(kSide)]] = uint8_t;

GROUPED_LINEAR_INLINE void transpose_bytes(const uint8_t* rows, int64_t row_stride, uint8_t* cols,
                                           int64_t col_stride) {
  Vector a[kSide];
  for (int i = 0; i < kSide; ++i) std::memcpy(&a[i], rows + i * row_stride, kSide);
  transpose_16x16(a);
  for (int i = 0; i < kSide; ++i) std::memcpy(cols + i * col_stride, &a[i], kSide);
}

// Writes whole cache lines: each store to a line outside the L1 cache would wait for that line.
GROUPED_LINEAR_EVERY_WIDTH void transpose_tile(const uint8_t (&bytes)[kBlock][kBlock], ByteRows q_t,
                                               int64_t rows, int64_t cols) {
  for (int64_t c = 0; c < cols; c += kSide) {
    if (!q_t.streamed && c + kSide < cols)
      for (int64_t i = 0; i < kSide; ++i) prefetch_row<true>(q_t[c + kSide + i], rows);
    for (int64_t r = 0; r < rows; r += kCacheLine) {
      alignas(kCacheLine) uint8_t lines[kSide][kCacheLine];
      const int64_t bytes_left = std::min(kCacheLine, rows - r);
      for (int64_t i = 0; i < bytes_left; i += kSide)
        transpose_bytes(&bytes[r + i][c], kBlock, &lines[0][i], kCacheLine);
      if (bytes_left < kCacheLine)
        for (int64_t i = 0; i < kSide; ++i) std::memcpy(q_t[c + i] + r, lines[i], bytes_left);
      else if (q_t.streamed)
        for (int64_t i = 0; i < kSide; ++i) stream_copy(lines[i], q_t[c + i] + r, kCacheLine);
      else
        for (int64_t i = 0; i < kSide; ++i) std::memcpy(q_t[c + i] + r, lines[i], kCacheLine);
    }
  }
}

GROUPED_LINEAR_EVERY_WIDTH void store_rows(const uint8_t (&bytes)[kBlock][kBlock], ByteRows q,
                                           int64_t rows, int64_t cols) {
  for (int64_t r = 0; r < rows; ++r) store_row_bytes(bytes[r], q, r, cols);
}

}  // namespace

void ByteTile::store(ByteRows q, int64_t rows, int64_t cols) const {
  store_rows(bytes, q, rows, cols);
}

void ByteTile::store_transposed(ByteRows q_t, int64_t filled, int64_t rows, int64_t cols) const {
  if (store_transposed_avx512(*this, q_t, filled, rows, cols)) return;
  transpose_tile(bytes, q_t, filled, cols);
  if (filled < rows)
    for (int64_t c = 0; c < cols; ++c) std::memset(q_t[c] + filled, 0, rows - filled);
}

}  // namespace grouped_linear::cpu
