// SPDX-License-Identifier: Apache-2.0
// FP8 GEMMs with block scales or a scale a group: finds the rows, blocks and scales of each group.

#include "checks.h"
#include "cpu/gemm_operands.h"
#include "ops.h"

namespace grouped_linear::cpu {
namespace {

const uint8_t* codes_of(const Tensor& q, int64_t index) {
  return reinterpret_cast<const uint8_t*>(row_of(q, index));
}

const float* scale_from(const Tensor& scale, int64_t index, int64_t dim = 0) {
  return scale.const_data_ptr<float>() + index * scale.stride(dim);
}

// Expert e of q [E, N, K]; scale [E, ceil(N / 128), ceil(K / 128)] or [E].
ScaledOperand weight_operand(const Tensor& q, const Tensor& scale, int64_t e) {
  ScaledOperand rows{codes_of(q, e),       q.scalar_type(), q.stride(1), kBlock,
                     scale_from(scale, e), kBlock,          0,           0};
  if (scale.dim() == 1) return rows;
  rows.scale_row_stride = scale.stride(1);
  rows.scale_block_stride = scale.stride(2);
  return rows;
}

// The blocks from `begin` on, of group e, of q_t [blocks, K, 128]; scale_t [blocks, K] or [E].
ScaledOperand columnwise_operand(const Tensor& q_t, const Tensor& scale, int64_t e, int64_t begin) {
  ScaledOperand cols{codes_of(q_t, begin),
                     q_t.scalar_type(),
                     kBlock,
                     q_t.stride(0),
                     scale_from(scale, e),
                     1,
                     0,
                     0};
  if (scale.dim() == 1) return cols;
  cols.scale = scale_from(scale, begin);
  cols.scale_row_stride = scale.stride(1);
  cols.scale_block_stride = scale.stride(0);
  return cols;
}

// dw [E, N, K] = dy.T @ x of every group, or dw += that if `add` is set. Empty groups write zeros
// or add nothing.
void wgrad(const char* op, const Tensor& dw, const Tensor& dy_t_in, const Tensor& x_t_in,
           const Tensor& scale_dy_t, const Tensor& scale_x_t, const Tensor& offs, bool add) {
  const Tensor dy_t = as_dense(dy_t_in), x_t = as_dense(x_t_in);
  const int64_t blocks = x_t.size(0);
  const auto starts = group_starts(op, offs, blocks * kBlock);
  std::vector<ScaledProduct> products;
  int64_t first = 0;  // block of the group
  for (int64_t e = 0; e < offs.size(0); ++e) {
    const int64_t rows = starts[e + 1] - starts[e];
    if (rows > 0)
      products.push_back({columnwise_operand(dy_t, scale_dy_t, e, first),
                          columnwise_operand(x_t, scale_x_t, e, first), rows, group_of(dw, e)});
    else if (!add)
      std::memset(row_of(dw, e), 0, row_of(dw, 1) - row_of(dw, 0));
    first += ceil_div(rows, kBlock);
  }
  check(first <= blocks, op, ": offs need ", first, " blocks of ", kBlock, " rows, dy_t has ",
        blocks);
  multiply(products, add);
}

}  // namespace

ScaledOperand rowwise_operand(const Tensor& q, const Tensor& scale, int64_t e, int64_t begin) {
  ScaledOperand rows{
      codes_of(q, begin), q.scalar_type(), q.stride(0), kBlock, scale_from(scale, e), 1, 0, 0};
  if (scale.dim() == 1) return rows;
  rows.scale = scale_from(scale, begin, 1);
  rows.scale_row_stride = scale.stride(1);
  rows.scale_block_stride = scale.stride(0);
  return rows;
}

Tensor gathered_columns(const Tensor& scale, const std::vector<int64_t>& numbers) {
  const auto count = static_cast<int64_t>(numbers.size());
  const Tensor gathered = new_tensor(scale, {scale.size(0), count}, ScalarType::Float);
  for (int64_t block = 0; block < scale.size(0); ++block) {
    const float* from = scale_from(scale, block);
    auto* to = reinterpret_cast<float*>(row_of(gathered, block));
    for (int64_t i = 0; i < count; ++i) to[i] = from[numbers[i] * scale.stride(1)];
  }
  return gathered;
}

FloatLowRank::FloatLowRank(const LowRank& low, int64_t rows) {
  if (!low.a) return;
  r = low.a->size(1);
  N = low.b->size(1);
  const Tensor a_low = with_dense_rows(*low.a), b_low = as_dense(transposed(*low.b));
  a.resize(rows * r);
  for (int64_t t = 0; t < rows; ++t)
    load_row(row_of(a_low, t), a_low.scalar_type(), r, a.data() + t * r);
  b.resize(b_low.numel());
  load_row(b_low.const_data_ptr(), b_low.scalar_type(), b_low.numel(), b.data());
}

Tensor grouped_scaled_mm_nt(const Tensor& a_in, const Tensor& b_in, const Tensor& scale_a_in,
                            const Tensor& scale_b, const Tensor& offs,
                            const std::optional<Tensor>& bias_in,
                            std::optional<ScalarType> requested_dtype,
                            const std::optional<Tensor>& rows, const LowRank& low_in) {
  const char* op = "grouped_scaled_mm";
  const ScalarType out_dtype = requested_dtype.value_or(ScalarType::BFloat16);
  check_grouped_scaled_mm(a_in, b_in, scale_a_in, scale_b, offs, bias_in, out_dtype, rows, low_in);
  Tensor a = with_dense_rows(a_in), scale_a = scale_a_in;
  const Tensor b = with_dense_rows(b_in);
  const std::optional<Tensor> bias = with_dense_rows(bias_in);
  const int64_t T = (rows ? *rows : a).size(0), K = a.size(1), N = b.size(1);
  const auto starts = group_starts(op, offs, T);
  if (rows) {
    const auto numbers = checked_rows(op, *rows, starts.back(), "a", a.size(0));
    a = gathered_rows(a, numbers);
    scale_a = gathered_columns(scale_a, numbers);
  }
  const Tensor y = new_output(a, {T, N}, out_dtype);
  const FloatLowRank low(low_in, starts.back());

  std::vector<ScaledProduct> products;
  for (int64_t e = 0; e < offs.size(0); ++e)
    if (starts[e] < starts[e + 1])
      products.push_back({rowwise_operand(a, scale_a, e, starts[e]), weight_operand(b, scale_b, e),
                          K, rows_of(y, starts[e], starts[e + 1]),
                          bias ? row_of(*bias, e) : nullptr, low.of(e, starts[e])});
  multiply(products);
  zero_rows(y, starts.back());
  return y;
}

Tensor grouped_scaled_mm_wgrad(const Tensor& dy_t, const Tensor& x_t, const Tensor& scale_dy_t,
                               const Tensor& scale_x_t, const Tensor& offs,
                               std::optional<ScalarType> requested_dtype) {
  const ScalarType out_dtype = requested_dtype.value_or(ScalarType::BFloat16);
  const char* op = "grouped_scaled_mm_wgrad";
  check_grouped_scaled_mm_wgrad(op, dy_t, x_t, scale_dy_t, scale_x_t, offs, out_dtype);
  const Tensor dw = new_output(x_t, {offs.size(0), dy_t.size(1), x_t.size(1)}, out_dtype);
  wgrad(op, dw, dy_t, x_t, scale_dy_t, scale_x_t, offs, false);
  return dw;
}

void grouped_scaled_mm_wgrad_(const Tensor& main_grad, const Tensor& dy_t, const Tensor& x_t,
                              const Tensor& scale_dy_t, const Tensor& scale_x_t, const Tensor& offs,
                              const std::optional<Tensor>& overwrite) {
  const char* op = "grouped_scaled_mm_wgrad_";
  check_grouped_scaled_mm_wgrad(op, dy_t, x_t, scale_dy_t, scale_x_t, offs, ScalarType::Float);
  check_main_grad(op, main_grad, dy_t, offs.size(0), dy_t.size(1), x_t.size(1), overwrite);
  wgrad(op, main_grad, dy_t, x_t, scale_dy_t, scale_x_t, offs,
        !(overwrite && *overwrite->const_data_ptr<bool>()));
}

}  // namespace grouped_linear::cpu
