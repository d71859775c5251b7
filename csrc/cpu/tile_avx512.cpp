// SPDX-License-Identifier: Apache-2.0
// Encoding a bf16 tile in both layouts and transposing one takes 0.05 ns an element; the loops for
// every CPU take 0.11 ns (AMD EPYC 9005).
#include "cpu/tile_avx512.h"

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)

// GCC's header initialises undefined vectors with themselves.
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#include <immintrin.h>

#include <bit>

#include "cpu/features.h"
#include "cpu/fp8.h"

#define GROUPED_LINEAR_AVX512 __attribute__((target("avx512f,avx512bw,avx512vl,avx512vbmi")))

namespace grouped_linear::cpu {
namespace {

static_assert(kCacheLine == sizeof(__m512i));  // one store writes one line
constexpr int64_t kLaneBytes = 16;             // of a lane of a vector

// The fields of a bf16 element are split into bytes, so that a vector holds 64 elements. `base` is
// the exponent of the numbers that become the smallest normal number of e4m3. The code of an
// element is
//   exponent >= base:  8 * (exponent - base) + the significand rounded to 4 bits;
//   exponent < base:   looked up by the distance base - exponent and by what rounding needs of the
//                      mantissa: its upper 3 bits, and whether any other bit is set.
// From a distance of 5 on every code is 0. So base >= 5 makes zero and the subnormal numbers of
// bf16, whose exponent is 0, no special case.
constexpr uint8_t kLeastBase = 5;

struct alignas(kCacheLine) Tables {
  uint8_t even[kCacheLine], odd[kCacheLine];  // indices of bytes of two vectors of words
  uint8_t rounded[128];                       // by mantissa: the significand in 4 bits, 8 .. 16
  uint8_t kept[128];       // by mantissa: 8 * (upper 3 bits, and whether any other bit is set)
  uint8_t subnormal[128];  // by kept + distance, with distances up to 7
};

constexpr uint8_t nearest_even(int value, int shift) {
  return static_cast<uint8_t>((value + (1 << (shift - 1)) - 1 + (value >> shift & 1)) >> shift);
}

constexpr Tables kTables = [] {
  Tables t{};
  for (int i = 0; i < kCacheLine; ++i) t.even[i] = 2 * i, t.odd[i] = 2 * i + 1;
  for (int mantissa = 0; mantissa < 128; ++mantissa) {
    t.rounded[mantissa] = nearest_even(128 + mantissa, 4);
    t.kept[mantissa] = (mantissa >> 4 << 1 | ((mantissa & 15) != 0)) << 3;
  }
  for (int kept = 0; kept < 16; ++kept)
    for (int distance = 1; distance < 8; ++distance)
      t.subnormal[kept << 3 | distance] = nearest_even(16 + kept, 1 + distance);
  return t;
}();

struct Elements {
  __m512i exponent, rounded, kept, sign;
};

struct Encoder {
  __m512i even, odd, rounded[2], kept[2], subnormal[2];

  GROUPED_LINEAR_AVX512 Encoder() {
    even = _mm512_load_si512(kTables.even);
    odd = _mm512_load_si512(kTables.odd);
    for (int i = 0; i < 2; ++i) {
      rounded[i] = _mm512_load_si512(kTables.rounded + i * kCacheLine);
      kept[i] = _mm512_load_si512(kTables.kept + i * kCacheLine);
      subnormal[i] = _mm512_load_si512(kTables.subnormal + i * kCacheLine);
    }
  }

  GROUPED_LINEAR_AVX512 GROUPED_LINEAR_INLINE Elements split(const void* from) const {
    const auto* words = static_cast<const __m512i*>(from);
    const __m512i a = _mm512_loadu_si512(words), b = _mm512_loadu_si512(words + 1);
    const __m512i low = _mm512_permutex2var_epi8(a, even, b);  // mantissas, below one other bit
    const __m512i high = _mm512_permutex2var_epi8(a, odd, b);
    const __m512i exponent =
        _mm512_permutex2var_epi8(_mm512_add_epi16(a, a), odd, _mm512_add_epi16(b, b));
    return {exponent, _mm512_permutex2var_epi8(rounded[0], low, rounded[1]),
            _mm512_permutex2var_epi8(kept[0], low, kept[1]),
            _mm512_and_si512(high, _mm512_set1_epi8(-128))};
  }

  GROUPED_LINEAR_AVX512 GROUPED_LINEAR_INLINE __m512i codes(const Elements& x, __m512i base) const {
    const __m512i distance = _mm512_subs_epu8(base, x.exponent);
    const __m512i entry = _mm512_or_si512(_mm512_min_epu8(distance, _mm512_set1_epi8(7)), x.kept);
    const __m512i below = _mm512_permutex2var_epi8(subnormal[0], entry, subnormal[1]);
    const __mmask64 normal = _mm512_testn_epi8_mask(distance, distance);
    const __m512i binades = _mm512_slli_epi16(_mm512_subs_epu8(x.exponent, base), 3);
    const __m512i above = _mm512_maskz_add_epi8(normal, binades, x.rounded);
    return _mm512_ternarylogic_epi64(below, above, x.sign, 0xfe);  // below | above | sign
  }
};

// The bases of factors. False if one is not a power of two, or is too large or too small.
GROUPED_LINEAR_AVX512 bool bases_of(const float* factor, int64_t n, uint8_t* base) {
  constexpr uint32_t kSum = 254 + E4m3::kSmallestExponent;  // a factor's exponent + its base
  constexpr uint32_t kLeast = std::bit_cast<uint32_t>(Rounding<E4m3>::kSmallestFactor);
  constexpr uint32_t kMost = (kSum - kLeastBase) << 23;
  uint32_t others = 0;
  for (int64_t i = 0; i < n; ++i) {
    const uint32_t bits = std::bit_cast<uint32_t>(factor[i]);
    others |= (bits & ~kInfinity) | (bits < kLeast) | (bits > kMost);
    base[i] = static_cast<uint8_t>(kSum - (bits >> 23));
  }
  return others == 0;
}

// The base of each of 64 elements, from the bases of their row's parts.
GROUPED_LINEAR_AVX512 GROUPED_LINEAR_INLINE __m512i bases_of_elements(const uint8_t* base,
                                                                      int64_t part) {
  if (part == kBlock) return _mm512_set1_epi8(static_cast<char>(base[0]));
  return _mm512_inserti64x4(_mm512_set1_epi8(static_cast<char>(base[0])),
                            _mm256_set1_epi8(static_cast<char>(base[1])), 1);
}

GROUPED_LINEAR_AVX512 GROUPED_LINEAR_INLINE __mmask64 first_lanes(int64_t n) {
  return n >= kCacheLine ? ~__mmask64{0} : n <= 0 ? 0 : (__mmask64{1} << n) - 1;
}

// A streamed line is stored whole or not at all.
GROUPED_LINEAR_AVX512 GROUPED_LINEAR_INLINE void store_line(uint8_t* to, __m512i line,
                                                            __mmask64 stored, bool streamed) {
  if (!streamed)
    _mm512_mask_storeu_epi8(to, stored, line);
  else if (stored)
    _mm512_stream_si512(reinterpret_cast<__m512i*>(to), line);
}

template <int64_t part, bool streamed>
GROUPED_LINEAR_AVX512 void encode_tile(const TileSource& tile, const Encoding& to,
                                       const uint8_t* row_base, const uint8_t* col_base,
                                       const TilePrefetch& prefetch) {
  static_assert(part == kBlock || 2 * part == kCacheLine);
  const Encoder encoder;
  const __mmask64 stored[2] = {first_lanes(to.cols), first_lanes(to.cols - kCacheLine)};
  for (int64_t r = 0; r < tile.rows; ++r) {
    prefetch.row(r);
    const uint16_t* row = tile.at.row<Bf16>(r);
    for (int64_t half = 0; half < 2; ++half) {
      const int64_t first = half * kCacheLine;
      const Elements x = encoder.split(row + first);
      __m512i bytes = _mm512_setzero_si512();
      if (to.row_factor) {
        const __m512i base = bases_of_elements(row_base + (r * kBlock + first) / part, part);
        bytes = encoder.codes(x, base);
        store_line(to.q[r] + first, bytes, stored[half], streamed);
      }
      if (to.col_factor) {
        const __m512i base = _mm512_load_si512(col_base + r / part * kBlock + first);
        bytes = encoder.codes(x, base);
      }
      if (to.codes) _mm512_store_si512(&to.codes->bytes[r][first], bytes);
    }
  }
}

// Interleaves the bytes of vectors 0 .. 7 with those of vectors 8 .. 15, within each lane.
GROUPED_LINEAR_AVX512 GROUPED_LINEAR_INLINE void interleave_lanes(const __m512i (&from)[kLaneBytes],
                                                                  __m512i (&to)[kLaneBytes]) {
  for (int64_t i = 0; i < kLaneBytes / 2; ++i) {
    to[2 * i] = _mm512_unpacklo_epi8(from[i], from[i + kLaneBytes / 2]);
    to[2 * i + 1] = _mm512_unpackhi_epi8(from[i], from[i + kLaneBytes / 2]);
  }
}

// Lanes 0 and 2, or 1 and 3, of two vectors.
GROUPED_LINEAR_AVX512 GROUPED_LINEAR_INLINE __m512i even_lanes(__m512i a, __m512i b) {
  return _mm512_shuffle_i32x4(a, b, 0x88);
}
GROUPED_LINEAR_AVX512 GROUPED_LINEAR_INLINE __m512i odd_lanes(__m512i a, __m512i b) {
  return _mm512_shuffle_i32x4(a, b, 0xdd);
}

// Transposes 64 rows and columns at a time: first strips of 16 rows lane by lane, then lanes are
// joined to whole lines of columns.
GROUPED_LINEAR_AVX512 void store_transposed(const ByteTile& tile, ByteRows q_t, int64_t filled,
                                            int64_t rows, int64_t cols) {
  constexpr int64_t kLanes = kCacheLine / kLaneBytes;
  for (int64_t c = 0; c < cols; c += kCacheLine)
    for (int64_t r = 0; r < rows; r += kCacheLine) {
      __m512i strips[kLanes][kLaneBytes];  // lane l of vector i: column 16 * l + i
      for (int64_t k = 0; k < kLanes; ++k) {
        __m512i v[kLaneBytes], interleaved[kLaneBytes];
        const int64_t first = r + k * kLaneBytes;
        for (int64_t i = 0; i < kLaneBytes; ++i)
          v[i] = first < filled ? _mm512_load_si512(&tile.bytes[first + i][c])
                                : _mm512_setzero_si512();
        interleave_lanes(v, interleaved), interleave_lanes(interleaved, v),
            interleave_lanes(v, interleaved);
        interleave_lanes(interleaved, strips[k]);
      }
      const __mmask64 stored = first_lanes(rows - r);
      for (int64_t i = 0; i < kLaneBytes; ++i) {
        const __m512i a = even_lanes(strips[0][i], strips[1][i]);
        const __m512i b = even_lanes(strips[2][i], strips[3][i]);
        const __m512i d = odd_lanes(strips[0][i], strips[1][i]);
        const __m512i e = odd_lanes(strips[2][i], strips[3][i]);
        const __m512i lines[kLanes] = {even_lanes(a, b), even_lanes(d, e), odd_lanes(a, b),
                                       odd_lanes(d, e)};
        for (int64_t l = 0; l < kLanes && c + l * kLaneBytes < cols; ++l)
          store_line(q_t[c + l * kLaneBytes + i] + r, lines[l], stored, q_t.streamed);
      }
    }
}

}  // namespace

bool encode_avx512(const TileSource& tile, const Encoding& to, const TilePrefetch& prefetch) {
  if (!has_byte_permutes()) return false;
  alignas(kCacheLine) uint8_t row_base[kBlock * kBlock / kMxBlock];
  alignas(kCacheLine) uint8_t col_base[kBlock * kBlock / kMxBlock];
  const int64_t parts = kBlock * kBlock / to.part;
  if (to.row_factor && !bases_of(to.row_factor, parts, row_base)) return false;
  if (to.col_factor && !bases_of(to.col_factor, parts, col_base)) return false;
  const bool streamed = to.q.streamed;
  const auto encode = to.part == kBlock
                          ? (streamed ? encode_tile<kBlock, true> : encode_tile<kBlock, false>)
                          : (streamed ? encode_tile<kMxBlock, true> : encode_tile<kMxBlock, false>);
  encode(tile, to, row_base, col_base, prefetch);
  return true;
}

bool store_transposed_avx512(const ByteTile& tile, ByteRows q_t, int64_t filled, int64_t rows,
                             int64_t cols) {
  if (!has_byte_permutes()) return false;
  store_transposed(tile, q_t, filled, rows, cols);
  return true;
}

}  // namespace grouped_linear::cpu

#else

namespace grouped_linear::cpu {

bool encode_avx512(const TileSource&, const Encoding&, const TilePrefetch&) { return false; }

bool store_transposed_avx512(const ByteTile&, ByteRows, int64_t, int64_t, int64_t) { return false; }

}  // namespace grouped_linear::cpu
#endif
