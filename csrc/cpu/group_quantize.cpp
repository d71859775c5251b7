// One pass over what is quantized: a 128 x 128 tile is read or computed once and gives its rowwise
// and columnwise data, both scales, and its share of the bias gradient.

#include <algorithm>

#include "../checks.h"
#include "../ops.h"
#include "swiglu.h"
#include "tile.h"

namespace grouped_linear::cpu {
namespace {

// What is asked for of x [T, K] in E groups; what is not has no elements.
struct Results {
  int64_t features;
  Tensor q, scale, q_t, scale_t, bias_grad;

  Results(const Tensor& like, int64_t T, int64_t K, int64_t E, bool rowwise, bool columnwise,
          bool sums)
      : features(K) {
    using Shape = std::vector<int64_t>;
    const auto output = [&like](bool wanted, const Shape& shape, ScalarType dtype) {
      return new_output(like, wanted ? shape : Shape{0}, dtype);
    };
    const int64_t k_blocks = ceil_div(K, kBlock), blocks = padded_rows(T, E) / kBlock;
    q = output(rowwise, {T, K}, ScalarType::Float8_e4m3fn);
    scale = output(rowwise, {k_blocks, round_up(T, kScaleRowMultiple)}, ScalarType::Float);
    q_t = output(columnwise, {blocks, K, kBlock}, ScalarType::Float8_e4m3fn);
    scale_t = output(columnwise, {blocks, K}, ScalarType::Float);
    bias_grad = output(sums, {E, K}, ScalarType::Float);
  }

  std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> all() const {
    return {q, scale, q_t, scale_t, bias_grad};
  }
};

// Where a tile's results go; null for what is not asked for.
struct Targets {
  int64_t features, scale_stride = 0;
  uint8_t *q = nullptr, *q_t = nullptr;
  float *scale = nullptr, *scale_t = nullptr, *block_sums = nullptr;

  explicit Targets(int64_t features) : features(features) {}
  Targets(const Results& results, bool rowwise, bool columnwise) : features(results.features) {
    if (rowwise) {
      q = static_cast<uint8_t*>(results.q.data_ptr());
      scale = static_cast<float*>(results.scale.data_ptr());
      scale_stride = results.scale.size(1);
    }
    if (columnwise) {
      q_t = static_cast<uint8_t*>(results.q_t.data_ptr());
      scale_t = static_cast<float*>(results.scale_t.data_ptr());
    }
  }

  // The hardware does not foresee a tile's rows, and a store waits for its cache line.
  void prefetch(const RowBlock& block, int64_t col, int64_t cols) const {
    if (q)
      for (int64_t t = block.begin; t < block.end; ++t) prefetch_row(q + t * features + col, cols);
    if (q_t)
      for (int64_t c = 0; c < cols; ++c)
        prefetch_row(q_t + (block.index * features + col + c) * kBlock, kBlock);
  }

  void write(Tile& tile, const RowBlock& block, int64_t col, int64_t cols, ScaleRule rule) const {
    const int64_t rows = block.end - block.begin, first_t = block.index * features + col;
    if (block_sums) tile.col_sums(block_sums + first_t);
    if (!q && !q_t) return;

    float row_amax[kBlock], col_amax[kBlock], factor[kBlock], block_scale[kBlock];
    ByteTile bytes;
    tile.find_amax(row_amax, col_amax);
    if (q) {
      block_scales(row_amax, rule, factor, block_scale);
      std::memcpy(scale + col / kBlock * scale_stride + block.begin, block_scale,
                  rows * sizeof(float));
      tile.quantize_by_rows(factor, bytes);
      bytes.store(q + block.begin * features + col, features, rows, cols);
    }
    if (q_t) {
      block_scales(col_amax, rule, factor, block_scale);
      std::memcpy(scale_t + first_t, block_scale, cols * sizeof(float));
      tile.quantize_by_cols(factor, bytes);
      bytes.store_turned(q_t + first_t * kBlock, kBlock, tile.filled(), kBlock, cols);
    }
  }
};

// The blocks to quantize. A row's data do not depend on its group: rowwise alone, small groups share
// tiles.
std::vector<RowBlock> blocks_of(const std::vector<int64_t>& starts, bool by_group) {
  return by_group ? row_blocks(starts) : row_blocks({0, starts.back()});
}

// fill_row(t, first column, columns, row) writes elements of row t to a tile's row, in `dtype`.
template <typename FillRow>
void quantize_tiles(ScalarType dtype, const std::vector<RowBlock>& blocks, ScaleRule rule,
                    const Targets& targets, const FillRow& fill_row) {
  const int64_t col_blocks = ceil_div(targets.features, kBlock);
  const int64_t tiles = static_cast<int64_t>(blocks.size()) * col_blocks;
  torch::stable::parallel_for(0, tiles, 1, [&](int64_t begin, int64_t end) {
    Tile tile(dtype);
    for (int64_t i = begin; i < end; ++i) {
      const RowBlock& block = blocks[i / col_blocks];
      const int64_t col = i % col_blocks * kBlock, cols = std::min(kBlock, targets.features - col);
      targets.prefetch(block, col, cols);
      tile.fill(block.end - block.begin, cols, [&](int64_t r, void* row) {
        if (dtype != ScalarType::Half) return fill_row(block.begin + r, col, cols, row);
        uint16_t halves[kBlock];
        fill_row(block.begin + r, col, cols, halves);
        load_row(halves, dtype, cols, static_cast<float*>(row));
      });
      targets.write(tile, block, col, cols, rule);
    }
  });
}

// quantize_tiles, and bias_grad[e] = the sums of group e's blocks, from the first to the last.
template <typename FillRow>
void quantize_and_sum(ScalarType dtype, const std::vector<RowBlock>& blocks, ScaleRule rule,
                      Targets targets, const Tensor& bias_grad, const FillRow& fill_row) {
  const int64_t features = targets.features;
  std::vector<float> block_sums(blocks.size() * features);
  targets.block_sums = block_sums.data();
  quantize_tiles(dtype, blocks, rule, targets, fill_row);

  Tensor zeros = bias_grad;
  torch::stable::zero_(zeros);
  float* grad = bias_grad.mutable_data_ptr<float>();
  for (const RowBlock& block : blocks)
    for (int64_t c = 0; c < features; ++c)
      grad[block.group * features + c] += block_sums[block.index * features + c];
}

// Calls fill_row of quantize_tiles for rows of x as they are.
auto rows_as_they_are(const Tensor& x) {
  const int64_t element = element_size(x.scalar_type()), row_bytes = x.stride(0) * element;
  const char* first = static_cast<const char*>(x.data_ptr());
  return [=](int64_t t, int64_t col, int64_t cols, void* row) {
    const char* from = first + t * row_bytes + col * element;
    std::memcpy(row, from, cols * element);
    prefetch_row(from + kBlock * element, kBlock * element);  // the next tile's
  };
}

// The first `count` of rows, each an index of x's `limit` rows.
std::vector<int64_t> checked_rows(const std::optional<Tensor>& rows, int64_t count, int64_t limit) {
  std::vector<int64_t> taken;
  if (!rows) return taken;
  const Tensor dense = torch::stable::contiguous(*rows);
  taken.resize(count);
  for (int64_t t = 0; t < count; ++t) {
    taken[t] = dense.scalar_type() == ScalarType::Int ? dense.const_data_ptr<int32_t>()[t]
                                                      : dense.const_data_ptr<int64_t>()[t];
    check(taken[t] >= 0 && taken[t] < limit, "group_quantize: rows must index the ", limit,
          " rows of x, got ", taken[t], " at row ", t);
  }
  return taken;
}

}  // namespace

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> group_quantize(
    const Tensor& x_in, const Tensor& offs, const std::optional<Tensor>& rows, double amax_epsilon,
    bool power_of_two_scales, bool rowwise, bool columnwise, bool bias_grad) {
  check_group_quantize(x_in, offs, rows, amax_epsilon, rowwise, columnwise);
  const Tensor x = inner_contiguous(x_in);
  const ScalarType dtype = x.scalar_type();
  const int64_t T = rows ? rows->size(0) : x.size(0), K = x.size(1);
  const auto starts = group_starts("group_quantize", offs, T);
  const auto blocks = blocks_of(starts, columnwise || bias_grad);
  const auto taken = checked_rows(rows, starts.back(), x.size(0));
  const Results results(x, T, K, offs.size(0), rowwise, columnwise, bias_grad);

  const ScaleRule rule{static_cast<float>(amax_epsilon), power_of_two_scales};
  const Targets targets(results, rowwise, columnwise);
  const auto fill = [&](const auto& fill_row) {
    if (bias_grad)
      quantize_and_sum(dtype, blocks, rule, targets, results.bias_grad, fill_row);
    else
      quantize_tiles(dtype, blocks, rule, targets, fill_row);
  };
  const auto own = rows_as_they_are(x);
  if (rows)
    fill([&](int64_t t, int64_t col, int64_t cols, void* row) { own(taken[t], col, cols, row); });
  else
    fill(own);
  return results.all();
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> group_quantize_swiglu(
    const Tensor& gate_up_in, const Tensor& offs, double amax_epsilon, bool power_of_two_scales,
    bool rowwise, bool columnwise, bool keep_h) {
  const char* op = "group_quantize_swiglu";
  check_group_quantize_swiglu(gate_up_in, offs, amax_epsilon, rowwise, columnwise);
  const Tensor gate_up = inner_contiguous(gate_up_in);
  const ScalarType dtype = gate_up.scalar_type();
  const int64_t T = gate_up.size(0), K = gate_up.size(1) / 2;
  const auto starts = group_starts(op, offs, T);
  const Results results(gate_up, T, K, offs.size(0), rowwise, columnwise, false);
  using Shape = std::vector<int64_t>;
  const Tensor h = new_output(gate_up, keep_h ? Shape{T, K} : Shape{0}, dtype);

  const int64_t element = element_size(dtype), stride = gate_up.stride(0) * element;
  const auto* inputs = static_cast<const char*>(gate_up.data_ptr());
  auto* kept = static_cast<char*>(h.data_ptr());
  quantize_tiles(
      dtype, blocks_of(starts, columnwise), {static_cast<float>(amax_epsilon), power_of_two_scales},
      Targets(results, rowwise, columnwise), [&](int64_t t, int64_t col, int64_t cols, void* row) {
        const char* gate = inputs + t * stride + col * element;
        const char* up = gate + K * element;
        swiglu_row(gate, up, dtype, cols, row);
        if (keep_h) std::memcpy(kept + (t * K + col) * element, row, cols * element);
        prefetch_row(gate + kBlock * element, kBlock * element);
        prefetch_row(up + kBlock * element, kBlock * element);
      });
  if (keep_h) zero_rows(h, starts.back());
  return {results.q, results.scale, results.q_t, results.scale_t, h};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> group_quantize_swiglu_grad(
    const Tensor& dh_in, const Tensor& gate_up_in, const Tensor& offs, double amax_epsilon,
    bool power_of_two_scales, bool rowwise, bool columnwise, bool bias_grad) {
  const char* op = "group_quantize_swiglu_grad";
  check_group_quantize_swiglu_grad(dh_in, gate_up_in, offs, amax_epsilon, rowwise, columnwise);
  const Tensor dh = inner_contiguous(dh_in), gate_up = inner_contiguous(gate_up_in);
  const ScalarType dtype = dh.scalar_type();
  const int64_t T = dh.size(0), K = dh.size(1);
  const auto blocks = blocks_of(group_starts(op, offs, T), columnwise || bias_grad);
  const Results results(dh, T, 2 * K, offs.size(0), rowwise, columnwise, bias_grad);

  const int64_t element = element_size(dtype);
  const int64_t dh_stride = dh.stride(0) * element, stride = gate_up.stride(0) * element;
  const auto* gradients = static_cast<const char*>(dh.data_ptr());
  const auto* inputs = static_cast<const char*>(gate_up.data_ptr());
  const auto fill_row = [&](int64_t t, int64_t col, int64_t cols, void* row) {
    swiglu_grad_row(gradients + t * dh_stride, inputs + t * stride, dtype, K, col, cols,
                    static_cast<char*>(row));
  };
  const ScaleRule rule{static_cast<float>(amax_epsilon), power_of_two_scales};
  const Targets targets(results, rowwise, columnwise);
  if (bias_grad)
    quantize_and_sum(dtype, blocks, rule, targets, results.bias_grad, fill_row);
  else
    quantize_tiles(dtype, blocks, rule, targets, fill_row);
  return results.all();
}

Tensor grouped_bias_grad(const Tensor& dy_in, const Tensor& offs) {
  check_grouped_bias_grad(dy_in, offs);
  const Tensor dy = inner_contiguous(dy_in);
  const auto blocks = row_blocks(group_starts("grouped_bias_grad", offs, dy.size(0)));
  Tensor grad = torch::stable::new_empty(dy, std::vector<int64_t>{offs.size(0), dy.size(1)},
                                         ScalarType::Float);
  quantize_and_sum(dy.scalar_type(), blocks, {}, Targets(dy.size(1)), grad, rows_as_they_are(dy));
  return grad;
}

}  // namespace grouped_linear::cpu
