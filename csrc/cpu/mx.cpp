// SPDX-License-Identifier: Apache-2.0
// MXFP8: a power-of-two scale for each block of 32 elements of a row, or of 32 rows of a group. One
// pass over x computes all requested outputs.

#include <bit>

#include "checks.h"
#include "cpu/tiles.h"
#include "ops.h"

namespace grouped_linear::cpu {
namespace {

constexpr int64_t kParts = kBlock / kMxBlock;

// The scales of a tile's parts from their amaxes. The E8M0 scale is the smallest power of two that
// brings amax to at most 448, clamped to 2^-124 .. 2^119, where every e4m3 number times it is a
// finite bf16 number. It is returned as an exponent and as a number. The factor that quantizes is
// its inverse, but 1 where amax is 0, to keep the factors in the range in which Tile::quantize is
// fast.
GROUPED_LINEAR_EVERY_WIDTH void mx_scales(const float* amax, uint8_t* exponents, float* scale,
                                          float* factor) {
  for (int64_t i = 0; i < kBlock * kParts; ++i) {
    // amax = m * 2^e with 1 <= m < 2 and 448 = 1.75 * 2^8: e - 8, and one more where m > 1.75.
    const uint32_t bits = std::bit_cast<uint32_t>(amax[i]);
    const auto exponent = static_cast<int32_t>((bits + 0x1fffff) >> 23) - 8;
    const uint32_t e = std::clamp(exponent, 127 - 124, 127 + 119);
    exponents[i] = static_cast<uint8_t>(e);
    scale[i] = std::bit_cast<float>(e << 23);
    factor[i] = amax[i] == 0 ? 1.0f : std::bit_cast<float>((254 - e) << 23);
  }
}

struct MxScales {
  uint8_t exponents[kBlock * kParts];
  float scale[kBlock * kParts], factor[kBlock * kParts];

  explicit MxScales(const float* amax) { mx_scales(amax, exponents, scale, factor); }
};

// Codes and scales, or values rounded to what e4m3 keeps of them; null for what is not requested.
struct MxTargets : TileTargets {
  uint8_t *scale = nullptr, *scale_t = nullptr;        // [T, ceil(K / 32)], [Tp / 128, K, 4]
  uint16_t *rowwise = nullptr, *columnwise = nullptr;  // [T, K]

  explicit MxTargets(int64_t features) : TileTargets{features} {}

  void add_writes(const RowBlock& block, int64_t col, int64_t cols, TilePrefetch& next) const {
    TileTargets::add_writes(block, col, cols, next);
    for (int i = 0; i < 4; ++i)  // rows of bf16 are two times kBlock bytes
      if (uint16_t* rounded = i < 2 ? rowwise : columnwise) {
        ByteRows half = rounded_rows(rounded, block, col);
        half.first += i % 2 * kBlock;
        next.add_writes(i, half, block.end - block.begin);
      }
  }
  ByteRows rounded_rows(uint16_t* rounded, const RowBlock& block, int64_t col) const {
    return bytes_at(reinterpret_cast<uint8_t*>(rounded + block.begin * features + col),
                    features * sizeof(uint16_t));
  }

  void write(Tile& tile, const RowBlock& block, int64_t col, int64_t cols) const {
    float row_amax[kBlock * kParts], col_amax[kBlock * kParts];
    tile.find_amax(row_amax, col_amax, kMxBlock);
    const MxScales row_scales(row_amax), col_scales(col_amax);
    if (rowwise)
      tile.round(true, row_scales.factor, row_scales.scale, rounded_rows(rowwise, block, col));
    if (columnwise)
      tile.round(false, col_scales.factor, col_scales.scale, rounded_rows(columnwise, block, col));
    if (!q && !q_t) return;

    ByteTile col_codes;
    tile.quantize(row_scales.factor, rows(block, col), q_t ? col_scales.factor : nullptr,
                  q_t ? &col_codes : nullptr, kMxBlock);
    if (q) {
      const int64_t stride = ceil_div(features, kMxBlock);
      for (int64_t r = 0; r < block.end - block.begin; ++r)
        std::memcpy(scale + (block.begin + r) * stride + col / kMxBlock,
                    row_scales.exponents + r * kParts, ceil_div(cols, kMxBlock));
    }
    if (q_t) {
      store_transposed(col_codes, block, col, cols, tile.filled());
      uint8_t* exponents = scale_t + (block.index * features + col) * kParts;
      for (int64_t c = 0; c < cols; ++c)
        for (int64_t p = 0; p < kParts; ++p)
          exponents[c * kParts + p] = col_scales.exponents[p * kBlock + c];
    }
  }
};

}  // namespace

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> group_quantize_mx(const Tensor& x,
                                                                     const Tensor& offs,
                                                                     bool rowwise, bool columnwise,
                                                                     bool bias_grad) {
  const char* op = "group_quantize_mx";
  check_group_quantize_mx(op, x, offs, rowwise, columnwise);
  const GroupedRows rows(op, x, offs);
  const int64_t T = x.size(0), K = x.size(1), E = offs.size(0);

  constexpr ScalarType e4m3 = ScalarType::Float8_e4m3fn, e8m0 = ScalarType::Float8_e8m0fnu;
  const int64_t blocks = padded_rows(T, E) / kBlock;
  const Tensor q = output_if(rowwise, x, {T, K}, e4m3);
  const Tensor scale = output_if(rowwise, x, {T, ceil_div(K, kMxBlock)}, e8m0);
  const Tensor q_t = output_if(columnwise, x, {blocks, K, kBlock}, e4m3);
  const Tensor scale_t = output_if(columnwise, x, {blocks, K, kParts}, e8m0);
  const Tensor grad = output_if(bias_grad, x, {E, K}, ScalarType::Float);

  MxTargets targets(K);
  targets.q = pointer_if<uint8_t>(rowwise, q);
  targets.scale = pointer_if<uint8_t>(rowwise, scale);
  targets.q_t = pointer_if<uint8_t>(columnwise, q_t);
  targets.scale_t = pointer_if<uint8_t>(columnwise, scale_t);
  quantize_and_sum(rows.dtype, rows.blocks, targets, E, pointer_if<float>(bias_grad, grad),
                   rows.reader());
  return {q, scale, q_t, scale_t, grad};
}

std::tuple<Tensor, Tensor, Tensor> group_round_mx(const Tensor& x, const Tensor& offs, bool rowwise,
                                                  bool columnwise, bool bias_grad) {
  const char* op = "group_round_mx";
  check_group_quantize_mx(op, x, offs, rowwise, columnwise);
  const GroupedRows rows(op, x, offs);
  const int64_t T = x.size(0), K = x.size(1), E = offs.size(0);

  const Tensor x_rowwise = output_if(rowwise, x, {T, K}, ScalarType::BFloat16);
  const Tensor x_columnwise = output_if(columnwise, x, {T, K}, ScalarType::BFloat16);
  const Tensor grad = output_if(bias_grad, x, {E, K}, ScalarType::Float);

  MxTargets targets(K);
  targets.rowwise = pointer_if<uint16_t>(rowwise, x_rowwise);
  targets.columnwise = pointer_if<uint16_t>(columnwise, x_columnwise);
  quantize_and_sum(rows.dtype, rows.blocks, targets, E, pointer_if<float>(bias_grad, grad),
                   rows.reader());
  return {x_rowwise, x_columnwise, grad};
}

void refresh_weight_mx_(const Tensor& w_rowwise, const std::optional<Tensor>& w_columnwise,
                        const std::vector<Tensor>& w, const std::optional<Tensor>& refresh) {
  check_refresh_weight_mx(w, refresh, w_rowwise, w_columnwise);
  if (refresh && !*refresh->const_data_ptr<bool>()) return;
  const GroupedRows rows(w);
  MxTargets targets(rows.features);
  targets.rowwise = pointer_if<uint16_t>(true, w_rowwise);
  targets.columnwise = pointer_if<uint16_t>(w_columnwise);
  quantize_tiles(rows.dtype, rows.blocks, targets, rows.reader());
}

}  // namespace grouped_linear::cpu
