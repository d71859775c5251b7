// SPDX-License-Identifier: Apache-2.0
#include "cpu/per_group.h"

#include <cmath>

#include "cpu/fp8.h"

namespace grouped_linear::cpu {
namespace {

struct PerGroupTargets : TileTargets {
  const float* factor;  // [E]
  ScalarType format;
  float* tile_amax = nullptr;  // [blocks, ceil(K / 128)]

  void write(Tile& tile, const RowBlock& block, int64_t col, int64_t cols) const {
    float row_amax[kBlock], col_amax[kBlock];
    tile.find_amax(row_amax, col_amax);
    if (tile_amax)  // a tile that is not finite has amax infinity
      tile_amax[block.index * ceil_div(features, kBlock) + col / kBlock] =
          tile.finite() ? *std::max_element(row_amax, row_amax + kBlock) : INFINITY;

    ByteTile bytes;
    tile.quantize(factor[block.group], format, bytes);
    if (q) store(bytes, block, col, cols);
    if (q_t) store_transposed(bytes, block, col, cols, tile.filled());
  }
};

}  // namespace

std::vector<float> finite_amax_of_groups(const GroupedRows& rows) {
  std::vector<float> block_amax(rows.blocks.size()), amax(rows.groups);
  torch::stable::parallel_for(0, rows.blocks.size(), 1, [&](int64_t begin, int64_t end) {
    for (int64_t b = begin; b < end; ++b)
      for (int64_t r = 0; r < rows.blocks[b].end - rows.blocks[b].begin; ++r)
        block_amax[b] = std::max(
            block_amax[b], finite_amax(rows.row(rows.blocks[b], r), rows.dtype, rows.features));
  });
  for (const RowBlock& block : rows.blocks)
    amax[block.group] = std::max(amax[block.group], block_amax[block.index]);
  return amax;
}

void quantize_per_group(const GroupedRows& rows, const std::vector<float>& factor,
                        ScalarType format, const PerGroupOutputs& out) {
  const int64_t col_blocks = ceil_div(rows.features, kBlock);
  std::vector<float> tile_amax(out.amax ? rows.blocks.size() * col_blocks : 0);
  PerGroupTargets targets{{rows.features, out.q, out.q_t, rows.expert_rows}, factor.data(), format};
  if (out.amax) targets.tile_amax = tile_amax.data();
  quantize_and_sum(rows.dtype, rows.blocks, targets, rows.groups, out.bias_grad, rows.reader());

  for (const RowBlock& block : rows.blocks)
    for (int64_t c = 0; out.amax && c < col_blocks; ++c) {
      const auto before = std::bit_cast<uint32_t>(out.amax[block.group]);
      const auto tile = std::bit_cast<uint32_t>(tile_amax[block.index * col_blocks + c]);
      out.amax[block.group] = std::bit_cast<float>(std::max(before, tile));
    }
}

}  // namespace grouped_linear::cpu
