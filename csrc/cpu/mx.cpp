// MXFP8: blocks of 32 elements along a row, or of 32 rows of a group, with a power of two for a
// scale. One pass over x for whatever is asked for.

#include <bit>

#include "checks.h"
#include "cpu/tiles.h"
#include "ops.h"

namespace grouped_linear::cpu {
namespace {

constexpr int64_t kParts = kBlock / kMxBlock;

// For the amaxima of a tile's parts: the E8M0 scale, the smallest power of two that brings amax to at
// most 448, kept where every e4m3 number times it is a finite bf16 number (2^-124 .. 2^119), as an
// exponent and as a number, and the factor that quantizes: its inverse, but 1 where all is zero, to
// keep a tile's factors in the range that Tile::quantize is fast in.
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

// The scales of a tile's parts, and the factors that quantize them.
struct MxScales {
  uint8_t exponents[kBlock * kParts];
  float scale[kBlock * kParts], factor[kBlock * kParts];

  explicit MxScales(const float* amax) { mx_scales(amax, exponents, scale, factor); }
};

// Scales, or values rounded to what FP8 keeps of them; null for what is not asked for.
struct MxTargets : TileTargets {
  uint8_t *scale = nullptr, *scale_t = nullptr;        // [T, ceil(K / 32)], [Tp / 128, K, 4]
  uint16_t *rowwise = nullptr, *columnwise = nullptr;  // [T, K]

  explicit MxTargets(int64_t features) : TileTargets{features} {}

  void foresee(const RowBlock& block, int64_t col, int64_t cols, Ahead& ahead) const {
    TileTargets::foresee(block, col, cols, ahead);
    for (int i = 0; i < 4; ++i)  // rows of twice as many bytes
      if (uint16_t* rounded = i < 2 ? rowwise : columnwise) {
        ByteRows half = rounded_rows(rounded, block, col);
        half.first += i % 2 * kBlock;
        ahead.foresee_writes(i, half, block.end - block.begin);
      }
  }
  ByteRows rounded_rows(uint16_t* rounded, const RowBlock& block, int64_t col) const {
    return bytes_at(reinterpret_cast<uint8_t*>(rounded + block.begin * features + col),
                    features * sizeof(uint16_t));
  }

  void write(Tile& tile, const RowBlock& block, int64_t col, int64_t cols) const {
    float row_amax[kBlock * kParts], col_amax[kBlock * kParts];
    tile.find_amax(row_amax, col_amax, kMxBlock);
    const MxScales of_rows(row_amax), of_cols(col_amax);
    if (rowwise) tile.round(true, of_rows.factor, of_rows.scale, rounded_rows(rowwise, block, col));
    if (columnwise)
      tile.round(false, of_cols.factor, of_cols.scale, rounded_rows(columnwise, block, col));
    if (!q && !q_t) return;

    ByteTile by_cols;
    tile.quantize(of_rows.factor, rows(block, col), q_t ? of_cols.factor : nullptr,
                  q_t ? &by_cols : nullptr, kMxBlock);
    if (q) {
      const int64_t stride = ceil_div(features, kMxBlock);
      for (int64_t r = 0; r < block.end - block.begin; ++r)
        std::memcpy(scale + (block.begin + r) * stride + col / kMxBlock,
                    of_rows.exponents + r * kParts, ceil_div(cols, kMxBlock));
    }
    if (q_t) {
      store_turned(by_cols, block, col, cols, tile.filled());
      uint8_t* turned = scale_t + (block.index * features + col) * kParts;
      for (int64_t c = 0; c < cols; ++c)
        for (int64_t p = 0; p < kParts; ++p)
          turned[c * kParts + p] = of_cols.exponents[p * kBlock + c];
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

void refresh_weight_mx_(const std::vector<Tensor>& w, const std::optional<Tensor>& refresh,
                        const Tensor& w_rowwise, const std::optional<Tensor>& w_columnwise) {
  check_refresh_weight_mx(w, refresh, w_rowwise, w_columnwise);
  if (refresh && !*refresh->const_data_ptr<bool>()) return;
  const GroupedRows rows(w);
  MxTargets targets(rows.features);
  targets.rowwise = pointer_if<uint16_t>(true, w_rowwise);
  targets.columnwise = pointer_if<uint16_t>(w_columnwise);
  quantize_tiles(rows.dtype, rows.blocks, targets, rows.reader());
}

}  // namespace grouped_linear::cpu
