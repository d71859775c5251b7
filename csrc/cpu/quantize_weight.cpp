// SPDX-License-Identifier: Apache-2.0
// 128 x 128 blocks of a weight. One pass writes both layouts, which share bytes and scales.

#include <algorithm>

#include "checks.h"
#include "cpu/tiles.h"
#include "ops.h"

namespace grouped_linear::cpu {
namespace {

struct WeightTargets : TileTargets {
  ScaleRule rule;
  float* scale;  // [E, ceil(N / 128), ceil(K / 128)]

  void write(Tile& tile, const RowBlock& block, int64_t col, int64_t cols) const {
    float row_amax[kBlock], col_amax[kBlock], factor[kBlock];
    tile.find_amax(row_amax, col_amax);
    const BlockScale weight_scale =
        block_scale(*std::max_element(row_amax, row_amax + kBlock), rule);
    scale[block.index * ceil_div(features, kBlock) + col / kBlock] = weight_scale.scale;

    ByteTile bytes;
    std::fill_n(factor, kBlock, weight_scale.factor);
    // One factor quantizes the whole block. Where no rows are requested it is the columns' factor.
    tile.quantize(factor, rows(block, col), q ? nullptr : factor, q_t ? &bytes : nullptr);
    if (q_t) store_transposed(bytes, block, col, cols, tile.filled());
  }
};

// q, q_t: null if they are not requested.
void quantize(const GroupedRows& rows, ScaleRule rule, std::optional<int64_t> mxfp4_dim, uint8_t* q,
              const Tensor& scale, uint8_t* q_t) {
  const WeightTargets targets{
      {rows.features, q, q_t, rows.expert_rows}, rule, static_cast<float*>(scale.data_ptr())};
  if (!mxfp4_dim) return quantize_tiles(rows.dtype, rows.blocks, targets, rows.reader());
  const int64_t col_blocks = ceil_div(rows.features, kBlock);
  const auto tiles = static_cast<int64_t>(rows.blocks.size()) * col_blocks;
  torch::stable::parallel_for(0, tiles, 1, [&](int64_t begin, int64_t end) {
    std::vector<float> w(kBlock * kBlock);
    ByteTile bytes;
    for (int64_t i = begin; i < end; ++i) {
      const RowBlock& block = rows.blocks[i / col_blocks];
      const int64_t col = i % col_blocks * kBlock, cols = std::min(kBlock, rows.features - col);
      const int64_t count = block.end - block.begin;
      for (int64_t r = 0; r < count; ++r)
        load_row(rows.row(block, r) + col * rows.element, rows.dtype, cols, &w[r * kBlock]);
      targets.scale[i] = encode_mxfp4(w.data(), count, cols, *mxfp4_dim, bytes);
      if (q) targets.store(bytes, block, col, cols);
      if (q_t) targets.store_transposed(bytes, block, col, cols, count);
    }
  });
}

std::tuple<Tensor, Tensor, Tensor> quantize_new(const std::vector<Tensor>& w, double amax_epsilon,
                                                bool power_of_two_scales, bool columnwise,
                                                bool rowwise = true,
                                                std::optional<int64_t> mxfp4_dim = std::nullopt) {
  const GroupedRows rows(w);
  const int64_t E = rows.groups, N = rows.expert_rows, K = rows.features;
  constexpr ScalarType e4m3 = ScalarType::Float8_e4m3fn;
  const Tensor q = output_if(rowwise, w[0], {E, N, K}, e4m3);
  const Tensor scale =
      new_output(w[0], {E, ceil_div(N, kBlock), ceil_div(K, kBlock)}, ScalarType::Float);
  const Tensor q_t = output_if(columnwise, w[0], {E, K, N}, e4m3);
  quantize(rows, {static_cast<float>(amax_epsilon), power_of_two_scales}, mxfp4_dim,
           pointer_if<uint8_t>(rowwise, q), scale, pointer_if<uint8_t>(columnwise, q_t));
  return {q, scale, q_t};
}

}  // namespace

std::tuple<Tensor, Tensor, Tensor> quantize_weight(const Tensor& w, double amax_epsilon,
                                                   bool power_of_two_scales, bool columnwise,
                                                   bool rowwise, std::optional<int64_t> mxfp4_dim) {
  check_quantize_weight("quantize_weight", w, amax_epsilon, mxfp4_dim);
  check_layouts("quantize_weight", rowwise, columnwise);
  return quantize_new({w}, amax_epsilon, power_of_two_scales, columnwise, rowwise, mxfp4_dim);
}

std::tuple<Tensor, Tensor, Tensor> quantize_weight_list(const std::vector<Tensor>& w,
                                                        double amax_epsilon,
                                                        bool power_of_two_scales, bool columnwise) {
  check_quantize_weight_list(w, amax_epsilon);
  return quantize_new(w, amax_epsilon, power_of_two_scales, columnwise);
}

void refresh_weight_(const Tensor& q, const Tensor& scale, const std::optional<Tensor>& q_t,
                     const std::vector<Tensor>& w, const std::optional<Tensor>& refresh,
                     double amax_epsilon, bool power_of_two_scales,
                     std::optional<int64_t> mxfp4_dim) {
  check_refresh_weight(w, refresh, q, scale, q_t, amax_epsilon, mxfp4_dim);
  if (refresh && !*refresh->const_data_ptr<bool>()) return;
  quantize(GroupedRows(w), {static_cast<float>(amax_epsilon), power_of_two_scales}, mxfp4_dim,
           static_cast<uint8_t*>(q.data_ptr()), scale, pointer_if<uint8_t>(q_t));
}

Tensor transpose_weight(const Tensor& q_in) {
  check_transpose_weight(q_in);
  const Tensor q = as_dense(q_in);
  const int64_t E = q.size(0), N = q.size(1), K = q.size(2);
  const Tensor q_t = new_output(q, {E, K, N}, q.scalar_type());
  const auto* from = static_cast<const uint8_t*>(q.const_data_ptr());
  auto* to = static_cast<uint8_t*>(q_t.data_ptr());
  const int64_t row_blocks = ceil_div(N, kBlock), col_blocks = ceil_div(K, kBlock);
  torch::stable::parallel_for(0, E * row_blocks * col_blocks, 1, [&](int64_t begin, int64_t end) {
    ByteTile bytes;
    for (int64_t tile = begin; tile < end; ++tile) {
      const int64_t e = tile / (row_blocks * col_blocks);
      const int64_t n = tile / col_blocks % row_blocks * kBlock, k = tile % col_blocks * kBlock;
      const int64_t rows = std::min(kBlock, N - n), cols = std::min(kBlock, K - k);
      for (int64_t r = 0; r < rows; ++r)
        std::memcpy(bytes.bytes[r], from + (e * N + n + r) * K + k, cols);
      bytes.store_transposed({to + (e * K + k) * N + n, N}, rows, rows, cols);
    }
  });
  return q_t;
}

void quantize_rows_and_weight(const Tensor& x, const Tensor& offs, const Tensor& w,
                              double amax_epsilon, bool power_of_two_scales, const Quantized& x_out,
                              const QuantizedWeight& w_out) {
  quantize_rows(x, offs, amax_epsilon, power_of_two_scales, x_out);
  refresh_weight_(w_out.q, w_out.scale, w_out.q_t, {w}, std::nullopt, amax_epsilon,
                  power_of_two_scales, std::nullopt);
}

}  // namespace grouped_linear::cpu
