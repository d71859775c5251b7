// SPDX-License-Identifier: Apache-2.0
#include "cpu/encode_tile.h"

#include <algorithm>
#include <bit>
#include <cmath>

#include "cpu/fp8.h"
#include "cpu/tile_avx512.h"

namespace grouped_linear::cpu {
namespace {

// How two neighbours of a row become two codes in a word, which halves the words to narrow. A
// policy prepares a factor once and then encodes many pairs with it.

struct Pair {
  float even, odd;
};

// x * factor of finite numbers.
template <typename Format>
struct EncodeProduct {
  using Prepared = float;
  static Prepared prepare(float factor) { return factor; }
  static uint32_t codes(Pair x, float even, float odd) {
    return Rounded<Format>(x.even * even).code() | Rounded<Format>(x.odd * odd).code() << 8;
  }
};

// x * factor of any numbers.
template <typename Format>
struct EncodeAny {
  using Prepared = float;
  static Prepared prepare(float factor) { return factor; }
  static uint32_t codes(Pair x, float even, float odd) {
    return quantize<Format>(x.even, even) | quantize<Format>(x.odd, odd) << 8;
  }
};

// x * factor where factor is a power of two that Rounding can shift exponents by. A third faster
// than EncodeProduct in both layouts, which share most of the work (Xeon, AVX-512 without VBMI,
// 2026-11, [4096, 4096] bf16 on one thread: 6.6 ms against 8.8 ms).
struct EncodeShifted {
  using Prepared = uint32_t;  // the smallest anchor
  static Prepared prepare(float factor) { return Rounding<E4m3>::smallest_anchor(factor); }
  static uint32_t codes(Pair x, uint32_t even, uint32_t odd) {
    const uint32_t low = Rounding<E4m3>(std::fabs(x.even), even).bits() - even;
    const uint32_t high = Rounding<E4m3>(std::fabs(x.odd), odd).bits() - odd;
    const uint32_t signs = (std::bit_cast<uint32_t>(x.even) >> 24 & 0x80) |
                           (std::bit_cast<uint32_t>(x.odd) >> 16 & 0x8000);
    return (low & 0xff) | high << 8 | signs;
  }
};

GROUPED_LINEAR_EVERY_WIDTH bool can_shift(const float* factor, int64_t n) {
  constexpr uint32_t kLeast = std::bit_cast<uint32_t>(Rounding<E4m3>::kSmallestFactor);
  constexpr uint32_t kMost = std::bit_cast<uint32_t>(Rounding<E4m3>::kLargestFactor);
  uint32_t others = 0;
  for (int64_t i = 0; i < n; ++i) {
    const uint32_t bits = std::bit_cast<uint32_t>(factor[i]);
    others |= (bits & ~kInfinity) | (bits < kLeast) | (bits > kMost);
  }
  return others == 0;
}

// One word of two bf16 numbers is taken apart in two operations.
static_assert(std::endian::native == std::endian::little);
inline Pair load_pair(const uint16_t* from) {
  uint32_t both;
  std::memcpy(&both, from, sizeof(both));
  return {std::bit_cast<float>(both << 16), std::bit_cast<float>(both & 0xffff0000)};
}
inline Pair load_pair(const float* from) {
  uint64_t both;
  std::memcpy(&both, from, sizeof(both));
  return {std::bit_cast<float>(static_cast<uint32_t>(both)),
          std::bit_cast<float>(static_cast<uint32_t>(both >> 32))};
}

template <typename Encode, typename Element, int64_t part, bool by_row, bool by_col>
GROUPED_LINEAR_INLINE void encode_tile(const TileSource& tile, const Encoding& to,
                                       const TilePrefetch& prefetch) {
  constexpr int64_t kParts = kBlock / part, kPairs = kBlock / 2;
  typename Encode::Prepared even[kParts * kPairs], odd[kParts * kPairs];
  for (int64_t i = 0; by_col && i < kParts * kPairs; ++i) {
    even[i] = Encode::prepare(to.col_factor[2 * i]);
    odd[i] = Encode::prepare(to.col_factor[2 * i + 1]);
  }

  for (int64_t r = 0; r < tile.rows; ++r) {
    prefetch.row(r);
    typename Encode::Prepared row[part < kBlock ? kPairs : 1] = {};
    uint16_t row_codes[kPairs], col_codes[kPairs];
    for (int64_t p = 0; by_row && p < kParts; ++p)
      std::fill_n(row + p * part / 2, part < kBlock ? part / 2 : 1,
                  Encode::prepare(to.row_factor[r * kParts + p]));
    const int64_t first = r / part * kPairs;
    const auto* elements = tile.at.row<Element>(r);
    for (int64_t i = 0; i < kPairs; ++i) {
      const Pair x = load_pair(elements + 2 * i);
      const auto factor = row[part < kBlock ? i : 0];
      if (by_row) row_codes[i] = static_cast<uint16_t>(Encode::codes(x, factor, factor));
      if (by_col)
        col_codes[i] = static_cast<uint16_t>(Encode::codes(x, even[first + i], odd[first + i]));
    }
    if (by_row && to.q.first) store_row_bytes(row_codes, to.q, r, to.cols);
    if (by_col || to.codes) std::memcpy(to.codes->bytes[r], by_col ? col_codes : row_codes, kBlock);
  }
}

template <typename Encode, typename Element, int64_t part>
GROUPED_LINEAR_INLINE void encode_tile(const TileSource& tile, const Encoding& to,
                                       const TilePrefetch& prefetch) {
  if (to.row_factor && to.col_factor)
    encode_tile<Encode, Element, part, true, true>(tile, to, prefetch);
  else if (to.row_factor)
    encode_tile<Encode, Element, part, true, false>(tile, to, prefetch);
  else
    encode_tile<Encode, Element, part, false, true>(tile, to, prefetch);
}

template <typename Encode>
GROUPED_LINEAR_INLINE void encode_tile(const TileSource& tile, const Encoding& to,
                                       const TilePrefetch& prefetch) {
  if (to.part == kBlock)
    tile.bf16 ? encode_tile<Encode, Bf16, kBlock>(tile, to, prefetch)
              : encode_tile<Encode, Float, kBlock>(tile, to, prefetch);
  else
    tile.bf16 ? encode_tile<Encode, Bf16, kMxBlock>(tile, to, prefetch)
              : encode_tile<Encode, Float, kMxBlock>(tile, to, prefetch);
}

template <typename Encode>
GROUPED_LINEAR_INLINE void encode_rows(const TileSource& tile, const Encoding& to,
                                       const TilePrefetch& prefetch) {
  tile.bf16 ? encode_tile<Encode, Bf16, kBlock, true, false>(tile, to, prefetch)
            : encode_tile<Encode, Float, kBlock, true, false>(tile, to, prefetch);
}

GROUPED_LINEAR_EVERY_WIDTH void encode_shifted(const TileSource& tile, const Encoding& to,
                                               const TilePrefetch& prefetch) {
  encode_tile<EncodeShifted>(tile, to, prefetch);
}
GROUPED_LINEAR_EVERY_WIDTH void encode_product(const TileSource& tile, const Encoding& to,
                                               const TilePrefetch& prefetch) {
  encode_tile<EncodeProduct<E4m3>>(tile, to, prefetch);
}
GROUPED_LINEAR_EVERY_WIDTH void encode_any(const TileSource& tile, const Encoding& to,
                                           const TilePrefetch& prefetch) {
  encode_tile<EncodeAny<E4m3>>(tile, to, prefetch);
}
GROUPED_LINEAR_EVERY_WIDTH void encode_e5m2_product(const TileSource& tile, const Encoding& to,
                                                    const TilePrefetch& prefetch) {
  encode_rows<EncodeProduct<E5m2>>(tile, to, prefetch);
}
GROUPED_LINEAR_EVERY_WIDTH void encode_e5m2_any(const TileSource& tile, const Encoding& to,
                                                const TilePrefetch& prefetch) {
  encode_rows<EncodeAny<E5m2>>(tile, to, prefetch);
}

template <typename Element, bool rowwise, bool finite>
GROUPED_LINEAR_INLINE void round_tile(const TileSource& tile, int64_t cols, const float* factor,
                                      const float* scale, ByteRows out,
                                      const TilePrefetch& prefetch) {
  for (int64_t r = 0; r < tile.rows; ++r) {
    prefetch.row(r);
    const auto* elements = tile.at.row<Element>(r);
    uint16_t row[kBlock];
    for (int64_t begin = 0; begin < kBlock; begin += kMxBlock) {
      const int64_t first =
          rowwise ? (r * kBlock + begin) / kMxBlock : r / kMxBlock * kBlock + begin;
      for (int64_t i = 0; i < kMxBlock; ++i) {
        const int64_t part = first + (rowwise ? 0 : i);
        const float x = Element::to_float(elements[begin + i]);
        const float rounded = Rounded<E4m3>(x * factor[part]).value() * scale[part];
        const uint32_t bits = std::bit_cast<uint32_t>(rounded) >> 16;
        const bool is_nan = !finite && (std::bit_cast<uint32_t>(x) & kMagnitude) >= kInfinity;
        row[begin + i] = static_cast<uint16_t>(is_nan ? kBf16Nan : bits);
      }
    }
    const int64_t bytes = cols * sizeof(uint16_t);
    out.streamed ? stream_copy(row, out[r], bytes) : (void)std::memcpy(out[r], row, bytes);
  }
}

template <typename Element>
GROUPED_LINEAR_INLINE void round_tile(const TileSource& tile, bool rowwise, int64_t cols,
                                      const float* factor, const float* scale, ByteRows out,
                                      const TilePrefetch& prefetch) {
  if (rowwise)
    tile.finite ? round_tile<Element, true, true>(tile, cols, factor, scale, out, prefetch)
                : round_tile<Element, true, false>(tile, cols, factor, scale, out, prefetch);
  else
    tile.finite ? round_tile<Element, false, true>(tile, cols, factor, scale, out, prefetch)
                : round_tile<Element, false, false>(tile, cols, factor, scale, out, prefetch);
}

GROUPED_LINEAR_EVERY_WIDTH void round_any_tile(const TileSource& tile, bool rowwise, int64_t cols,
                                               const float* factor, const float* scale,
                                               ByteRows out, const TilePrefetch& prefetch) {
  tile.bf16 ? round_tile<Bf16>(tile, rowwise, cols, factor, scale, out, prefetch)
            : round_tile<Float>(tile, rowwise, cols, factor, scale, out, prefetch);
}

}  // namespace

void encode_e4m3(const TileSource& tile, const Encoding& to, const TilePrefetch& prefetch) {
  const int64_t parts = kBlock * kBlock / to.part;
  if (!tile.finite)
    encode_any(tile, to, prefetch);
  else if (tile.bf16 && encode_avx512(tile, to, prefetch))
    return;
  else if ((!to.row_factor || can_shift(to.row_factor, parts)) &&
           (!to.col_factor || can_shift(to.col_factor, parts)))
    encode_shifted(tile, to, prefetch);
  else
    encode_product(tile, to, prefetch);
}

void encode_with_one_factor(const TileSource& tile, float factor, ScalarType format, ByteTile& q,
                            const TilePrefetch& prefetch) {
  float factors[kBlock];
  std::fill_n(factors, kBlock, factor);
  const Encoding to{.row_factor = factors, .codes = &q};
  const bool finite = tile.finite && std::isfinite(factor);
  if (format == E5m2::kType)
    (finite ? encode_e5m2_product : encode_e5m2_any)(tile, to, prefetch);
  else
    (finite ? encode_product : encode_any)(tile, to, prefetch);
}

void round_to_e4m3(const TileSource& tile, bool rowwise, int64_t cols, const float* factor,
                   const float* scale, ByteRows out, const TilePrefetch& prefetch) {
  round_any_tile(tile, rowwise, cols, factor, scale, out, prefetch);
}

}  // namespace grouped_linear::cpu
