// A 128 x 128 tile, and what quantizers do with it.
//
// A tile is filled from memory once and then worked on where it is, in the L1 and L2 caches; every
// loop runs over a whole tile and vectorises.
#pragma once

#include <cstdint>
#include <cstring>

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

// amax = max(amax, epsilon); factor = largest / amax, at most 2^126, rounded down to a power of two on
// request; 1 where amax is 0. scale = 1 / factor. largest: of the FP8 format, e4m3 if not told.
BlockScale block_scale(float amax, ScaleRule rule, float largest = 448.0f);
void block_scales(const float amax[kBlock], ScaleRule rule, float factor[kBlock],
                  float scale[kBlock]);

// The largest finite magnitude of n elements.
float finite_amax(const void* row, ScalarType dtype, int64_t n);

// A quantized tile.
struct ByteTile {
  alignas(64) uint8_t bytes[kBlock][kBlock];

  // q[r * stride + c] = bytes[r][c], for the first rows and columns.
  void store(uint8_t* q, int64_t stride, int64_t rows, int64_t cols) const;
  // q_t[c * stride + r] = bytes[r][c], for the first rows and columns, multiples of 16; zero from
  // row `filled` on.
  void store_turned(uint8_t* q_t, int64_t stride, int64_t filled, int64_t rows, int64_t cols) const;
};

// Asks for the cache lines of a row of a tile before they are needed, to read or to write them. The
// rows of a tile are far apart, so the hardware does not foresee them.
template <bool write = false>
GROUPED_LINEAR_INLINE void prefetch_row(const void* row, int64_t bytes) {
  for (int64_t i = 0; i < bytes; i += 64)
    __builtin_prefetch(static_cast<const char*>(row) + i, write);
}

// What the next tile will read and write, asked for while this one is quantized: a few lines with each
// row, because a core has only some twenty requests under way and waits with more (AMD EPYC 9005,
// [4096, 2048] both layouts, one core: 0.27 ns an element, 0.33 with a tile's lines at once). Nothing
// here takes a varying number of steps, which would cost half of that.
struct Ahead {
  struct Rows {
    const char* first;
    int64_t stride, count = 0;
  };
  static constexpr int64_t kReadBytes = kBlock * 2;
  int64_t n_reads = 0;
  bool wide = false;  // twice the bytes to read: float32
  const char* reads[kBlock];
  Rows writes[4];  // of kBlock bytes

  // With row r, which need not be one of this tile's.
  GROUPED_LINEAR_INLINE void ask(int64_t r) const {
    if (r < n_reads) prefetch_row(reads[r], kReadBytes);
    if (r < n_reads && wide) prefetch_row(reads[r] + kReadBytes, kReadBytes);
    for (int i = 0; i < 4; ++i)
      if (r < writes[i].count) prefetch_row<true>(writes[i].first + r * writes[i].stride, kBlock);
  }
  void ask_from(int64_t r) const {
    for (; r < kBlock; ++r) ask(r);
  }
};

// Where a tile's elements are, and the bytes from a row to the next.
struct TileRows {
  const void* first;
  int64_t stride;
};

// Rows are worked on in sixteens: small groups leave most of a tile empty.
constexpr int64_t kRowStep = 16;

// Elements are bf16 where x's are, for half the bytes; float32 otherwise.
class Tile {
 public:
  explicit Tile(ScalarType dtype) : bf16_(dtype == ScalarType::BFloat16) {}

  // fill_row(r, row) writes the first `cols` elements of row r, for r < rows; the rest of
  // these rows, and of the last kRowStep of them, is zero.
  template <typename FillRow>
  void fill(int64_t rows, int64_t cols, const FillRow& fill_row) {
    const int64_t element = bf16_ ? 2 : 4, row_bytes = kBlock * element;
    rows_ = rows, cols_ = cols, at_ = {values_, row_bytes};
    for (int64_t r = 0; r < rows; ++r) {
      char* row = values_ + r * row_bytes;
      fill_row(r, row);
      if (cols < kBlock) std::memset(row + cols * element, 0, (kBlock - cols) * element);
    }
    std::memset(values_ + rows * row_bytes, 0, (filled() - rows) * row_bytes);
  }

  // The same of whole rows, a multiple of kRowStep, without a copy: they stay where they are.
  void look_at(TileRows at, int64_t rows) { rows_ = rows, cols_ = kBlock, at_ = at; }

  // Asked for by what quantizes and rounds.
  Ahead ahead;

  // Rows that there are, rounded up to kRowStep.
  int64_t filled() const { return round_up(rows_, kRowStep); }

  // The largest finite magnitudes of parts of so many elements: of every row, [128][128 / part],
  // and of every column, [128 / part][128]. part: kBlock or kMxBlock.
  void find_amax(float* row_amax, float* col_amax, int64_t part = kBlock);

  // After find_amax: whether all elements are finite.
  bool finite() const { return finite_; }

  // sums[c] = the tile's column c: rows added in eights, from the first to the last, then the
  // eights, the order of the CUDA kernel.
  void col_sums(float* sums) const;

  // After find_amax, with finite factors laid out as the amaxima they are made of, tile * factor in
  // e4m3: by the factors of rows, stored with store(q, stride) of ByteTile; by those of columns,
  // as bytes, zero in rows from the last to filled(). Without factors of columns the rows' bytes are
  // theirs; q or by_cols is null if not asked for. No product is past the largest number where
  // factors are powers of two between 2^-99 and 2^121.
  void quantize(const float* row_factor, uint8_t* q, int64_t stride, const float* col_factor,
                ByteTile* by_cols, int64_t part = kBlock) const;

  // The same with one factor, which may be anything, and to any format.
  void quantize(float factor, ScalarType format, ByteTile& q) const;

  // What e4m3 keeps of rows and columns that there are, in parts of kMxBlock with such factors and
  // their inverses: out[r * stride + c] = e4m3(tile[r][c] * factor) * scale. Powers of two, for which
  // that is a bf16 number. What is not finite becomes NaN.
  void round(bool by_rows, const float* factor, const float* scale, uint16_t* out,
             int64_t stride) const;

 private:
  // quantize() of finite elements. False, and nothing done, unless all factors are powers of two.
  bool shift_exponents(const float* row_factor, uint8_t* q, int64_t stride, const float* col_factor,
                       ByteTile* by_cols, int64_t part) const;
  void zero_past_rows(ByteTile& q) const;

  bool bf16_, finite_ = false;
  int64_t rows_ = 0, cols_ = 0;
  TileRows at_{};
  alignas(64) char values_[kBlock * kBlock * sizeof(float)];
};

}  // namespace grouped_linear::cpu
