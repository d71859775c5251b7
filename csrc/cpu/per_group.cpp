#include "per_group.h"

#include <bit>
#include <cstring>

#include "fp8.h"

namespace grouped_linear::cpu {
namespace {

GROUPED_LINEAR_EVERY_WIDTH uint32_t finite_amax(const float* row, int64_t n) {
  uint32_t amax = 0;
  for (int64_t i = 0; i < n; ++i) {
    const uint32_t magnitude = std::bit_cast<uint32_t>(row[i]) & kMagnitude;
    amax = std::max(amax, magnitude < kInfinity ? magnitude : 0);
  }
  return amax;
}

GROUPED_LINEAR_EVERY_WIDTH uint32_t any_amax(const float* row, int64_t n) {
  uint32_t amax = 0;
  for (int64_t i = 0; i < n; ++i)
    amax = std::max(amax, std::bit_cast<uint32_t>(row[i]) & kMagnitude);
  return std::min(amax, kInfinity);
}

GROUPED_LINEAR_EVERY_WIDTH void add_row(const float* row, float* sums) {
  for (int64_t c = 0; c < kBlock; ++c) sums[c] += row[c];
}

GROUPED_LINEAR_EVERY_WIDTH void quantize_e4m3(const float* row, float factor, uint8_t* q) {
  for (int64_t c = 0; c < kBlock; ++c) q[c] = quantize<E4m3>(row[c], factor);
}

GROUPED_LINEAR_EVERY_WIDTH void quantize_e5m2(const float* row, float factor, uint8_t* q) {
  for (int64_t c = 0; c < kBlock; ++c) q[c] = quantize<E5m2>(row[c], factor);
}

// Sixteen rows of bytes -> sixteen bytes of each of 128 columns.
GROUPED_LINEAR_EVERY_WIDTH void turn_strip(const uint8_t rows[16][kBlock],
                                           uint8_t columns[kBlock][16]) {
  for (int64_t c = 0; c < kBlock; ++c)
    for (int64_t r = 0; r < 16; ++r) columns[c][r] = rows[r][c];
}

}  // namespace

GroupedRows::GroupedRows(const char* op, const Tensor& x, const Tensor& offs)
    : values(inner_contiguous(x)),
      groups(offs.size(0)),
      features(x.size(1)),
      row_bytes(values.stride(0) * element_size(x.scalar_type())),
      pitch(kBlock),
      is_weight(false),
      blocks(row_blocks(group_starts(op, offs, x.size(0)))) {}

GroupedRows::GroupedRows(const Tensor& weight)
    : values(torch::stable::contiguous(weight)),
      groups(weight.size(0)),
      features(weight.size(2)),
      row_bytes(features * element_size(weight.scalar_type())),
      pitch(weight.size(1)),
      is_weight(true) {
  std::vector<int64_t> starts;
  for (int64_t e = 0; e <= groups; ++e) starts.push_back(e * pitch);
  blocks = row_blocks(starts);
}

uint8_t* GroupedRows::column_of(uint8_t* q_t, const RowBlock& block, int64_t col) const {
  if (!is_weight) return q_t + (block.index * features + col) * kBlock;
  return q_t + (block.group * features + col) * pitch + block.begin - block.group * pitch;
}

std::vector<uint32_t> group_amax(const GroupedRows& rows, bool finite_only) {
  const auto* first = static_cast<const char*>(rows.values.data_ptr());
  const ScalarType dtype = rows.values.scalar_type();
  std::vector<uint32_t> block_amax(rows.blocks.size());
  torch::stable::parallel_for(0, rows.blocks.size(), 1, [&](int64_t begin, int64_t end) {
    std::vector<float> row(rows.features);
    for (int64_t b = begin; b < end; ++b) {
      uint32_t amax = 0;
      for (int64_t t = rows.blocks[b].begin; t < rows.blocks[b].end; ++t) {
        load_row(first + t * rows.row_bytes, dtype, rows.features, row.data());
        amax = std::max(amax, (finite_only ? finite_amax : any_amax)(row.data(), rows.features));
      }
      block_amax[b] = amax;
    }
  });
  std::vector<uint32_t> amax(rows.groups);
  for (const RowBlock& block : rows.blocks)
    amax[block.group] = std::max(amax[block.group], block_amax[block.index]);
  return amax;
}

void quantize_per_group(const GroupedRows& rows, const std::vector<float>& factor,
                        ScalarType format, const PerGroupOutputs& out) {
  const auto* first = static_cast<const char*>(rows.values.data_ptr());
  const ScalarType dtype = rows.values.scalar_type();
  const auto quantize_row = format == E5m2::kType ? quantize_e5m2 : quantize_e4m3;
  const int64_t K = rows.features, col_blocks = ceil_div(K, kBlock);
  const auto blocks = static_cast<int64_t>(rows.blocks.size());
  std::vector<float> block_sums(out.bias_grad ? blocks * K : 0);
  std::vector<uint32_t> tile_amax(out.amax ? blocks * col_blocks : 0);

  torch::stable::parallel_for(0, blocks * col_blocks, 1, [&](int64_t begin, int64_t end) {
    alignas(64) float row[kBlock], eight[kBlock];
    alignas(64) uint8_t strip[16][kBlock], columns[kBlock][16];
    for (int64_t t = begin; t < end; ++t) {
      const RowBlock& block = rows.blocks[t / col_blocks];
      const int64_t col = t % col_blocks * kBlock, cols = std::min(kBlock, K - col);
      const int64_t height = block.end - block.begin, written = rows.is_weight ? height : kBlock;
      float sums[kBlock] = {};
      uint32_t amax = 0;
      std::memset(row, 0, sizeof(row));
      for (int64_t r = 0; r < written; r += 16) {
        for (int64_t i = 0; i < 16; ++i) {
          if (r + i >= height) {
            std::memset(strip[i], 0, kBlock);
            continue;
          }
          load_row(first + (block.begin + r + i) * rows.row_bytes + col * element_size(dtype),
                   dtype, cols, row);
          if (out.amax) amax = std::max(amax, any_amax(row, cols));
          // Rows are added in eights, then the eights, as grouped_bias_grad adds them.
          if (i % 8 == 0) std::memset(eight, 0, sizeof(eight));
          if (out.bias_grad) add_row(row, eight);
          if (out.bias_grad && (i % 8 == 7 || r + i + 1 == height)) add_row(eight, sums);
          quantize_row(row, factor[block.group], strip[i]);
          if (out.q) std::memcpy(out.q + (block.begin + r + i) * K + col, strip[i], cols);
        }
        if (!out.q_t) continue;
        turn_strip(strip, columns);
        uint8_t* column = rows.column_of(out.q_t, block, col) + r;
        for (int64_t c = 0; c < cols; ++c) std::memcpy(column + c * rows.pitch, columns[c], 16);
      }
      if (out.bias_grad)
        std::memcpy(&block_sums[block.index * K + col], sums, cols * sizeof(float));
      if (out.amax) tile_amax[t] = amax;
    }
  });

  if (out.bias_grad) std::memset(out.bias_grad, 0, rows.groups * K * sizeof(float));
  for (const RowBlock& block : rows.blocks) {
    // Added from the first block to the last, as grouped_bias_grad adds them.
    for (int64_t c = 0; out.bias_grad && c < K; ++c)
      out.bias_grad[block.group * K + c] += block_sums[block.index * K + c];
    for (int64_t c = 0; out.amax && c < col_blocks; ++c) {
      const uint32_t before = std::bit_cast<uint32_t>(out.amax[block.group]);
      out.amax[block.group] =
          std::bit_cast<float>(std::max(before, tile_amax[block.index * col_blocks + c]));
    }
  }
}

}  // namespace grouped_linear::cpu
