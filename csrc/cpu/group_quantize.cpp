// One pass over x: a 128 x 128 tile is read once and gives its rowwise and columnwise data, both
// scales, and its share of the bias gradient.

#include "../checks.h"
#include "../ops.h"
#include "tile.h"

namespace grouped_linear::cpu {
namespace {

// bias_grad[e] = the sums of group e's blocks, added from the first block to the last.
void add_block_sums(const std::vector<RowBlock>& blocks, const std::vector<float>& block_sums,
                    const Tensor& bias_grad) {
  const int64_t features = bias_grad.size(1);
  float* grad = bias_grad.mutable_data_ptr<float>();
  for (const RowBlock& block : blocks)
    for (int64_t c = 0; c < features; ++c)
      grad[block.group * features + c] += block_sums[block.index * features + c];
}

// Calls visit(block, first column, tile) for every tile of every group, in parallel.
template <typename Visit>
void for_each_tile(const Tensor& x, const std::vector<RowBlock>& blocks, const Visit& visit) {
  const int64_t features = x.size(1), col_blocks = ceil_div(features, kBlock);
  const int64_t tiles = static_cast<int64_t>(blocks.size()) * col_blocks;
  const ScalarType dtype = x.scalar_type();
  const int64_t element = element_size(dtype), row_bytes = x.stride(0) * element;
  const char* values = static_cast<const char*>(x.data_ptr());
  torch::stable::parallel_for(0, tiles, 1, [&](int64_t begin, int64_t end) {
    Tile tile(dtype);
    for (int64_t t = begin; t < end; ++t) {
      const RowBlock& block = blocks[t / col_blocks];
      const int64_t col = t % col_blocks * kBlock, cols = std::min(kBlock, features - col);
      const char* first = values + block.begin * row_bytes + col * element;
      tile.fill(block.end - block.begin, cols, [&](int64_t r, void* tile_row) {
        const char* row = first + r * row_bytes;
        if (dtype == ScalarType::BFloat16)
          std::memcpy(tile_row, row, cols * element);
        else
          load_row(row, dtype, cols, static_cast<float*>(tile_row));
        prefetch_row(row + kBlock * element, kBlock * element);  // the next tile's
      });
      visit(block, col, tile);
    }
  });
}

}  // namespace

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> group_quantize(
    const Tensor& x_in, const Tensor& offs, double amax_epsilon, bool power_of_two_scales,
    bool rowwise, bool columnwise, bool bias_grad) {
  check_group_quantize(x_in, offs, amax_epsilon, rowwise, columnwise);
  const Tensor x = inner_contiguous(x_in);
  const int64_t T = x.size(0), K = x.size(1), E = offs.size(0);
  const auto blocks = row_blocks(group_starts("group_quantize", offs, T));

  using Shape = std::vector<int64_t>;
  const auto output = [&x](bool wanted, const Shape& shape, ScalarType dtype) {
    return new_output(x, wanted ? shape : Shape{0}, dtype);
  };
  const int64_t scale_stride = round_up(T, kScaleRowMultiple), Tp = padded_rows(T, E);
  Tensor q = output(rowwise, {T, K}, ScalarType::Float8_e4m3fn);
  Tensor scale = output(rowwise, {ceil_div(K, kBlock), scale_stride}, ScalarType::Float);
  Tensor q_t = output(columnwise, {Tp / kBlock, K, kBlock}, ScalarType::Float8_e4m3fn);
  Tensor scale_t = output(columnwise, {Tp / kBlock, K}, ScalarType::Float);
  Tensor grad = output(bias_grad, {E, K}, ScalarType::Float);

  auto* q_bytes = static_cast<uint8_t*>(q.data_ptr());
  auto* q_t_bytes = static_cast<uint8_t*>(q_t.data_ptr());
  auto* scales = static_cast<float*>(scale.data_ptr());
  auto* scales_t = static_cast<float*>(scale_t.data_ptr());
  std::vector<float> block_sums(bias_grad ? blocks.size() * K : 0);

  const ScaleRule rule{static_cast<float>(amax_epsilon), power_of_two_scales};
  for_each_tile(x, blocks, [&](const RowBlock& block, int64_t col, Tile& tile) {
    const int64_t rows = block.end - block.begin, cols = std::min(kBlock, K - col);
    float row_amax[kBlock], col_amax[kBlock], factor[kBlock], scale_of[kBlock];
    ByteTile bytes;
    tile.find_amax(row_amax, col_amax);
    if (rowwise) {
      block_scales(row_amax, rule, factor, scale_of);
      std::memcpy(&scales[col / kBlock * scale_stride + block.begin], scale_of, rows * 4);
      tile.quantize_by_rows(factor, bytes);
      bytes.store(q_bytes + block.begin * K + col, K, rows, cols);
    }
    if (columnwise) {
      block_scales(col_amax, rule, factor, scale_of);
      std::memcpy(&scales_t[block.index * K + col], scale_of, cols * 4);
      tile.quantize_by_cols(factor, bytes);
      bytes.store_turned(q_t_bytes + (block.index * K + col) * kBlock, kBlock, kBlock, cols);
    }
    if (bias_grad) tile.col_sums(&block_sums[block.index * K + col]);
  });

  if (bias_grad) {
    torch::stable::zero_(grad);
    add_block_sums(blocks, block_sums, grad);
  }
  return {q, scale, q_t, scale_t, grad};
}

Tensor grouped_bias_grad(const Tensor& dy_in, const Tensor& offs) {
  check_grouped_bias_grad(dy_in, offs);
  const Tensor dy = inner_contiguous(dy_in);
  const int64_t N = dy.size(1);
  const auto blocks = row_blocks(group_starts("grouped_bias_grad", offs, dy.size(0)));

  std::vector<float> block_sums(blocks.size() * N);
  for_each_tile(dy, blocks, [&](const RowBlock& block, int64_t col, const Tile& tile) {
    tile.col_sums(&block_sums[block.index * N + col]);
  });
  Tensor grad =
      torch::stable::new_zeros(dy, std::vector<int64_t>{offs.size(0), N}, ScalarType::Float);
  add_block_sums(blocks, block_sums, grad);
  return grad;
}

}  // namespace grouped_linear::cpu
