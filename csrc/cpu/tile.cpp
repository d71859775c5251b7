// SPDX-License-Identifier: Apache-2.0
#include "cpu/tile.h"

#include <algorithm>
#include <bit>
#include <cstring>

#include "cpu/fp8.h"

namespace grouped_linear::cpu {
namespace {

constexpr int64_t kVectorBytes = 64;

// largest[i] = the maximum of numbers[i * lanes, (i + 1) * lanes). Each step halves all rows in one
// loop. A loop for each row would be a chain of shuffles and twice as slow.
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

// The largest magnitudes of parts of rows and of columns, as floats. Returns whether all are
// finite. One pass: column maxima stay in registers, row maxima are reduced at the end.
template <typename Element, int64_t part, bool finite_only>
GROUPED_LINEAR_INLINE bool amax_pass(TileRows tile, int64_t filled, float* row_amax,
                                     float* col_amax) {
  using Magnitude = typename Element::Magnitude;
  using Vector [[gnu::vector_size(kVectorBytes)]] = Magnitude;
  constexpr int64_t kLanes = kVectorBytes / sizeof(Magnitude), kVectors = kBlock / kLanes;
  constexpr int64_t kParts = kBlock / part;
  alignas(kVectorBytes) Magnitude lanes[kBlock * kParts][kLanes];  // lane maxima of a row's part
  alignas(kVectorBytes) Magnitude rows[kBlock * kParts] = {}, cols[kParts][kBlock];
  for (int64_t p = 0; p < kParts; ++p) {
    Vector col_max[kVectors] = {};
    for (int64_t r = p * part; r < std::min(filled, (p + 1) * part); ++r)
      for (int64_t q = 0; q < kParts; ++q) {
        Vector row_max = {};
        for (int64_t i = q * kVectors / kParts; i < (q + 1) * kVectors / kParts; ++i) {
          Vector x;
          std::memcpy(&x, tile.row<Element>(r) + i * kLanes, kVectorBytes);
          x &= Element::kMask;
          if (finite_only) x = x < Element::kNotFinite ? x : Magnitude{0};
          row_max = x > row_max ? x : row_max;
          col_max[i] = x > col_max[i] ? x : col_max[i];
        }
        std::memcpy(lanes[r * kParts + q], &row_max, kVectorBytes);
      }
    std::memcpy(cols[p], col_max, sizeof(col_max));
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

// A non-finite element wins every maximum, so a finite maximum shows that the tile has none, and
// one pass suffices.
template <typename Element, int64_t part>
GROUPED_LINEAR_INLINE bool amax_of_parts(TileRows tile, int64_t filled, float* row_amax,
                                         float* col_amax) {
  if (amax_pass<Element, part, false>(tile, filled, row_amax, col_amax)) return true;
  amax_pass<Element, part, true>(tile, filled, row_amax, col_amax);
  return false;
}

template <typename Element>
GROUPED_LINEAR_INLINE bool amax_of_parts(TileRows tile, int64_t filled, int64_t part,
                                         float* row_amax, float* col_amax) {
  return part == kBlock ? amax_of_parts<Element, kBlock>(tile, filled, row_amax, col_amax)
                        : amax_of_parts<Element, kMxBlock>(tile, filled, row_amax, col_amax);
}

GROUPED_LINEAR_EVERY_WIDTH bool amax_of_tile(TileRows tile, bool bf16, int64_t filled, int64_t part,
                                             float* row_amax, float* col_amax) {
  return bf16 ? amax_of_parts<Bf16>(tile, filled, part, row_amax, col_amax)
              : amax_of_parts<Float>(tile, filled, part, row_amax, col_amax);
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
GROUPED_LINEAR_INLINE void sum_cols(TileRows tile, int64_t rows, float* sums) {
  float all[kBlock] = {};
  for (int64_t r = 0; r < rows; r += 8) {
    float eight[kBlock] = {};
    for (int64_t i = 0; i < 8; ++i)
      for (int64_t c = 0; c < kBlock; ++c)
        eight[c] += Element::to_float(tile.row<Element>(r + i)[c]);
    for (int64_t c = 0; c < kBlock; ++c) all[c] += eight[c];
  }
  std::memcpy(sums, all, sizeof(all));
}

GROUPED_LINEAR_EVERY_WIDTH void sum_cols(TileRows tile, bool bf16, int64_t rows, float* sums) {
  bf16 ? sum_cols<Bf16>(tile, rows, sums) : sum_cols<Float>(tile, rows, sums);
}

// The cap keeps 1 / factor a normal number. Selects in place of branches let the loop over blocks
// vectorise.
inline BlockScale scale_of(float amax, ScaleRule rule, float fp8_max) {
  amax = std::max(amax, rule.amax_epsilon);
  float factor = std::min(fp8_max / amax, 0x1p126f);
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

}  // namespace

float finite_amax(const void* row, ScalarType dtype, int64_t n) { return amax_of(row, dtype, n); }

BlockScale block_scale(float amax, ScaleRule rule, float fp8_max) {
  return scale_of(amax, rule, fp8_max);
}

void block_scales(const float amax[kBlock], ScaleRule rule, float factor[kBlock],
                  float scale[kBlock]) {
  scales_of(amax, rule, factor, scale);
}

void Tile::find_amax(float* row_amax, float* col_amax, int64_t part) {
  tile_.finite = amax_of_tile(tile_.at, tile_.bf16, filled(), part, row_amax, col_amax);
}

void Tile::col_sums(float* sums) const {
  float all[kBlock];
  sum_cols(tile_.at, tile_.bf16, tile_.rows, all);
  std::memcpy(sums, all, cols_ * sizeof(float));
}

void Tile::quantize(const float* row_factor, ByteRows q, const float* col_factor, ByteTile* codes,
                    int64_t part) const {
  encode_e4m3(tile_, {q.first ? row_factor : nullptr, col_factor, part, q, cols_, codes}, prefetch);
  prefetch.rows_from(tile_.rows);
  if (codes) zero_past_rows(*codes);
}

void Tile::quantize(float factor, ScalarType format, ByteTile& codes) const {
  encode_with_one_factor(tile_, factor, format, codes, prefetch);
  prefetch.rows_from(tile_.rows);
  zero_past_rows(codes);
}

void Tile::round(bool rowwise, const float* factor, const float* scale, ByteRows out) const {
  round_to_e4m3(tile_, rowwise, cols_, factor, scale, out, prefetch);
}

void Tile::zero_past_rows(ByteTile& codes) const {
  std::memset(codes.bytes[tile_.rows], 0, (filled() - tile_.rows) * kBlock);
}

}  // namespace grouped_linear::cpu
