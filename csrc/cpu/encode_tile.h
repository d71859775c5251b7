// SPDX-License-Identifier: Apache-2.0
// The loops that turn a tile of bf16 or float32 into FP8, on every CPU. tile_avx512.h does the same
// faster for bf16 and e4m3 where the CPU has AVX-512 VBMI; the bytes are equal.
#pragma once

#include "cpu/byte_tile.h"
#include "cpu/prefetch.h"
#include "cpu/rows.h"

namespace grouped_linear::cpu {

// The rows of a tile in memory: their first element, and the bytes from one row to the next.
struct TileRows {
  const void* first = nullptr;
  int64_t stride = 0;

  template <typename Element>
  const typename Element::Bits* row(int64_t r) const {
    const char* bytes = static_cast<const char*>(first) + r * stride;
    return reinterpret_cast<const typename Element::Bits*>(bytes);
  }
};

// A tile to encode. Each row has 128 elements.
struct TileSource {
  TileRows at = {};
  bool bf16 = false;  // else float32
  int64_t rows = 0;
  bool finite = false;  // whether all elements are
};

// The encoding of a tile. Each part of a row or of a column, `part` elements, has its own factor.
// Column codes replace row codes in `codes`.
struct Encoding {
  const float* row_factor = nullptr;  // [128][128 / part], or null
  const float* col_factor = nullptr;  // [128 / part][128], or null
  int64_t part = kBlock;              // kBlock or kMxBlock
  ByteRows q{nullptr, 0};             // row codes, `cols` bytes a row, or null
  int64_t cols = kBlock;
  ByteTile* codes = nullptr;  // or null
};

// Factors are finite, and the amax that a factor was made of bounds its elements.
void encode_e4m3(const TileSource& tile, const Encoding& to, const TilePrefetch& prefetch);

// One factor for the tile, which may be any float32.
void encode_with_one_factor(const TileSource& tile, float factor, ScalarType format, ByteTile& q,
                            const TilePrefetch& prefetch);

// The e4m3 numbers of a tile, in parts of kMxBlock: row r of out = e4m3(tile[r] * factor) * scale,
// in bf16. Factors and scales are inverse powers of two, for which that is a bf16 number. An
// element that is not finite becomes NaN.
void round_to_e4m3(const TileSource& tile, bool rowwise, int64_t cols, const float* factor,
                   const float* scale, ByteRows out, const TilePrefetch& prefetch);

}  // namespace grouped_linear::cpu
