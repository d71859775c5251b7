// SPDX-License-Identifier: Apache-2.0
// FP8 GEMMs on a CPU's bf16 units, where it has them (AVX-512 BF16).
//
// Every FP8 number is a bf16 number, so operands are decoded without scales, one k-block of 128 at
// a time. A k-block's partial accumulator, in float32, is multiplied by both scales and promoted to
// the float32 accumulator. A GPU does the same. No scale makes anything round before the end.
//
// The arithmetic: a core multiplies two vectors of 32 pairs a cycle, 128 FLOP. Six rows by 64
// columns of the result stay in registers. Two steps along K take 24 vector products (12 cycles), 4
// loads and 6 broadcasts (5 cycles). Decoding and transposing an element of b takes about 0.4
// instructions, shared by kRows rows of a; decoding an element of a takes 0.25, shared by kCols
// columns.
//
// Other CPUs dequantize the operands and multiply them in float32 with torch's kernels.

#include "cpu/fp8_mm.h"

#include <array>

#include "checks.h"
#include "cpu/features.h"
#include "cpu/numerics.h"
#include "cpu/prefetch.h"
#include "cpu/transpose.h"

#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>
#define BF16_UNITS __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16")))
#endif

namespace grouped_linear::cpu {
namespace {

// values += row `row` of a second product, from column `col` on. A row's bits depend on that row
// and on b alone: torch's float32 GEMMs would order sums by how many rows there are.
GROUPED_LINEAR_EVERY_WIDTH void add_low_rank(const LowRankProduct& low, int64_t row, int64_t col,
                                             int64_t n, int64_t N, float* values) {
  for (int64_t k = 0; k < low.r; ++k) {
    const float factor = low.a[row * low.r + k];
    const float* b = low.b + k * N + col;
    for (int64_t c = 0; c < n; ++c) values[c] += factor * b[c];
  }
}

// Writes a row of a result: values + bias, + the row's old values if `add` is set.
void finish_row(float* values, int64_t n, const float* bias, bool add, ScalarType dtype,
                void* out) {
  if (bias)
    for (int64_t c = 0; c < n; ++c) values[c] += bias[c];
  if (add) {
    std::vector<float> before(n);
    load_row(out, dtype, n, before.data());
    for (int64_t c = 0; c < n; ++c) values[c] += before[c];
  }
  store_row(values, n, dtype, out);
}

char* element_of(const Matrix& m, int64_t r, int64_t c) {
  return static_cast<char*>(m.first) + (r * m.row_stride + c) * element_size(m.dtype);
}

std::vector<float> bias_of(const ScaledProduct& product) {
  std::vector<float> bias(product.bias ? product.out.cols : 0);
  if (product.bias) load_row(product.bias, product.out.dtype, product.out.cols, bias.data());
  return bias;
}

Scratch dequantize(const ScaledOperand& operand, int64_t rows, int64_t K) {
  Scratch x(rows, K);
  torch::stable::parallel_for(0, rows, 16, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r)
      for (int64_t b = 0; b * kBlock < K; ++b) {
        const int64_t n = std::min(kBlock, K - b * kBlock);
        float* values = x.row(r) + b * kBlock;
        load_row(operand.block(r, b), operand.format, n, values);
        const float scale = operand.scale_of(r, b);
        for (int64_t i = 0; i < n; ++i) values[i] *= scale;
      }
  });
  return x;
}

void multiply_in_float(const ScaledProduct& product, bool add) {
  const Matrix& out = product.out;
  Scratch a = dequantize(product.a, out.rows, product.K);
  Scratch b = dequantize(product.b, out.cols, product.K);
  Scratch y(out.rows, out.cols);
  matmul(y.view(), a.view(), b.view().transposed());
  const auto bias = bias_of(product);
  torch::stable::parallel_for(0, out.rows, 16, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      add_low_rank(product.low, r, 0, out.cols, out.cols, y.row(r));
      finish_row(y.row(r), out.cols, product.bias ? bias.data() : nullptr, add, out.dtype,
                 element_of(out, r, 0));
    }
  });
}

#ifdef BF16_UNITS
// One task computes at most so much of a result, in the L2 cache.
constexpr int64_t kRows = 384, kCols = 256;
constexpr int64_t kTileRows = 6, kTileCols = 64;
constexpr int64_t kSide = 16;  // vectors of 16 float32, or of 16 pairs of bf16

struct Workspace {
  alignas(64) uint16_t a[kRows][kBlock];
  alignas(64) uint16_t b[kCols / kTileCols][kBlock / 2][kTileCols][2];
  alignas(64) float y[kRows][kCols], scale_a[kRows], scale_b[kCols];
};

// The 128 magnitudes of a format as bf16 numbers.
struct alignas(64) Decoder {
  std::array<uint16_t, 128> numbers;

  explicit Decoder(ScalarType format) {
    std::array<uint8_t, 128> codes;
    for (int i = 0; i < 128; ++i) codes[i] = static_cast<uint8_t>(i);
    float values[128];
    load_row(codes.data(), format, 128, values);
    for (int i = 0; i < 128; ++i) numbers[i] = to_bf16(values[i]);
  }
};

BF16_UNITS inline __m512i decode(const Decoder& decoder, __m256i codes) {
  const auto table = [&](int i) { return &decoder.numbers[32 * i]; };
  const __m512i wide = _mm512_cvtepu8_epi16(codes);
  const __m512i small =
      _mm512_permutex2var_epi16(_mm512_load_si512(table(0)), wide, _mm512_load_si512(table(1)));
  const __m512i large =
      _mm512_permutex2var_epi16(_mm512_load_si512(table(2)), wide, _mm512_load_si512(table(3)));
  const __mmask32 is_large = _mm512_test_epi16_mask(wide, _mm512_set1_epi16(0x40));
  const __m512i sign = _mm512_slli_epi16(_mm512_and_si512(wide, _mm512_set1_epi16(0x80)), 8);
  return _mm512_or_si512(_mm512_mask_mov_epi16(small, is_large, large), sign);
}

// 32 bytes of a row, zero from byte n on.
BF16_UNITS inline __m256i load_codes(const uint8_t* codes, int64_t n) {
  const __mmask32 there = n >= 32 ? ~__mmask32{0} : n > 0 ? (__mmask32{1} << n) - 1 : 0;
  return _mm256_maskz_loadu_epi8(there, codes);
}

BF16_UNITS void decode_rows(const ScaledOperand& a, const Decoder& decoder, int64_t row,
                            int64_t rows, int64_t block, int64_t block_k, Workspace& space) {
  for (int64_t r = 0; r < rows; ++r) {
    const uint8_t* codes = a.block(row + r, block);
    prefetch_row(codes + a.block_stride, kBlock);
    for (int64_t k = 0; k < block_k; k += 32)
      _mm512_store_si512(&space.a[r][k], decode(decoder, load_codes(codes + k, block_k - k)));
    space.scale_a[r] = a.scale_of(row + r, block);
  }
}

using Pairs [[gnu::vector_size(32)]] = uint16_t;  // 16 pairs of FP8 numbers

// Rows [row, row + cols) of b become columns of the workspace, padded with zeros to full tiles.
BF16_UNITS void transpose_columns(const ScaledOperand& b, const Decoder& decoder, int64_t row,
                                  int64_t cols, int64_t block, int64_t block_k, Workspace& space) {
  for (int64_t c = 0; c < round_up(cols, kTileCols); c += kSide) {
    auto& tile = space.b[c / kTileCols];
    for (int64_t i = 0; i < kSide && c + i < cols; ++i)
      prefetch_row(b.block(row + c + i, block + 1), kBlock);
    for (int64_t k = 0; k < block_k; k += 32) {
      Pairs x[kSide];
      for (int64_t i = 0; i < kSide; ++i)
        x[i] = c + i < cols ? (Pairs)load_codes(b.block(row + c + i, block) + k, block_k - k)
                            : Pairs{};
      transpose_16x16(x);
      for (int64_t i = 0; i < kSide; ++i)
        _mm512_store_si512(&tile[k / 2 + i][c % kTileCols], decode(decoder, (__m256i)x[i]));
    }
    for (int64_t i = 0; i < kSide; ++i)
      space.scale_b[c + i] = c + i < cols ? b.scale_of(row + c + i, block) : 1;
  }
}

// y[i][j] += sum of a[i][k] * b[k][j], times both scales.
template <int rows>
BF16_UNITS void multiply_tile(int64_t row, int64_t col, int64_t pairs, Workspace& space) {
  constexpr int vectors = kTileCols / kSide;
  const auto& b = space.b[col / kTileCols];
  __m512 sums[rows][vectors];
  for (auto& row_sums : sums)
    for (auto& sum : row_sums) sum = _mm512_setzero_ps();
  for (int i = 0; i < rows; ++i)
    prefetch_row<true>(&space.y[row + i][col], kTileCols * sizeof(float));
  for (int64_t p = 0; p < pairs; ++p) {
    __m512i columns[vectors];
    for (int j = 0; j < vectors; ++j) columns[j] = _mm512_load_si512(&b[p][j * kSide]);
    for (int i = 0; i < rows; ++i) {
      int32_t pair;
      std::memcpy(&pair, &space.a[row + i][2 * p], sizeof(pair));
      const __m512i both = _mm512_set1_epi32(pair);
      for (int j = 0; j < vectors; ++j)
        sums[i][j] = _mm512_dpbf16_ps(sums[i][j], (__m512bh)both, (__m512bh)columns[j]);
    }
  }
#pragma GCC unroll 6  // else the sums would be stored to be indexed
  for (int i = 0; i < rows; ++i) {
    const __m512 scale_a = _mm512_set1_ps(space.scale_a[row + i]);
#pragma GCC unroll 4
    for (int j = 0; j < vectors; ++j) {
      float* y = &space.y[row + i][col + j * kSide];
      const __m512 before = _mm512_load_ps(y), sum = sums[i][j];
      const __m512 scale_b = _mm512_load_ps(&space.scale_b[col + j * kSide]);
      const __m512 scale = _mm512_mul_ps(scale_a, scale_b);
      __m512 after = _mm512_fmadd_ps(sum, scale, before);
      // If the product of scales is not a normal number, multiply by one scale after the other.
      constexpr int not_normal = 0x02 | 0x04 | 0x08 | 0x10 | 0x20;  // zeros, infinities, subnormals
      if (const __mmask16 extreme = _mm512_fpclass_ps_mask(scale, not_normal)) [[unlikely]]
        after = _mm512_mask_mov_ps(after, extreme,
                                   _mm512_fmadd_ps(_mm512_mul_ps(sum, scale_a), scale_b, before));
      _mm512_store_ps(y, after);
    }
  }
}

// Rows [row, row + rows) and columns [col, col + cols) of a product.
void multiply_part(const ScaledProduct& product, int64_t row, int64_t rows, int64_t col,
                   int64_t cols, bool add, Workspace& space) {
  constexpr void (*tiles[kTileRows])(int64_t, int64_t, int64_t, Workspace&) = {
      multiply_tile<1>, multiply_tile<2>, multiply_tile<3>,
      multiply_tile<4>, multiply_tile<5>, multiply_tile<6>};
  const Decoder decoder_a(product.a.format), decoder_b(product.b.format);
  for (int64_t r = 0; r < rows; ++r) std::fill_n(space.y[r], round_up(cols, kTileCols), 0.0f);
  for (int64_t block = 0; block * kBlock < product.K; ++block) {
    const int64_t block_k = std::min(kBlock, product.K - block * kBlock);
    decode_rows(product.a, decoder_a, row, rows, block, block_k, space);
    transpose_columns(product.b, decoder_b, col, cols, block, block_k, space);
    for (int64_t c = 0; c < cols; c += kTileCols)
      for (int64_t r = 0; r < rows; r += kTileRows)
        tiles[std::min(kTileRows, rows - r) - 1](r, c, ceil_div(block_k, 2), space);
  }
  const auto bias = bias_of(product);
  for (int64_t r = 0; r < rows; ++r) {
    add_low_rank(product.low, row + r, col, cols, product.out.cols, space.y[r]);
    finish_row(space.y[r], cols, product.bias ? bias.data() + col : nullptr, add, product.out.dtype,
               element_of(product.out, row + r, col));
  }
}

// All parts of all products are one loop's tasks, so small groups do not wait for each other.
void multiply_in_bf16(const std::vector<ScaledProduct>& products, bool add) {
  std::vector<int64_t> first_part{0};
  for (const ScaledProduct& product : products)
    first_part.push_back(first_part.back() +
                         ceil_div(product.out.rows, kRows) * ceil_div(product.out.cols, kCols));
  torch::stable::parallel_for(0, first_part.back(), 1, [&](int64_t begin, int64_t end) {
    const auto space = std::make_unique_for_overwrite<Workspace>();
    for (int64_t part = begin; part < end; ++part) {
      const int64_t e =
          std::upper_bound(first_part.begin(), first_part.end(), part) - first_part.begin() - 1;
      const Matrix& out = products[e].out;
      const int64_t col_parts = ceil_div(out.cols, kCols), index = part - first_part[e];
      const int64_t row = index / col_parts * kRows, col = index % col_parts * kCols;
      multiply_part(products[e], row, std::min(kRows, out.rows - row), col,
                    std::min(kCols, out.cols - col), add, *space);
    }
  });
}
#endif

}  // namespace

void multiply(const std::vector<ScaledProduct>& products, bool add) {
#ifdef BF16_UNITS
  if (has_bf16_units()) return multiply_in_bf16(products, add);
#endif
  for (const ScaledProduct& product : products) multiply_in_float(product, add);
}

}  // namespace grouped_linear::cpu
