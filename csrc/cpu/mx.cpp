// MXFP8: blocks of 32 elements along a row, or of 32 rows of a group, with a power of two for a
// scale. One pass over x for whatever is asked for.

#include <bit>
#include <cstring>

#include "../checks.h"
#include "../experts.h"
#include "../ops.h"
#include "fp8.h"
#include "per_group.h"

namespace grouped_linear::cpu {
namespace {

GROUPED_LINEAR_EVERY_WIDTH void raise_amax(const float* row, uint32_t* amax) {
  for (int64_t c = 0; c < kBlock; ++c) {
    const uint32_t magnitude = std::bit_cast<uint32_t>(row[c]) & kMagnitude;
    amax[c] = std::max(amax[c], magnitude < kInfinity ? magnitude : 0);
  }
}

GROUPED_LINEAR_EVERY_WIDTH void add_row(const float* row, float* sums) {
  for (int64_t c = 0; c < kBlock; ++c) sums[c] += row[c];
}

// q[c] = e4m3(row[c] / scale[c]) for the scales 2^(exponent[c] - 127).
GROUPED_LINEAR_EVERY_WIDTH void quantize_row(const float* row, const uint32_t* exponent,
                                             uint8_t* q) {
  for (int64_t c = 0; c < kBlock; ++c)
    q[c] = quantize<E4m3>(row[c], std::bit_cast<float>((254 - exponent[c]) << 23));
}

// Exactly: an e4m3 number times such a scale is a bf16 number.
GROUPED_LINEAR_EVERY_WIDTH void dequantize_row(const uint8_t* q, const uint32_t* exponent,
                                               uint16_t* values) {
  for (int64_t c = 0; c < kBlock; ++c)
    values[c] = to_bf16(from_e4m3(q[c]) * std::bit_cast<float>(exponent[c] << 23));
}

// The E8M0 scale of a block: the smallest power of two that brings amax to at most 448, kept where
// every e4m3 number times it is a finite bf16 number (2^-124 .. 2^119).
inline uint32_t mx_exponent(uint32_t amax_bits) {
  // amax = m * 2^e with 1 <= m < 2 and 448 = 1.75 * 2^8: e - 8, and one more where m > 1.75.
  const auto exponent = static_cast<int32_t>((amax_bits + 0x1fffff) >> 23) - 8;
  return static_cast<uint32_t>(std::clamp(exponent, 127 - 124, 127 + 119));
}

// Where a kind of result goes; null for what is not asked for.
struct MxOutputs {
  uint8_t *q, *scale, *q_t, *scale_t;
  uint16_t *rowwise, *columnwise;
  float* bias_grad;
};

void quantize_mx(const GroupedRows& rows, const MxOutputs& out) {
  const auto* first = static_cast<const char*>(rows.values.data_ptr());
  const ScalarType dtype = rows.values.scalar_type();
  const int64_t K = rows.features, col_blocks = ceil_div(K, kBlock);
  const int64_t row_scales = ceil_div(K, kMxBlock);
  constexpr int64_t per_block = kBlock / kMxBlock;
  const bool rowwise = out.q || out.rowwise, columnwise = out.q_t || out.columnwise;
  const auto blocks = static_cast<int64_t>(rows.blocks.size());
  std::vector<float> block_sums(out.bias_grad ? blocks * K : 0);

  torch::stable::parallel_for(0, blocks * col_blocks, 1, [&](int64_t begin, int64_t end) {
    alignas(64) float tile[kMxBlock][kBlock], eight[kBlock];
    alignas(64) uint8_t q[kMxBlock][kBlock];
    alignas(64) uint16_t values[kBlock];
    alignas(64) uint32_t exponent[kBlock], amax[kBlock];
    for (int64_t t = begin; t < end; ++t) {
      const RowBlock& block = rows.blocks[t / col_blocks];
      const int64_t col = t % col_blocks * kBlock, cols = std::min(kBlock, K - col);
      const int64_t height = block.end - block.begin;
      float sums[kBlock] = {};
      for (int64_t part = 0; part < per_block; ++part) {
        const int64_t row = block.begin + part * kMxBlock;
        const int64_t count = std::clamp<int64_t>(height - part * kMxBlock, 0, kMxBlock);
        std::memset(tile, 0, sizeof(tile));
        for (int64_t r = 0; r < count; ++r) {
          load_row(first + (row + r) * rows.row_bytes + col * element_size(dtype), dtype, cols,
                   tile[r]);
          // Rows are added in eights, then the eights, as grouped_bias_grad adds them.
          if (r % 8 == 0) std::memset(eight, 0, sizeof(eight));
          if (out.bias_grad) add_row(tile[r], eight);
          if (out.bias_grad && (r % 8 == 7 || r + 1 == count)) add_row(eight, sums);
        }
        for (int64_t r = 0; rowwise && r < count; ++r) {
          std::memset(amax, 0, sizeof(amax));
          raise_amax(tile[r], amax);
          for (int64_t c = 0; c < kBlock; c += kMxBlock) {
            const uint32_t e = mx_exponent(*std::max_element(amax + c, amax + c + kMxBlock));
            std::fill_n(exponent + c, kMxBlock, e);
            if (out.scale && c < cols)
              out.scale[(row + r) * row_scales + (col + c) / kMxBlock] = static_cast<uint8_t>(e);
          }
          quantize_row(tile[r], exponent, q[r]);
          if (out.q) std::memcpy(out.q + (row + r) * K + col, q[r], cols);
          if (!out.rowwise) continue;
          dequantize_row(q[r], exponent, values);
          std::memcpy(out.rowwise + (row + r) * K + col, values, cols * sizeof(uint16_t));
        }
        if (!columnwise) continue;
        std::memset(amax, 0, sizeof(amax));
        for (int64_t r = 0; r < count; ++r) raise_amax(tile[r], amax);
        for (int64_t c = 0; c < kBlock; ++c) exponent[c] = mx_exponent(amax[c]);
        for (int64_t r = 0; r < kMxBlock; ++r) {
          quantize_row(tile[r], exponent, q[r]);
          if (!out.columnwise || r >= count) continue;
          dequantize_row(q[r], exponent, values);
          std::memcpy(out.columnwise + (row + r) * K + col, values, cols * sizeof(uint16_t));
        }
        for (int64_t c = 0; out.q_t && c < cols; ++c) {
          const int64_t column = block.index * K + col + c;
          out.scale_t[column * per_block + part] = static_cast<uint8_t>(exponent[c]);
          for (int64_t r = 0; r < kMxBlock; ++r)
            out.q_t[column * kBlock + part * kMxBlock + r] = q[r][c];
        }
      }
      if (out.bias_grad)
        std::memcpy(&block_sums[block.index * K + col], sums, cols * sizeof(float));
    }
  });

  if (!out.bias_grad) return;
  std::memset(out.bias_grad, 0, rows.groups * K * sizeof(float));
  for (const RowBlock& block : rows.blocks)
    for (int64_t c = 0; c < K; ++c)
      out.bias_grad[block.group * K + c] += block_sums[block.index * K + c];
}

template <typename Element>
Element* if_wanted(bool wanted, Tensor& t) {
  return wanted ? static_cast<Element*>(t.data_ptr()) : nullptr;
}

}  // namespace

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> group_quantize_mx(const Tensor& x,
                                                                     const Tensor& offs,
                                                                     bool rowwise, bool columnwise,
                                                                     bool bias_grad) {
  const char* op = "group_quantize_mx";
  check_group_quantize_mx(op, x, offs, rowwise, columnwise);
  const GroupedRows rows(op, x, offs);
  const int64_t T = x.size(0), K = x.size(1), E = offs.size(0);

  using Shape = std::vector<int64_t>;
  const auto output = [&x](bool wanted, const Shape& shape, ScalarType dtype) {
    return torch::stable::new_empty(x, wanted ? shape : Shape{0}, dtype);
  };
  constexpr ScalarType e4m3 = ScalarType::Float8_e4m3fn, e8m0 = ScalarType::Float8_e8m0fnu;
  const int64_t blocks = padded_rows(T, E) / kBlock;
  Tensor q = output(rowwise, {T, K}, e4m3);
  Tensor scale = output(rowwise, {T, ceil_div(K, kMxBlock)}, e8m0);
  Tensor q_t = output(columnwise, {blocks, K, kBlock}, e4m3);
  Tensor scale_t = output(columnwise, {blocks, K, kBlock / kMxBlock}, e8m0);
  Tensor grad = output(bias_grad, {E, K}, ScalarType::Float);

  quantize_mx(rows, {if_wanted<uint8_t>(rowwise, q), if_wanted<uint8_t>(rowwise, scale),
                     if_wanted<uint8_t>(columnwise, q_t), if_wanted<uint8_t>(columnwise, scale_t),
                     nullptr, nullptr, if_wanted<float>(bias_grad, grad)});
  return {q, scale, q_t, scale_t, grad};
}

std::tuple<Tensor, Tensor, Tensor> group_round_mx(const Tensor& x, const Tensor& offs, bool rowwise,
                                                  bool columnwise, bool bias_grad) {
  const char* op = "group_round_mx";
  check_group_quantize_mx(op, x, offs, rowwise, columnwise);
  const GroupedRows rows(op, x, offs);
  const int64_t T = x.size(0), K = x.size(1), E = offs.size(0);

  using Shape = std::vector<int64_t>;
  const auto output = [&x](bool wanted, const Shape& shape, ScalarType dtype) {
    return torch::stable::new_empty(x, wanted ? shape : Shape{0}, dtype);
  };
  Tensor x_rowwise = output(rowwise, {T, K}, ScalarType::BFloat16);
  Tensor x_columnwise = output(columnwise, {T, K}, ScalarType::BFloat16);
  Tensor grad = output(bias_grad, {E, K}, ScalarType::Float);

  quantize_mx(rows,
              {nullptr, nullptr, nullptr, nullptr, if_wanted<uint16_t>(rowwise, x_rowwise),
               if_wanted<uint16_t>(columnwise, x_columnwise), if_wanted<float>(bias_grad, grad)});
  return {x_rowwise, x_columnwise, grad};
}

void refresh_weight_mx_(const std::vector<Tensor>& w, const std::optional<Tensor>& refresh,
                        const Tensor& w_rowwise, const std::optional<Tensor>& w_columnwise) {
  check_refresh_weight_mx(w, refresh, w_rowwise, w_columnwise);
  if (refresh && !*refresh->const_data_ptr<bool>()) return;
  quantize_mx(GroupedRows(packed(w)),
              {nullptr, nullptr, nullptr, nullptr, static_cast<uint16_t*>(w_rowwise.data_ptr()),
               w_columnwise ? static_cast<uint16_t*>(w_columnwise->data_ptr()) : nullptr, nullptr});
}

}  // namespace grouped_linear::cpu
