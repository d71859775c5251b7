// Two encodings and a turn of a tile at 0.05 ns an element of bf16, where loops take 0.11 (AMD EPYC 9005).
#include "cpu/tile_avx512.h"

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)

// GCC's header gives what is undefined by itself.
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#include <immintrin.h>

#include <bit>

#include "cpu/fp8.h"

#define GROUPED_LINEAR_AVX512 __attribute__((target("avx512f,avx512bw,avx512vl,avx512vbmi")))

namespace grouped_linear::cpu {
namespace {

constexpr int64_t kLine = 64;  // bytes of a vector, and of a cache line
constexpr int64_t kSide = 16;  // bytes of a lane of a vector

bool has_vbmi() {
  static const bool has = __builtin_cpu_supports("avx512vbmi");
  return has;
}

// An element of bf16 in parts, each a byte, so that a vector has 64 elements. Its exponent's distance to
// `base`, the exponent of what becomes the smallest normal number of e4m3, decides how its code is made:
//   exponent >= base:  8 * (exponent - base) + the significand rounded to 4 bits;
//   exponent < base:   a table of the distance and of what rounding needs of the mantissa, its upper 3 bits
//                      and whether there are others.
// From a distance of 5 on every code is 0. So base >= 5 spares a look at zero and at subnormal numbers of
// bf16, whose exponent is 0.
constexpr uint8_t kLeastBase = 5;

struct alignas(kLine) Tables {
  uint8_t even[kLine], odd[kLine];  // bytes of two vectors of words
  uint8_t rounded[128];             // of a mantissa: its significand in 4 bits, 8 .. 16
  uint8_t kept[128];       // of a mantissa: 8 * (upper 3 bits and whether there are others)
  uint8_t subnormal[128];  // of kept + distance, at most 7
};

constexpr uint8_t nearest_even(int value, int shift) {
  return static_cast<uint8_t>((value + (1 << (shift - 1)) - 1 + (value >> shift & 1)) >> shift);
}

constexpr Tables kTables = [] {
  Tables t{};
  for (int i = 0; i < kLine; ++i) t.even[i] = 2 * i, t.odd[i] = 2 * i + 1;
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
      rounded[i] = _mm512_load_si512(kTables.rounded + i * kLine);
      kept[i] = _mm512_load_si512(kTables.kept + i * kLine);
      subnormal[i] = _mm512_load_si512(kTables.subnormal + i * kLine);
    }
  }

  GROUPED_LINEAR_AVX512 GROUPED_LINEAR_INLINE Elements take_apart(const void* from) const {
    const auto* words = static_cast<const __m512i*>(from);
    const __m512i a = _mm512_loadu_si512(words), b = _mm512_loadu_si512(words + 1);
    const __m512i low = _mm512_permutex2var_epi8(a, even, b);  // the mantissa, below a bit
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
    return _mm512_ternarylogic_epi64(below, above, x.sign, 0xfe);  // one of the two, and the sign
  }
};

// The bases of factors that are powers of two; false if any is not, or is too large or too small.
GROUPED_LINEAR_AVX512 bool bases_of(const float* factor, int64_t n, uint8_t* base) {
  constexpr uint32_t kSum = 254 + E4m3::kSmallestExponent;  // of a factor's exponent and its base
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

// Of the bases of a row's parts, that of each of 64 elements.
GROUPED_LINEAR_AVX512 GROUPED_LINEAR_INLINE __m512i spread(const uint8_t* base, int64_t part) {
  if (part == kBlock) return _mm512_set1_epi8(static_cast<char>(base[0]));
  return _mm512_inserti64x4(_mm512_set1_epi8(static_cast<char>(base[0])),
                            _mm256_set1_epi8(static_cast<char>(base[1])), 1);
}

GROUPED_LINEAR_AVX512 GROUPED_LINEAR_INLINE __mmask64 first_lanes(int64_t n) {
  return n >= kLine ? ~__mmask64{0} : n <= 0 ? 0 : (__mmask64{1} << n) - 1;
}

// Of a streamed line, all or nothing.
GROUPED_LINEAR_AVX512 GROUPED_LINEAR_INLINE void store_line(uint8_t* to, __m512i line,
                                                            __mmask64 stored, bool streamed) {
  if (!streamed)
    _mm512_mask_storeu_epi8(to, stored, line);
  else if (stored)
    _mm512_stream_si512(reinterpret_cast<__m512i*>(to), line);
}

template <int64_t part, bool streamed>
GROUPED_LINEAR_AVX512 void encode_tile(TileRows tile, int64_t rows, const uint8_t* row_base,
                                       const uint8_t* col_base, ByteRows q, int64_t cols,
                                       ByteTile* by_cols, const Ahead& ahead) {
  static_assert(part == kBlock || 2 * part == kLine);
  const Encoder encoder;
  const __mmask64 stored[2] = {first_lanes(cols), first_lanes(cols - kLine)};
  for (int64_t r = 0; r < rows; ++r) {
    ahead.ask(r);
    const auto* row =
        reinterpret_cast<const uint16_t*>(static_cast<const char*>(tile.first) + r * tile.stride);
    for (int64_t half = 0; half < 2; ++half) {
      const int64_t first = half * kLine;
      const Elements x = encoder.take_apart(row + first);
      __m512i bytes = _mm512_setzero_si512();
      if (q.first) {
        const __m512i base = spread(row_base + (r * kBlock + first) / part, part);
        bytes = encoder.codes(x, base);
        store_line(q[r] + first, bytes, stored[half], streamed);
      }
      if (col_base) {
        const __m512i base = _mm512_load_si512(col_base + r / part * kBlock + first);
        bytes = encoder.codes(x, base);
      }
      if (by_cols) _mm512_store_si512(&by_cols->bytes[r][first], bytes);
    }
  }
}

// Deals vectors like a pack of cards, byte by byte, each lane by itself.
GROUPED_LINEAR_AVX512 GROUPED_LINEAR_INLINE void deal_lanes(const __m512i (&from)[kSide],
                                                            __m512i (&to)[kSide]) {
  for (int64_t i = 0; i < kSide / 2; ++i) {
    to[2 * i] = _mm512_unpacklo_epi8(from[i], from[i + kSide / 2]);
    to[2 * i + 1] = _mm512_unpackhi_epi8(from[i], from[i + kSide / 2]);
  }
}

// Of two vectors, lanes 0 and 2 (or 1 and 3) of each.
GROUPED_LINEAR_AVX512 GROUPED_LINEAR_INLINE __m512i even_lanes(__m512i a, __m512i b) {
  return _mm512_shuffle_i32x4(a, b, 0x88);
}
GROUPED_LINEAR_AVX512 GROUPED_LINEAR_INLINE __m512i odd_lanes(__m512i a, __m512i b) {
  return _mm512_shuffle_i32x4(a, b, 0xdd);
}

// 64 rows and columns at a time: strips of 16 rows are turned over lane by lane, then lanes are put together
// to whole lines of columns.
GROUPED_LINEAR_AVX512 void store_turned(const ByteTile& tile, ByteRows q_t, int64_t filled,
                                        int64_t rows, int64_t cols) {
  constexpr int64_t kLanes = kLine / kSide;
  for (int64_t c = 0; c < cols; c += kLine)
    for (int64_t r = 0; r < rows; r += kLine) {
      __m512i strips[kLanes][kSide];  // lane l of vector i: column 16 * l + i
      for (int64_t k = 0; k < kLanes; ++k) {
        __m512i v[kSide], dealt[kSide];
        const int64_t first = r + k * kSide;
        for (int64_t i = 0; i < kSide; ++i)
          v[i] = first < filled ? _mm512_load_si512(&tile.bytes[first + i][c])
                                : _mm512_setzero_si512();
        deal_lanes(v, dealt), deal_lanes(dealt, v), deal_lanes(v, dealt);
        deal_lanes(dealt, strips[k]);
      }
      const __mmask64 stored = first_lanes(rows - r);
      for (int64_t i = 0; i < kSide; ++i) {
        const __m512i a = even_lanes(strips[0][i], strips[1][i]);
        const __m512i b = even_lanes(strips[2][i], strips[3][i]);
        const __m512i d = odd_lanes(strips[0][i], strips[1][i]);
        const __m512i e = odd_lanes(strips[2][i], strips[3][i]);
        const __m512i lines[kLanes] = {even_lanes(a, b), even_lanes(d, e), odd_lanes(a, b),
                                       odd_lanes(d, e)};
        for (int64_t l = 0; l < kLanes && c + l * kSide < cols; ++l)
          store_line(q_t[c + l * kSide + i] + r, lines[l], stored, q_t.streamed);
      }
    }
}

}  // namespace

bool encode_avx512(TileRows tile, int64_t rows, int64_t part, const float* row_factor,
                   const float* col_factor, ByteRows q, int64_t cols, ByteTile* by_cols,
                   const Ahead& ahead) {
  if (!has_vbmi()) return false;
  alignas(kLine) uint8_t row_base[kBlock * kBlock / kMxBlock], col_base[kBlock * kBlock / kMxBlock];
  const int64_t parts = kBlock * kBlock / part;
  if (q.first && !bases_of(row_factor, parts, row_base)) return false;
  if (col_factor && !bases_of(col_factor, parts, col_base)) return false;
  const auto encode = part == kBlock
                          ? q.streamed ? encode_tile<kBlock, true> : encode_tile<kBlock, false>
                      : q.streamed ? encode_tile<kMxBlock, true>
                                   : encode_tile<kMxBlock, false>;
  encode(tile, rows, row_base, col_factor ? col_base : nullptr, q, cols, by_cols, ahead);
  return true;
}

bool store_turned_avx512(const ByteTile& tile, ByteRows q_t, int64_t filled, int64_t rows,
                         int64_t cols) {
  if (!has_vbmi()) return false;
  store_turned(tile, q_t, filled, rows, cols);
  return true;
}

}  // namespace grouped_linear::cpu

#else

namespace grouped_linear::cpu {

bool encode_avx512(TileRows, int64_t, int64_t, const float*, const float*, ByteRows, int64_t,
                   ByteTile*, const Ahead&) {
  return false;
}

bool store_turned_avx512(const ByteTile&, ByteRows, int64_t, int64_t, int64_t) { return false; }

}  // namespace grouped_linear::cpu
#endif
