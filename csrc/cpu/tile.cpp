#include "tile.h"

#include <algorithm>
#include <bit>
#include <cstring>

#include "numerics.h"

#define ALWAYS_INLINE inline __attribute__((always_inline))  // into every width

namespace grouped_linear::cpu {
namespace {

// One element of a tile: how it becomes a float32, and how its magnitude is ordered as an integer.
// Signed, because narrow vector instructions compare signed integers alone.
struct Bf16 {
  using Bits = uint16_t;
  using Magnitude = int16_t;
  static constexpr Magnitude kMask = 0x7fff, kNotFinite = 0x7f80;
  static float to_float(Bits bits) { return from_bf16(bits); }
};
struct Float {
  using Bits = float;
  using Magnitude = int32_t;
  static constexpr Magnitude kMask = kMagnitude, kNotFinite = kInfinity;
  static float to_float(Bits value) { return value; }
};

template <typename Element>
using Values = const typename Element::Bits (&)[kBlock][kBlock];

template <typename Element>
Values<Element> as(const void* values) {
  return *static_cast<const typename Element::Bits(*)[kBlock][kBlock]>(values);
}

template <typename Element, bool finite_only>
inline typename Element::Magnitude magnitude(typename Element::Bits value) {
  using Magnitude = typename Element::Magnitude;
  const auto bits = static_cast<Magnitude>(std::bit_cast<Magnitude>(value) & Element::kMask);
  return !finite_only || bits < Element::kNotFinite ? bits : Magnitude{0};
}

// The largest magnitudes of rows and of columns, as floats; true where they are finite.
template <typename Element, bool finite_only>
ALWAYS_INLINE bool amax_of_tile(Values<Element> values, int64_t filled, float* row_amax,
                                float* col_amax) {
  using Magnitude = typename Element::Magnitude;
  constexpr int64_t kLanes = 64 / sizeof(Magnitude);
  alignas(64) Magnitude lanes[kBlock][kLanes];  // maxima of every kLanes-th element of a row
  alignas(64) Magnitude rows[kBlock] = {}, cols[kBlock] = {};
  for (int64_t r = 0; r < filled; ++r) {
    Magnitude row[kLanes] = {};
    for (int64_t c = 0; c < kBlock; c += kLanes)
      for (int64_t i = 0; i < kLanes; ++i)
        row[i] = std::max(row[i], magnitude<Element, finite_only>(values[r][c + i]));
    for (int64_t c = 0; c < kBlock; ++c)
      cols[c] = std::max(cols[c], magnitude<Element, finite_only>(values[r][c]));
    std::memcpy(lanes[r], row, sizeof(row));
  }
  Magnitude largest = 0;
  for (int64_t r = 0; r < filled; ++r) {
    Magnitude amax = 0;
    for (int64_t i = 0; i < kLanes; ++i) amax = std::max(amax, lanes[r][i]);
    rows[r] = amax;
    largest = std::max(largest, amax);
  }
  for (int64_t i = 0; i < kBlock; ++i) {
    row_amax[i] = Element::to_float(std::bit_cast<typename Element::Bits>(rows[i]));
    col_amax[i] = Element::to_float(std::bit_cast<typename Element::Bits>(cols[i]));
  }
  return largest < Element::kNotFinite;
}

// What is not finite passes every maximum, so a tile without any finds that out in the first pass.
template <typename Element>
ALWAYS_INLINE bool find_amax_of_tile(Values<Element> values, int64_t filled, float* row_amax,
                                     float* col_amax) {
  if (amax_of_tile<Element, false>(values, filled, row_amax, col_amax)) return true;
  amax_of_tile<Element, true>(values, filled, row_amax, col_amax);
  return false;
}

GROUPED_LINEAR_EVERY_WIDTH bool find_amax_of(const void* values, bool bf16, int64_t filled,
                                             float* row_amax, float* col_amax) {
  return bf16 ? find_amax_of_tile<Bf16>(as<Bf16>(values), filled, row_amax, col_amax)
              : find_amax_of_tile<Float>(as<Float>(values), filled, row_amax, col_amax);
}

template <typename Element>
ALWAYS_INLINE void sum_cols_of_tile(Values<Element> values, int64_t rows, float* sums) {
  float all[kBlock] = {};
  for (int64_t r = 0; r < rows; r += 8) {
    float eight[kBlock] = {};
    for (int64_t i = 0; i < 8; ++i)
      for (int64_t c = 0; c < kBlock; ++c) eight[c] += Element::to_float(values[r + i][c]);
    for (int64_t c = 0; c < kBlock; ++c) all[c] += eight[c];
  }
  std::memcpy(sums, all, sizeof(all));
}

GROUPED_LINEAR_EVERY_WIDTH void sum_cols(const void* values, bool bf16, int64_t rows, float* sums) {
  bf16 ? sum_cols_of_tile<Bf16>(as<Bf16>(values), rows, sums)
       : sum_cols_of_tile<Float>(as<Float>(values), rows, sums);
}

template <typename Element, bool by_rows, bool finite>
ALWAYS_INLINE void quantize_tile(Values<Element> values, int64_t filled, const float* factor,
                                 ByteTile& q) {
  for (int64_t r = 0; r < filled; ++r) {
    uint32_t codes[kBlock];  // narrowed in a loop of its own: one narrowing, not one an operand
    for (int64_t c = 0; c < kBlock; ++c) {
      const float scaled = Element::to_float(values[r][c]) * factor[by_rows ? r : c];
      codes[c] = finite ? in_range_to_e4m3(scaled) : to_e4m3(scaled);
    }
    for (int64_t c = 0; c < kBlock; ++c) q.bytes[r][c] = static_cast<uint8_t>(codes[c]);
  }
}

template <typename Element>
ALWAYS_INLINE void quantize_tile(Values<Element> values, int64_t filled, bool by_rows, bool finite,
                                 const float* factor, ByteTile& q) {
  if (by_rows)
    finite ? quantize_tile<Element, true, true>(values, filled, factor, q)
           : quantize_tile<Element, true, false>(values, filled, factor, q);
  else
    finite ? quantize_tile<Element, false, true>(values, filled, factor, q)
           : quantize_tile<Element, false, false>(values, filled, factor, q);
}

GROUPED_LINEAR_EVERY_WIDTH void quantize(const void* values, bool bf16, int64_t filled,
                                         bool by_rows, bool finite, const float* factor,
                                         ByteTile& q) {
  bf16 ? quantize_tile<Bf16>(as<Bf16>(values), filled, by_rows, finite, factor, q)
       : quantize_tile<Float>(as<Float>(values), filled, by_rows, finite, factor, q);
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
    const BlockScale block = scale_of(amax[i], rule, kE4m3Max);
    factor[i] = block.factor;
    scale[i] = block.scale;
  }
}

constexpr int kSide = 16;
using Vector [[gnu::vector_size(kSide)]] = uint8_t;

// Deals rows 0 .. 7 and rows 8 .. 15 like a pack of cards, byte by byte.
ALWAYS_INLINE void deal(const Vector (&from)[kSide], Vector (&to)[kSide]) {
  for (int i = 0; i < kSide / 2; ++i) {
    const Vector a = from[i], b = from[i + kSide / 2];
    to[2 * i] =
        __builtin_shufflevector(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
    to[2 * i + 1] =
        __builtin_shufflevector(a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
  }
}

// Turns 16 x 16 bytes over: dealt four times, the bytes of a column are in one row.
ALWAYS_INLINE void turn_over(const uint8_t* rows, int64_t row_stride, uint8_t* cols,
                             int64_t col_stride) {
  Vector a[kSide], b[kSide];
  for (int i = 0; i < kSide; ++i) std::memcpy(&a[i], rows + i * row_stride, kSide);
  deal(a, b);
  deal(b, a);
  deal(a, b);
  deal(b, a);
  for (int i = 0; i < kSide; ++i) std::memcpy(cols + i * col_stride, &a[i], kSide);
}

GROUPED_LINEAR_EVERY_WIDTH void turn_tile_over(const uint8_t (&bytes)[kBlock][kBlock], uint8_t* q_t,
                                               int64_t stride, int64_t rows, int64_t cols) {
  for (int64_t c = 0; c < cols; c += 16)
    for (int64_t r = 0; r < rows; r += 16)
      turn_over(&bytes[r][c], kBlock, q_t + c * stride + r, stride);
}

}  // namespace

BlockScale block_scale(float amax, ScaleRule rule, float largest) {
  return scale_of(amax, rule, largest);
}

void block_scales(const float amax[kBlock], ScaleRule rule, float factor[kBlock],
                  float scale[kBlock]) {
  scales_of(amax, rule, factor, scale);
}

void ByteTile::store(uint8_t* q, int64_t stride, int64_t rows, int64_t cols) const {
  for (int64_t r = 0; r < rows; ++r) std::memcpy(q + r * stride, bytes[r], cols);
}

void ByteTile::store_turned(uint8_t* q_t, int64_t stride, int64_t filled, int64_t rows,
                            int64_t cols) const {
  turn_tile_over(bytes, q_t, stride, filled, cols);
  if (filled < rows)
    for (int64_t c = 0; c < cols; ++c) std::memset(q_t + c * stride + filled, 0, rows - filled);
}

void Tile::find_amax(float row_amax[kBlock], float col_amax[kBlock]) {
  finite_ = find_amax_of(values_, bf16_, filled(), row_amax, col_amax);
}

void Tile::col_sums(float* sums) const {
  float all[kBlock];
  sum_cols(values_, bf16_, rows_, all);
  std::memcpy(sums, all, cols_ * sizeof(float));
}

void Tile::quantize_by_rows(const float row_factor[kBlock], ByteTile& q) const {
  quantize(values_, bf16_, filled(), true, finite_, row_factor, q);
}

void Tile::quantize_by_cols(const float col_factor[kBlock], ByteTile& q) const {
  quantize(values_, bf16_, filled(), false, finite_, col_factor, q);
}

}  // namespace grouped_linear::cpu
