// SPDX-License-Identifier: Apache-2.0
// One pass over what is quantized: a 128 x 128 tile is read or computed once and gives its rowwise
// and columnwise data, both scales, and its share of the bias gradient.

#include <algorithm>
#include <bit>

#include "checks.h"
#include "cpu/numerics.h"
#include "cpu/swiglu.h"
#include "cpu/tiles.h"
#include "ops.h"

namespace grouped_linear::cpu {
namespace {

// The outputs of quantizing x [T, K] in E groups.
struct Results : Quantized {
  int64_t groups, features;

  Results(const Quantized& out, int64_t K, int64_t E) : Quantized(out), groups(E), features(K) {}
  Results(const Tensor& like, int64_t T, int64_t K, int64_t E, bool rowwise, bool columnwise,
          bool sums, bool share_scales = false)
      : Results({new_output, like, {T, K, E, rowwise, columnwise, sums}, share_scales}, K, E) {}
};

// Gives all columns of a tile the largest of their amaxes, if every amax but 0 is within a factor
// of kShareWithin of it. Compares magnitudes as integers, which have the same order: maxima of
// floats would not vectorise.
GROUPED_LINEAR_EVERY_WIDTH void share_amax(float (&col_amax)[kBlock]) {
  uint32_t largest = 0, smallest_minus_one = UINT32_MAX;  // 0 - 1 wraps to the last
  for (const float amax : col_amax) {
    const auto bits = std::bit_cast<uint32_t>(amax);
    largest = std::max(largest, bits);
    smallest_minus_one = std::min(smallest_minus_one, bits - 1);
  }
  const float max_amax = std::bit_cast<float>(largest);
  if (std::bit_cast<float>(smallest_minus_one + 1) * kShareWithin >= max_amax)
    std::fill_n(col_amax, kBlock, max_amax);
}

struct BlockScaledTargets : TileTargets {
  ScaleRule rule;
  float *scale = nullptr, *scale_t = nullptr;
  int64_t scale_stride = 0;
  bool share_scales;

  BlockScaledTargets(const Results& results, ScaleRule rule)
      : TileTargets{results.features}, rule(rule), share_scales(results.share_scales) {
    if (results.q.numel() > 0) {
      q = static_cast<uint8_t*>(results.q.data_ptr());
      scale = static_cast<float*>(results.scale.data_ptr());
      scale_stride = results.scale.size(1);
    }
    if (results.q_t.numel() > 0) {
      q_t = static_cast<uint8_t*>(results.q_t.data_ptr());
      scale_t = static_cast<float*>(results.scale_t.data_ptr());
    }
  }

  void write(Tile& tile, const RowBlock& block, int64_t col, int64_t cols) const {
    float row_amax[kBlock], col_amax[kBlock], row_factor[kBlock], col_factor[kBlock];
    float block_scale[kBlock];
    ByteTile col_codes;
    tile.find_amax(row_amax, col_amax);
    if (q) {
      block_scales(row_amax, rule, row_factor, block_scale);
      std::memcpy(scale + col / kBlock * scale_stride + block.begin, block_scale,
                  (block.end - block.begin) * sizeof(float));
    }
    if (q_t) {
      if (share_scales) share_amax(col_amax);
      block_scales(col_amax, rule, col_factor, block_scale);
      std::memcpy(scale_t + block.index * features + col, block_scale, cols * sizeof(float));
    }
    tile.quantize(row_factor, rows(block, col), q_t ? col_factor : nullptr,
                  q_t ? &col_codes : nullptr);
    if (q_t) store_transposed(col_codes, block, col, cols, tile.filled());
  }
};

// For column sums alone.
struct NoTargets : TileTargets {
  void write(Tile& tile, const RowBlock&, int64_t, int64_t) const { tile.prefetch.rows_from(0); }
};

// The blocks to quantize. Rowwise data do not depend on groups, so without columnwise data small
// groups share tiles.
std::vector<RowBlock> blocks_of(const std::vector<int64_t>& starts, bool by_group) {
  return by_group ? row_blocks(starts) : row_blocks({0, starts.back()});
}

template <typename Reader>
void quantize(ScalarType dtype, const std::vector<RowBlock>& blocks, ScaleRule rule,
              const Results& results, const Reader& reader) {
  const bool sums = results.bias_grad.numel() > 0;
  quantize_and_sum(dtype, blocks, BlockScaledTargets(results, rule), results.groups,
                   pointer_if<float>(sums, results.bias_grad), reader);
}

}  // namespace

void quantize_rows(const Tensor& x, const Tensor& offs, double amax_epsilon,
                   bool power_of_two_scales, const Quantized& out) {
  const GroupedRows rows("group_quantize", x, offs);
  const Results results(out, rows.features, rows.groups);
  const bool by_group = results.q_t.numel() > 0 || results.bias_grad.numel() > 0;
  const int64_t end = rows.blocks.empty() ? 0 : rows.blocks.back().end;
  quantize(rows.dtype, by_group ? rows.blocks : row_blocks({0, end}),
           {static_cast<float>(amax_epsilon), power_of_two_scales}, results, rows.reader());
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> group_quantize(
    const Tensor& x_in, const Tensor& offs, const std::optional<Tensor>& rows, double amax_epsilon,
    bool power_of_two_scales, bool rowwise, bool columnwise, bool bias_grad, bool share_scales) {
  check_group_quantize(x_in, offs, rows, amax_epsilon, rowwise, columnwise);
  const int64_t T = (rows ? *rows : x_in).size(0);
  const Results results(x_in, T, x_in.size(1), offs.size(0), rowwise, columnwise, bias_grad,
                        share_scales);
  if (!rows) {
    quantize_rows(x_in, offs, amax_epsilon, power_of_two_scales, results);
    return results.all();
  }

  const Tensor x = with_dense_rows(x_in);
  const ScalarType dtype = x.scalar_type();
  const auto starts = group_starts("group_quantize", offs, T);
  const auto numbers = checked_rows("group_quantize", *rows, starts.back(), "x", x.size(0));

  const int64_t element = element_size(dtype), stride = x.stride(0) * element;
  const auto* first = static_cast<const char*>(x.data_ptr());
  const auto source = [&](const RowBlock& block, int64_t r, int64_t col) {
    return first + numbers[block.begin + r] * stride + col * element;
  };
  const auto fill_row = [&](const char* from, const RowBlock&, int64_t, int64_t, int64_t cols,
                            void* row) { std::memcpy(row, from, cols * element); };
  quantize(dtype, blocks_of(starts, columnwise || bias_grad),
           {static_cast<float>(amax_epsilon), power_of_two_scales}, results,
           Reader{source, fill_row});
  return results.all();
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> group_quantize_swiglu(
    const Tensor& gate_up_in, const Tensor& offs, double amax_epsilon, bool power_of_two_scales,
    bool rowwise, bool columnwise, bool keep_h, bool share_scales, double alpha, double beta,
    std::optional<double> limit, bool interleaved, double cubic) {
  const char* op = "group_quantize_swiglu";
  check_group_quantize_swiglu(gate_up_in, offs, amax_epsilon, rowwise, columnwise);
  const SwigluForm form = checked_form(op, alpha, beta, limit, interleaved, cubic);
  const Tensor gate_up = with_dense_rows(gate_up_in);
  const ScalarType dtype = gate_up.scalar_type();
  const int64_t T = gate_up.size(0), K = gate_up.size(1) / 2;
  const auto starts = group_starts(op, offs, T);
  const Results results(gate_up, T, K, offs.size(0), rowwise, columnwise, false, share_scales);
  const Tensor h = output_if(keep_h, gate_up, {T, K}, dtype);

  const int64_t element = element_size(dtype), stride = gate_up.stride(0) * element;
  const auto* inputs = static_cast<const char*>(gate_up.data_ptr());
  auto* kept = static_cast<char*>(h.data_ptr());
  const auto source = [&](const RowBlock& block, int64_t r, int64_t col) {
    return inputs + (block.begin + r) * stride + (interleaved ? 2 : 1) * col * element;
  };
  const auto fill_row = [&](const char* gate, const RowBlock& block, int64_t r, int64_t col,
                            int64_t cols, void* row) {
    swiglu_row(form, inputs + (block.begin + r) * stride, dtype, K, col, cols,
               static_cast<char*>(row));
    if (keep_h) std::memcpy(kept + ((block.begin + r) * K + col) * element, row, cols * element);
    const char* up = gate + (interleaved ? kBlock : K) *
                                element;  // the second half of what is read, in both layouts
    prefetch_row<false, 2>(up + kBlock * element, kBlock * element);
  };
  quantize(dtype, blocks_of(starts, columnwise),
           {static_cast<float>(amax_epsilon), power_of_two_scales}, results,
           Reader{source, fill_row});
  if (keep_h) zero_rows(h, starts.back());
  return {results.q, results.scale, results.q_t, results.scale_t, h};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>
group_quantize_swiglu_grad(const Tensor& dh, const Tensor& gate_up, const Tensor& weight,
                           const Tensor& offs, double amax_epsilon, bool power_of_two_scales,
                           bool rowwise, bool columnwise, bool bias_grad, bool h_columnwise,
                           bool keep_h, bool share_h_scales, double alpha, double beta,
                           std::optional<double> limit, bool interleaved, double cubic) {
  const char* op = "group_quantize_swiglu_grad";
  check_group_quantize_swiglu_grad(dh, gate_up, weight, offs, amax_epsilon, rowwise, columnwise);
  const SwigluForm form = checked_form(op, alpha, beta, limit, interleaved, cubic);
  const int64_t T = dh.size(0), K = dh.size(1), E = offs.size(0);
  const auto [d_gate_up, h, d_weight] = swiglu_grads(op, dh, gate_up, weight, offs, form);
  const Results results(dh, T, 2 * K, E, rowwise, columnwise, bias_grad);
  quantize_rows(d_gate_up, offs, amax_epsilon, power_of_two_scales, results);
  const Results of_h(dh, T, K, E, false, h_columnwise, false, share_h_scales);
  if (h_columnwise) quantize_rows(h, offs, amax_epsilon, power_of_two_scales, of_h);
  const Tensor kept_h = keep_h ? h : new_output(dh, {0}, dh.scalar_type());
  return std::tuple_cat(results.all(), std::make_tuple(of_h.q_t, of_h.scale_t, kept_h, d_weight));
}

Tensor grouped_bias_grad(const Tensor& dy, const Tensor& offs) {
  check_grouped_bias_grad(dy, offs);
  const GroupedRows rows("grouped_bias_grad", dy, offs);
  const Tensor grad = new_output(dy, {rows.groups, rows.features}, ScalarType::Float);
  quantize_and_sum(rows.dtype, rows.blocks, NoTargets{{rows.features}}, rows.groups,
                   grad.mutable_data_ptr<float>(), rows.reader());
  return grad;
}

}  // namespace grouped_linear::cpu
