// SPDX-License-Identifier: Apache-2.0
// A 128 x 128 tile, and what quantizers do with it.
//
// A tile is filled from memory once. Every later loop runs over the whole tile in the L1 and L2
// caches and vectorises.
#pragma once

#include <cstdint>
#include <cstring>

#include "cpu/encode_tile.h"

namespace grouped_linear::cpu {

struct ScaleRule {
  float amax_epsilon;
  bool power_of_two;
};

// q = x * factor, x ~ q * scale.
struct BlockScale {
  float factor, scale;
};

// amax = max(amax, epsilon); factor = fp8_max / amax, at most 2^126, rounded down to a power of two
// if the rule says so; 1 where amax is 0. scale = 1 / factor. fp8_max: of e4m3 by default.
BlockScale block_scale(float amax, ScaleRule rule, float fp8_max = 448.0f);
void block_scales(const float amax[kBlock], ScaleRule rule, float factor[kBlock],
                  float scale[kBlock]);

// The largest finite magnitude of n elements.
float finite_amax(const void* row, ScalarType dtype, int64_t n);

// Rows are processed in sixteens: small groups leave most of a tile empty.
constexpr int64_t kRowStep = 16;

// Elements are bf16 where those of x are, for half the bytes; float32 otherwise.
class Tile {
 public:
  explicit Tile(ScalarType dtype) { tile_.bf16 = dtype == ScalarType::BFloat16; }

  // fill_row(r, row) writes the first `cols` elements of row r, for r < rows. The rest of these
  // rows is zero, and so are further rows up to a multiple of kRowStep.
  template <typename FillRow>
  void fill(int64_t rows, int64_t cols, const FillRow& fill_row) {
    const int64_t element = tile_.bf16 ? 2 : 4, row_bytes = kBlock * element;
    cols_ = cols, tile_.rows = rows, tile_.at = {values_, row_bytes};
    for (int64_t r = 0; r < rows; ++r) {
      char* row = values_ + r * row_bytes;
      fill_row(r, row);
      if (cols < kBlock) std::memset(row + cols * element, 0, (kBlock - cols) * element);
    }
    std::memset(values_ + rows * row_bytes, 0, (filled() - rows) * row_bytes);
  }

  // A view of whole rows, a multiple of kRowStep of them, without a copy.
  void view(TileRows at, int64_t rows) { cols_ = kBlock, tile_.rows = rows, tile_.at = at; }

  // Prefetches while this tile is quantized or rounded.
  TilePrefetch prefetch;

  // The number of rows, rounded up to kRowStep.
  int64_t filled() const { return round_up(tile_.rows, kRowStep); }

  // The largest finite magnitude of each part of a row, [128][128 / part], and of each part of a
  // column, [128 / part][128]. part: kBlock or kMxBlock.
  void find_amax(float* row_amax, float* col_amax, int64_t part = kBlock);

  // After find_amax: whether all elements are finite.
  bool finite() const { return tile_.finite; }

  // sums[c] = the sum of column c. Rows are added in eights, from the first to the last, and then
  // the eights: the order of the CUDA kernel.
  void col_sums(float* sums) const;

  // After find_amax: tile * factor in e4m3, with finite factors laid out as their amaxes are. Codes
  // by row factors go to q. Codes by column factors go to `codes`, with zeros in rows up to
  // filled(). Without column factors, `codes` gets the row codes. q.first and codes are null if not
  // requested.
  void quantize(const float* row_factor, ByteRows q, const float* col_factor, ByteTile* codes,
                int64_t part = kBlock) const;

  // The same with one factor, which may be any float32, in any format.
  void quantize(float factor, ScalarType format, ByteTile& codes) const;

  // After find_amax in parts of kMxBlock: what e4m3 keeps of the tile, in bf16, see round_to_e4m3.
  void round(bool rowwise, const float* factor, const float* scale, ByteRows out) const;

 private:
  void zero_past_rows(ByteTile& codes) const;

  TileSource tile_;
  int64_t cols_ = 0;
  alignas(kCacheLine) char values_[kBlock * kBlock * sizeof(float)];
};

}  // namespace grouped_linear::cpu
