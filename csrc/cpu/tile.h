// A 128 x 128 tile, and what quantizers do with it.
//
// A tile is filled from memory once and then worked on where it is, in the L1 and L2 caches; every
// loop runs over a whole tile and vectorises.
#pragma once

#include <cstdint>
#include <cstring>

#ifdef __SSE2__
#include <emmintrin.h>
#endif

#include "cpu/rows.h"

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

// Bytes of a tile in memory: row r begins at first + r * stride. Streamed rows are whole cache lines that
// go to memory at once, not by way of the caches, which would read each of them first (AMD EPYC 9004, two
// cores, [4096, 2048] both layouts: as long as a copy, 1.3 times otherwise).
struct ByteRows {
  uint8_t* first;
  int64_t stride;
  bool streamed = false;

  uint8_t* operator[](int64_t r) const { return first + r * stride; }
};

// Stores whole cache lines, past the caches.
GROUPED_LINEAR_INLINE void stream_lines(const void* from, void* to, int64_t bytes) {
#ifdef __SSE2__
  const auto *in = static_cast<const __m128i*>(from), *end = in + bytes / sizeof(__m128i);
  for (auto* out = static_cast<__m128i*>(to); in < end; ++in, ++out)
    _mm_stream_si128(out, _mm_loadu_si128(in));
#else
  std::memcpy(to, from, bytes);
#endif
}
// What was streamed comes before all that is stored from here on.
inline void end_of_streams() {
#ifdef __SSE2__
  _mm_sfence();
#endif
}

// A quantized tile.
struct ByteTile {
  alignas(64) uint8_t bytes[kBlock][kBlock];

  // q[r][c] = bytes[r][c], for the first rows and columns.
  void store(ByteRows q, int64_t rows, int64_t cols) const;
  // q_t[c][r] = bytes[r][c], for the first rows and columns, multiples of 16; zero from row `filled` on.
  void store_turned(ByteRows q_t, int64_t filled, int64_t rows, int64_t cols) const;
};

// Asks for the cache lines of a row of a tile before they are needed, to read or to write them, in the L1
// or the L2 cache. The rows of a tile are far apart, so the hardware does not foresee them.
template <bool write = false, int level = 1>
GROUPED_LINEAR_INLINE void prefetch_row(const void* row, int64_t bytes) {
  for (int64_t i = 0; i < bytes; i += 64)
    __builtin_prefetch(static_cast<const char*>(row) + i, write, 4 - level);
}

// What the next tile will read and write, asked for while this one is quantized: a few lines with each
// row, because a core has only some twenty requests under way and waits with more (AMD EPYC 9005,
// [4096, 2048] both layouts, one core: 0.27 ns an element, 0.33 with a tile's lines at once). In the L2
// cache: rows a power of two apart share a few sets of the L1 cache, which forgets them before they are
// read (AMD EPYC 9004: 1.3 times the time). Nothing here takes a varying number of steps, which would cost
// half of that.
struct Ahead {
  static constexpr int64_t kReadBytes = kBlock * 2;
  int64_t n_reads = 0;
  bool wide = false;  // twice the bytes to read: float32
  const char* reads[kBlock];
  ByteRows writes[4];  // of kBlock bytes; streamed ones need no asking
  int64_t n_writes[4] = {};

  void foresee_writes(int i, ByteRows rows, int64_t n) {
    writes[i] = rows, n_writes[i] = rows.streamed ? 0 : n;
  }

  // With row r, which need not be one of this tile's.
  GROUPED_LINEAR_INLINE void ask(int64_t r) const {
    if (r < n_reads) prefetch_row<false, 2>(reads[r], kReadBytes);
    if (r < n_reads && wide) prefetch_row<false, 2>(reads[r] + kReadBytes, kReadBytes);
    for (int i = 0; i < 4; ++i)
      if (r < n_writes[i]) prefetch_row<true, 2>(writes[i][r], kBlock);
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
  // e4m3: by the factors of rows, stored with store(q) of ByteTile; by those of columns, as bytes, zero
  // in rows from the last to filled(). Without factors of columns the rows' bytes are theirs; q.first or
  // by_cols is null if not asked for. No product is past the largest number where
  // factors are powers of two between 2^-99 and 2^121.
  void quantize(const float* row_factor, ByteRows q, const float* col_factor, ByteTile* by_cols,
                int64_t part = kBlock) const;

  // The same with one factor, which may be anything, and to any format.
  void quantize(float factor, ScalarType format, ByteTile& q) const;

  // What e4m3 keeps of rows and columns that there are, in parts of kMxBlock with such factors and
  // their inverses: row r of out = e4m3(tile[r] * factor) * scale. Powers of two, for which that is a
  // bf16 number. What is not finite becomes NaN.
  void round(bool by_rows, const float* factor, const float* scale, ByteRows out) const;

 private:
  // quantize() of finite elements. False, and nothing done, unless all factors are powers of two.
  bool shift_exponents(const float* row_factor, ByteRows q, const float* col_factor,
                       ByteTile* by_cols, int64_t part) const;
  void zero_past_rows(ByteTile& q) const;

  bool bf16_, finite_ = false;
  int64_t rows_ = 0, cols_ = 0;
  TileRows at_{};
  alignas(64) char values_[kBlock * kBlock * sizeof(float)];
};

}  // namespace grouped_linear::cpu
