#include "cpu/tile.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <type_traits>

#include "cpu/fp8.h"
#include "cpu/tile_avx512.h"

namespace grouped_linear::cpu {
namespace {

constexpr int64_t kSide = 16, kLine = 64;

template <typename Element>
struct Values {
  const typename Element::Bits* first;
  int64_t stride;

  const typename Element::Bits* operator[](int64_t r) const { return first + r * stride; }
};

template <typename Element>
Values<Element> as(TileRows rows) {
  using Bits = typename Element::Bits;
  const int64_t size = sizeof(Bits);
  return {static_cast<const Bits*>(rows.first), rows.stride / size};
}

// largest[i] = the largest of numbers[i * lanes .. ]. Halved pair by pair, all rows in one loop: a loop
// a row is a chain of shuffles, twice as slow.
template <int64_t lanes, typename Magnitude>
GROUPED_LINEAR_INLINE void largest_of_lanes(const Magnitude* numbers, int64_t n,
                                            Magnitude* largest) {
  if constexpr (lanes == 2) {
    for (int64_t i = 0; i < n; ++i) largest[i] = std::max(numbers[2 * i], numbers[2 * i + 1]);
  } else {
    Magnitude half[kBlock * kBlock / kMxBlock * lanes / 2];
    largest_of_lanes<2>(numbers, n * lanes / 2, half);
    largest_of_lanes<lanes / 2>(half, n, largest);
  }
}

// The largest magnitudes of parts of rows and of columns, as floats; true where they are finite. One pass:
// maxima of columns stay in registers, those of rows are reduced at the end.
template <typename Element, int64_t part, bool finite_only>
GROUPED_LINEAR_INLINE bool amax_of_tile(Values<Element> values, int64_t filled, float* row_amax,
                                        float* col_amax) {
  using Magnitude = typename Element::Magnitude;
  using Line [[gnu::vector_size(kLine)]] = Magnitude;
  constexpr int64_t kLanes = kLine / sizeof(Magnitude), kLines = kBlock / kLanes;
  constexpr int64_t kParts = kBlock / part;
  alignas(kLine)
      Magnitude lanes[kBlock * kParts][kLanes];  // of every kLanes-th element of a row's part
  alignas(kLine) Magnitude rows[kBlock * kParts] = {}, cols[kParts][kBlock];
  for (int64_t p = 0; p < kParts; ++p) {
    Line of_cols[kLines] = {};
    for (int64_t r = p * part; r < std::min(filled, (p + 1) * part); ++r)
      for (int64_t q = 0; q < kParts; ++q) {
        Line of_row = {};
        for (int64_t i = q * kLines / kParts; i < (q + 1) * kLines / kParts; ++i) {
          Line x;
          std::memcpy(&x, values[r] + i * kLanes, kLine);
          x &= Element::kMask;
          if (finite_only) x = x < Element::kNotFinite ? x : Magnitude{0};
          of_row = x > of_row ? x : of_row;
          of_cols[i] = x > of_cols[i] ? x : of_cols[i];
        }
        std::memcpy(lanes[r * kParts + q], &of_row, kLine);
      }
    std::memcpy(cols[p], of_cols, sizeof(of_cols));
  }
  largest_of_lanes<kLanes>(&lanes[0][0], filled * kParts, rows);
  Magnitude largest = 0;
  for (int64_t r = 0; r < filled * kParts; ++r) largest = std::max(largest, rows[r]);
  for (int64_t i = 0; i < kBlock * kParts; ++i) {
    row_amax[i] = Element::to_float(std::bit_cast<typename Element::Bits>(rows[i]));
    col_amax[i] =
        Element::to_float(std::bit_cast<typename Element::Bits>(cols[i / kBlock][i % kBlock]));
  }
  return largest < Element::kNotFinite;
}

// What is not finite passes every maximum, so a tile without any finds that out in the first pass.
template <typename Element, int64_t part>
GROUPED_LINEAR_INLINE bool find_amax_of_tile(Values<Element> values, int64_t filled,
                                             float* row_amax, float* col_amax) {
  if (amax_of_tile<Element, part, false>(values, filled, row_amax, col_amax)) return true;
  amax_of_tile<Element, part, true>(values, filled, row_amax, col_amax);
  return false;
}

template <typename Element>
GROUPED_LINEAR_INLINE bool find_amax_of_tile(Values<Element> values, int64_t filled, int64_t part,
                                             float* row_amax, float* col_amax) {
  return part == kBlock ? find_amax_of_tile<Element, kBlock>(values, filled, row_amax, col_amax)
                        : find_amax_of_tile<Element, kMxBlock>(values, filled, row_amax, col_amax);
}

GROUPED_LINEAR_EVERY_WIDTH bool find_amax_of(TileRows values, bool bf16, int64_t filled,
                                             int64_t part, float* row_amax, float* col_amax) {
  return bf16 ? find_amax_of_tile<Bf16>(as<Bf16>(values), filled, part, row_amax, col_amax)
              : find_amax_of_tile<Float>(as<Float>(values), filled, part, row_amax, col_amax);
}

template <typename Element, bool finite_only>
inline typename Element::Magnitude magnitude(typename Element::Bits value) {
  using Magnitude = typename Element::Magnitude;
  const auto bits = static_cast<Magnitude>(std::bit_cast<Magnitude>(value) & Element::kMask);
  return !finite_only || bits < Element::kNotFinite ? bits : Magnitude{0};
}

// The largest of n magnitudes.
template <typename Element, bool finite_only>
GROUPED_LINEAR_INLINE typename Element::Magnitude amax_of_row(const typename Element::Bits* row,
                                                              int64_t n) {
  typename Element::Magnitude amax = 0;
  for (int64_t i = 0; i < n; ++i) amax = std::max(amax, magnitude<Element, finite_only>(row[i]));
  return amax;
}

template <typename Element>
GROUPED_LINEAR_INLINE float finite_amax_of_row(const void* row, int64_t n) {
  using Bits = typename Element::Bits;
  const auto* values = static_cast<const Bits*>(row);
  auto amax = amax_of_row<Element, false>(values, n);
  if (amax >= Element::kNotFinite) amax = amax_of_row<Element, true>(values, n);
  return Element::to_float(std::bit_cast<Bits>(amax));
}

GROUPED_LINEAR_EVERY_WIDTH float amax_of(const void* row, ScalarType dtype, int64_t n) {
  return dtype == ScalarType::BFloat16 ? finite_amax_of_row<Bf16>(row, n)
         : dtype == ScalarType::Half   ? finite_amax_of_row<Half>(row, n)
                                       : finite_amax_of_row<Float>(row, n);
}

template <typename Element>
GROUPED_LINEAR_INLINE void sum_cols_of_tile(Values<Element> values, int64_t rows, float* sums) {
  float all[kBlock] = {};
  for (int64_t r = 0; r < rows; r += 8) {
    float eight[kBlock] = {};
    for (int64_t i = 0; i < 8; ++i)
      for (int64_t c = 0; c < kBlock; ++c) eight[c] += Element::to_float(values[r + i][c]);
    for (int64_t c = 0; c < kBlock; ++c) all[c] += eight[c];
  }
  std::memcpy(sums, all, sizeof(all));
}

GROUPED_LINEAR_EVERY_WIDTH void sum_cols(TileRows values, bool bf16, int64_t rows, float* sums) {
  bf16 ? sum_cols_of_tile<Bf16>(as<Bf16>(values), rows, sums)
       : sum_cols_of_tile<Float>(as<Float>(values), rows, sums);
}

// by_rows: a factor for each part of each row, [128][128 / part]; else [128 / part][128].
template <typename Element, typename Format, bool by_rows, int64_t part, bool finite>
GROUPED_LINEAR_INLINE void quantize_tile(Values<Element> values, int64_t rows, const float* factor,
                                         const Ahead& ahead, ByteTile& q) {
  for (int64_t r = 0; r < rows; ++r) {
    ahead.ask(r);
    uint32_t codes[kBlock];  // narrowed in a loop of its own: one narrowing, not one an operand
    for (int64_t begin = 0; begin < kBlock; begin += part) {
      const float* f =
          by_rows ? factor + (r * kBlock + begin) / part : factor + r / part * kBlock + begin;
      for (int64_t i = 0; i < part; ++i) {
        const float x = Element::to_float(values[r][begin + i]), own = f[by_rows ? 0 : i];
        codes[begin + i] = finite ? Rounded<Format>(x * own).code() : quantize<Format>(x, own);
      }
    }
    for (int64_t c = 0; c < kBlock; ++c) q.bytes[r][c] = static_cast<uint8_t>(codes[c]);
  }
}

enum class Factors { kRows, kPartsOfRows, kCols, kPartsOfCols };

template <typename Element, typename Format, bool finite>
GROUPED_LINEAR_INLINE void quantize_tile(Values<Element> values, int64_t rows, Factors factors,
                                         const float* factor, const Ahead& ahead, ByteTile& q) {
  switch (factors) {
    case Factors::kRows:
      return quantize_tile<Element, Format, true, kBlock, finite>(values, rows, factor, ahead, q);
    case Factors::kPartsOfRows:
      return quantize_tile<Element, Format, true, kMxBlock, finite>(values, rows, factor, ahead, q);
    case Factors::kCols:
      return quantize_tile<Element, Format, false, kBlock, finite>(values, rows, factor, ahead, q);
    case Factors::kPartsOfCols:
      return quantize_tile<Element, Format, false, kMxBlock, finite>(values, rows, factor, ahead,
                                                                     q);
  }
}

template <typename Element, typename Format>
GROUPED_LINEAR_INLINE void quantize_tile(TileRows values, int64_t rows, Factors factors,
                                         bool finite, const float* factor, const Ahead& ahead,
                                         ByteTile& q) {
  finite
      ? quantize_tile<Element, Format, true>(as<Element>(values), rows, factors, factor, ahead, q)
      : quantize_tile<Element, Format, false>(as<Element>(values), rows, factors, factor, ahead, q);
}

GROUPED_LINEAR_EVERY_WIDTH void quantize_to_e4m3(TileRows values, bool bf16, int64_t rows,
                                                 Factors factors, bool finite, const float* factor,
                                                 const Ahead& ahead, ByteTile& q) {
  bf16 ? quantize_tile<Bf16, E4m3>(values, rows, factors, finite, factor, ahead, q)
       : quantize_tile<Float, E4m3>(values, rows, factors, finite, factor, ahead, q);
}

GROUPED_LINEAR_EVERY_WIDTH void quantize_to_e5m2(TileRows values, bool bf16, int64_t rows,
                                                 Factors factors, bool finite, const float* factor,
                                                 const Ahead& ahead, ByteTile& q) {
  bf16 ? quantize_tile<Bf16, E5m2>(values, rows, factors, finite, factor, ahead, q)
       : quantize_tile<Float, E5m2>(values, rows, factors, finite, factor, ahead, q);
}

// At most kBlock bytes; of all of them a compiler makes two moves.
GROUPED_LINEAR_INLINE void store_bytes(const uint8_t* from, ByteRows to, int64_t r, int64_t n) {
  if (to.streamed) return stream_lines(from, to[r], n);
  n == kBlock ? std::memcpy(to[r], from, kBlock) : std::memcpy(to[r], from, n);
}

// The smallest anchors of factors that are powers of two; false if any is not, or is too large or
// too small for that.
GROUPED_LINEAR_EVERY_WIDTH bool anchors_of(const float* factor, int64_t n, uint32_t* smallest) {
  using To = Rounding<E4m3>;
  constexpr uint32_t kLeast = std::bit_cast<uint32_t>(To::kSmallestFactor);
  constexpr uint32_t kMost = std::bit_cast<uint32_t>(To::kLargestFactor);
  uint32_t others = 0;
  for (int64_t i = 0; i < n; ++i) {
    const uint32_t bits = std::bit_cast<uint32_t>(factor[i]);
    others |= (bits & ~kInfinity) | (bits < kLeast) | (bits > kMost);
    smallest[i] = To::smallest_anchor(factor[i]);
  }
  return others == 0;
}

// What becomes of finite elements: where their bytes go, and the smallest anchors of their factors,
// where columns may share those of rows.
struct Encoding {
  const uint32_t *row_anchor, *col_anchor;
  ByteRows q;  // of `cols` bytes
  int64_t cols;
  ByteTile* by_cols;
};

// Two neighbours of a row. A word of two bf16 numbers is taken apart in two operations.
static_assert(std::endian::native == std::endian::little);
inline void load_pair(const uint16_t* from, float (&pair)[2]) {
  uint32_t both;
  std::memcpy(&both, from, sizeof(both));
  pair[0] = std::bit_cast<float>(both << 16);
  pair[1] = std::bit_cast<float>(both & 0xffff0000);
}
inline void load_pair(const float* from, float (&pair)[2]) {
  uint64_t both;
  std::memcpy(&both, from, sizeof(both));
  pair[0] = std::bit_cast<float>(static_cast<uint32_t>(both));
  pair[1] = std::bit_cast<float>(static_cast<uint32_t>(both >> 32));
}

// The codes of neighbours, put together while they are words, so that half as many are narrowed.
inline uint32_t codes_of(const float (&pair)[2], uint32_t even_anchor, uint32_t odd_anchor) {
  const uint32_t even = std::bit_cast<uint32_t>(pair[0]), odd = std::bit_cast<uint32_t>(pair[1]);
  const uint32_t low = Rounding<E4m3>(std::fabs(pair[0]), even_anchor).bits() - even_anchor;
  const uint32_t high = Rounding<E4m3>(std::fabs(pair[1]), odd_anchor).bits() - odd_anchor;
  const uint32_t signs = (even >> 24 & 0x80) | (odd >> 16 & 0x8000);
  return (low & 0xff) | high << 8 | signs;
}

template <typename Element, int64_t part, bool rows_too, bool cols_too>
GROUPED_LINEAR_INLINE void encode_tile(Values<Element> values, int64_t rows, const Encoding& to,
                                       const Ahead& ahead) {
  constexpr int64_t kParts = kBlock / part, kPairs = kBlock / 2;
  uint32_t of_even[kParts * kPairs], of_odd[kParts * kPairs];
  for (int64_t i = 0; cols_too && i < kParts * kPairs; ++i)
    of_even[i] = to.col_anchor[2 * i], of_odd[i] = to.col_anchor[2 * i + 1];

  for (int64_t r = 0; r < rows; ++r) {
    ahead.ask(r);
    uint32_t of_parts[kPairs];
    uint16_t row_codes[kPairs], col_codes[kPairs];
    for (int64_t p = 0; rows_too && part < kBlock && p < kParts; ++p)
      std::fill_n(of_parts + p * part / 2, part / 2, to.row_anchor[r * kParts + p]);
    const uint32_t* of_row = part < kBlock ? of_parts : to.row_anchor + r;
    const int64_t first = r / part * kPairs;
    for (int64_t i = 0; i < kPairs; ++i) {
      float pair[2];
      load_pair(&values[r][2 * i], pair);
      const uint32_t own = rows_too ? of_row[part < kBlock ? i : 0] : 0;
      if (rows_too) row_codes[i] = static_cast<uint16_t>(codes_of(pair, own, own));
      if (cols_too)
        col_codes[i] = static_cast<uint16_t>(codes_of(pair, of_even[first + i], of_odd[first + i]));
    }
    if (rows_too) store_bytes(reinterpret_cast<const uint8_t*>(row_codes), to.q, r, to.cols);
    if (cols_too || to.by_cols)
      std::memcpy(to.by_cols->bytes[r], cols_too ? col_codes : row_codes, kBlock);
  }
}

template <typename Element, int64_t part>
GROUPED_LINEAR_INLINE void encode_tile(TileRows from, int64_t rows, const Encoding& to,
                                       const Ahead& ahead) {
  const auto values = as<Element>(from);
  if (to.q.first && to.col_anchor)
    encode_tile<Element, part, true, true>(values, rows, to, ahead);
  else if (to.q.first)
    encode_tile<Element, part, true, false>(values, rows, to, ahead);
  else
    encode_tile<Element, part, false, true>(values, rows, to, ahead);
}

GROUPED_LINEAR_EVERY_WIDTH void encode(TileRows values, bool bf16, int64_t rows, int64_t part,
                                       const Encoding& to, const Ahead& ahead) {
  if (part == kBlock)
    bf16 ? encode_tile<Bf16, kBlock>(values, rows, to, ahead)
         : encode_tile<Float, kBlock>(values, rows, to, ahead);
  else
    bf16 ? encode_tile<Bf16, kMxBlock>(values, rows, to, ahead)
         : encode_tile<Float, kMxBlock>(values, rows, to, ahead);
}

template <typename Element, bool by_rows, bool finite>
GROUPED_LINEAR_INLINE void round_tile(Values<Element> values, int64_t rows, int64_t cols,
                                      const float* factor, const float* scale, ByteRows out,
                                      const Ahead& ahead) {
  for (int64_t r = 0; r < rows; ++r) {
    ahead.ask(r);
    uint16_t row[kBlock];
    for (int64_t begin = 0; begin < kBlock; begin += kMxBlock) {
      const int64_t first =
          by_rows ? (r * kBlock + begin) / kMxBlock : r / kMxBlock * kBlock + begin;
      for (int64_t i = 0; i < kMxBlock; ++i) {
        const int64_t own = first + (by_rows ? 0 : i);
        const float x = Element::to_float(values[r][begin + i]);
        const float rounded = Rounded<E4m3>(x * factor[own]).value() * scale[own];
        const uint32_t bits = std::bit_cast<uint32_t>(rounded) >> 16;
        const bool is_nan = !finite && (std::bit_cast<uint32_t>(x) & kMagnitude) >= kInfinity;
        row[begin + i] = static_cast<uint16_t>(is_nan ? kBf16Nan : bits);
      }
    }
    const int64_t bytes = cols * sizeof(uint16_t);
    out.streamed ? stream_lines(row, out[r], bytes) : (void)std::memcpy(out[r], row, bytes);
  }
}

template <typename Element>
GROUPED_LINEAR_INLINE void round_tile(TileRows values, int64_t rows, int64_t cols, bool by_rows,
                                      bool finite, const float* factor, const float* scale,
                                      ByteRows out, const Ahead& ahead) {
  const auto own = as<Element>(values);
  if (by_rows)
    finite ? round_tile<Element, true, true>(own, rows, cols, factor, scale, out, ahead)
           : round_tile<Element, true, false>(own, rows, cols, factor, scale, out, ahead);
  else
    finite ? round_tile<Element, false, true>(own, rows, cols, factor, scale, out, ahead)
           : round_tile<Element, false, false>(own, rows, cols, factor, scale, out, ahead);
}

GROUPED_LINEAR_EVERY_WIDTH void round_to_e4m3(TileRows values, bool bf16, int64_t rows,
                                              int64_t cols, bool by_rows, bool finite,
                                              const float* factor, const float* scale, ByteRows out,
                                              const Ahead& ahead) {
  bf16 ? round_tile<Bf16>(values, rows, cols, by_rows, finite, factor, scale, out, ahead)
       : round_tile<Float>(values, rows, cols, by_rows, finite, factor, scale, out, ahead);
}

// The cap keeps 1 / factor a normal number. Selects, not branches: a loop over blocks vectorises.
inline BlockScale scale_of(float amax, ScaleRule rule, float largest) {
  amax = std::max(amax, rule.amax_epsilon);
  float factor = std::min(largest / amax, 0x1p126f);
  const uint32_t bits = std::bit_cast<uint32_t>(factor);
  factor = std::bit_cast<float>(rule.power_of_two ? bits & kInfinity : bits);
  factor = amax == 0 ? 1.0f : factor;
  return {factor, 1 / factor};
}

GROUPED_LINEAR_EVERY_WIDTH void scales_of(const float* amax, ScaleRule rule, float* factor,
                                          float* scale) {
  for (int64_t i = 0; i < kBlock; ++i) {
    const BlockScale block = scale_of(amax[i], rule, E4m3::kMax);
    factor[i] = block.factor;
    scale[i] = block.scale;
  }
}

using Vector [[gnu::vector_size(kSide)]] = uint8_t;

// Turns 16 x 16 bytes over.
GROUPED_LINEAR_INLINE void turn_bytes_over(const uint8_t* rows, int64_t row_stride, uint8_t* cols,
                                           int64_t col_stride) {
  Vector a[kSide];
  for (int i = 0; i < kSide; ++i) std::memcpy(&a[i], rows + i * row_stride, kSide);
  turn_over(a);
  for (int i = 0; i < kSide; ++i) std::memcpy(cols + i * col_stride, &a[i], kSide);
}

// Whole cache lines are written: a line not in the L1 cache is waited for by each store to it.
GROUPED_LINEAR_EVERY_WIDTH void turn_tile_over(const uint8_t (&bytes)[kBlock][kBlock], ByteRows q_t,
                                               int64_t rows, int64_t cols) {
  for (int64_t c = 0; c < cols; c += kSide) {
    if (!q_t.streamed && c + kSide < cols)
      for (int64_t i = 0; i < kSide; ++i) prefetch_row<true>(q_t[c + kSide + i], rows);
    for (int64_t r = 0; r < rows; r += kLine) {
      alignas(kLine) uint8_t turned[kSide][kLine];
      const int64_t own = std::min(kLine, rows - r);
      for (int64_t i = 0; i < own; i += kSide)
        turn_bytes_over(&bytes[r + i][c], kBlock, &turned[0][i], kLine);
      if (own < kLine)
        for (int64_t i = 0; i < kSide; ++i) std::memcpy(q_t[c + i] + r, turned[i], own);
      else if (q_t.streamed)
        for (int64_t i = 0; i < kSide; ++i) stream_lines(turned[i], q_t[c + i] + r, kLine);
      else
        for (int64_t i = 0; i < kSide; ++i) std::memcpy(q_t[c + i] + r, turned[i], kLine);
    }
  }
}

GROUPED_LINEAR_EVERY_WIDTH void store_rows(const uint8_t (&bytes)[kBlock][kBlock], ByteRows q,
                                           int64_t rows, int64_t cols) {
  for (int64_t r = 0; r < rows; ++r) store_bytes(bytes[r], q, r, cols);
}

}  // namespace

float finite_amax(const void* row, ScalarType dtype, int64_t n) { return amax_of(row, dtype, n); }

BlockScale block_scale(float amax, ScaleRule rule, float largest) {
  return scale_of(amax, rule, largest);
}

void block_scales(const float amax[kBlock], ScaleRule rule, float factor[kBlock],
                  float scale[kBlock]) {
  scales_of(amax, rule, factor, scale);
}

void ByteTile::store(ByteRows q, int64_t rows, int64_t cols) const {
  store_rows(bytes, q, rows, cols);
}

void ByteTile::store_turned(ByteRows q_t, int64_t filled, int64_t rows, int64_t cols) const {
  if (store_turned_avx512(*this, q_t, filled, rows, cols)) return;
  turn_tile_over(bytes, q_t, filled, cols);
  if (filled < rows)
    for (int64_t c = 0; c < cols; ++c) std::memset(q_t[c] + filled, 0, rows - filled);
}

void Tile::find_amax(float* row_amax, float* col_amax, int64_t part) {
  finite_ = find_amax_of(at_, bf16_, filled(), part, row_amax, col_amax);
}

void Tile::col_sums(float* sums) const {
  float all[kBlock];
  sum_cols(at_, bf16_, rows_, all);
  std::memcpy(sums, all, cols_ * sizeof(float));
}

bool Tile::shift_exponents(const float* row_factor, ByteRows q, const float* col_factor,
                           ByteTile* by_cols, int64_t part) const {
  if (bf16_ && encode_avx512(at_, rows_, part, row_factor, col_factor, q, cols_, by_cols, ahead))
    return true;
  const int64_t parts = kBlock * kBlock / part;
  uint32_t row_anchor[kBlock * kBlock / kMxBlock], col_anchor[kBlock * kBlock / kMxBlock];
  if (q.first && !anchors_of(row_factor, parts, row_anchor)) return false;
  if (col_factor && !anchors_of(col_factor, parts, col_anchor)) return false;
  const uint32_t* of_cols = col_factor ? col_anchor : nullptr;
  encode(at_, bf16_, rows_, part, {row_anchor, of_cols, q, cols_, by_cols}, ahead);
  return true;
}

void Tile::quantize(const float* row_factor, ByteRows q, const float* col_factor, ByteTile* by_cols,
                    int64_t part) const {
  if (!finite_ || !shift_exponents(row_factor, q, col_factor, by_cols, part)) {
    const bool whole = part == kBlock;
    ByteTile by_rows;
    if (q.first) {
      quantize_to_e4m3(at_, bf16_, rows_, whole ? Factors::kRows : Factors::kPartsOfRows, finite_,
                       row_factor, ahead, by_rows);
      by_rows.store(q, rows_, cols_);
    }
    if (col_factor)
      quantize_to_e4m3(at_, bf16_, rows_, whole ? Factors::kCols : Factors::kPartsOfCols, finite_,
                       col_factor, ahead, *by_cols);
    else if (by_cols)
      std::memcpy(by_cols->bytes, by_rows.bytes, rows_ * kBlock);
  }
  ahead.ask_from(rows_);
  if (by_cols) zero_past_rows(*by_cols);
}

void Tile::quantize(float factor, ScalarType format, ByteTile& q) const {
  float factors[kBlock];
  std::fill_n(factors, kBlock, factor);
  const auto quantize_to = format == E5m2::kType ? quantize_to_e5m2 : quantize_to_e4m3;
  quantize_to(at_, bf16_, rows_, Factors::kRows, finite_ && std::isfinite(factor), factors, ahead,
              q);
  ahead.ask_from(rows_);
  zero_past_rows(q);
}

void Tile::round(bool by_rows, const float* factor, const float* scale, ByteRows out) const {
  round_to_e4m3(at_, bf16_, rows_, cols_, by_rows, finite_, factor, scale, out, ahead);
}

void Tile::zero_past_rows(ByteTile& q) const {
  std::memset(q.bytes[rows_], 0, (filled() - rows_) * kBlock);
}

}  // namespace grouped_linear::cpu
