// Block-scaled FP8 products: operands are dequantized to float32 a group at a time, so the sum over
// K is in float32 throughout. That is what promoting every 128 of K is for on a GPU.

#include "../checks.h"
#include "../ops.h"
#include "matmul.h"
#include "per_group_mm.h"

namespace grouped_linear::cpu {
namespace {

// Rows [begin, end) of q [T, K] with scale [ceil(K / 128), >= T].
Scratch dequantize_rows(const Tensor& q, const Tensor& scale, int64_t begin, int64_t end) {
  const Matrix m = rows_of(q, begin, end);
  const auto* first = static_cast<const char*>(m.first);
  const float* scales = scale.const_data_ptr<float>() + begin;
  const int64_t scale_stride = scale.stride(0);
  Scratch x(m.rows, m.cols);
  torch::stable::parallel_for(0, m.rows, 16, [&](int64_t from, int64_t to) {
    for (int64_t r = from; r < to; ++r)
      dequantize_row(first + r * m.row_stride, m.cols, scales + r, scale_stride, x.row(r));
  });
  return x;
}

// Expert e of q [E, N, K] with scale [E, ceil(N / 128), ceil(K / 128)] of any strides.
Scratch dequantize_weight(const Tensor& q, const Tensor& scale, int64_t e) {
  const Matrix m = group_of(q, e);
  const auto* first = static_cast<const char*>(m.first);
  const float* scales = scale.const_data_ptr<float>() + e * scale.stride(0);
  const int64_t row_stride = scale.stride(1), col_stride = scale.stride(2);
  Scratch w(m.rows, m.cols);
  torch::stable::parallel_for(0, m.rows, 16, [&](int64_t from, int64_t to) {
    for (int64_t n = from; n < to; ++n)
      dequantize_row(first + n * m.row_stride, m.cols, scales + n / kBlock * row_stride, col_stride,
                     w.row(n));
  });
  return w;
}

// One group of columnwise data: the blocks from `begin` on of q_t [blocks, K, 128] with
// scale_t [blocks, K] -> [K, rows].
Scratch dequantize_columns(const Tensor& q_t, const Tensor& scale_t, int64_t begin, int64_t rows) {
  const int64_t K = q_t.size(1);
  const char* first = row_of(q_t, begin);
  const float* scales = scale_t.const_data_ptr<float>() + begin * scale_t.stride(0);
  const int64_t scale_stride = scale_t.stride(0);
  Scratch x_t(K, rows);
  torch::stable::parallel_for(0, K, 16, [&](int64_t from, int64_t to) {
    for (int64_t r = 0; r < rows; r += kBlock)
      for (int64_t k = from; k < to; ++k)
        dequantize_row(first + (r / kBlock * K + k) * kBlock, std::min(kBlock, rows - r),
                       scales + r / kBlock * scale_stride + k, 0, x_t.row(k) + r);
  });
  return x_t;
}

// out = a @ b + bias in float32, rounded once to out's dtype.
void matmul_and_store(const Matrix& out, const Matrix& a, const Matrix& b, const float* bias) {
  if (out.dtype == ScalarType::Float && !bias) return matmul(out, a, b);
  Scratch y(out.rows, out.cols);
  matmul(y.view(), a, b);
  store(y, bias, out);
}

// The rows of every group, and the block of the padded layout that each begins with.
struct ColumnGroups {
  std::vector<int64_t> row_starts, first_blocks;

  ColumnGroups(const char* op, const Tensor& offs, int64_t blocks)
      : row_starts(group_starts(op, offs, blocks * kBlock)), first_blocks{0} {
    for (size_t e = 0; e + 1 < row_starts.size(); ++e)
      first_blocks.push_back(first_blocks.back() + ceil_div(rows(e), kBlock));
    check(first_blocks.back() <= blocks, op, ": offs need ", first_blocks.back(), " blocks of ",
          kBlock, " rows, dy_t has ", blocks);
  }

  int64_t rows(int64_t e) const { return row_starts[e + 1] - row_starts[e]; }
};

// dw = dy.T @ x for group e
void wgrad(const Matrix& dw, const Tensor& dy_t, const Tensor& x_t, const Tensor& scale_dy_t,
           const Tensor& scale_x_t, const ColumnGroups& groups, int64_t e) {
  const int64_t begin = groups.first_blocks[e], rows = groups.rows(e);
  Scratch dy = dequantize_columns(dy_t, scale_dy_t, begin, rows);
  Scratch x = dequantize_columns(x_t, scale_x_t, begin, rows);
  matmul_and_store(dw, dy.view(), x.view().transposed(), nullptr);
}

}  // namespace

Tensor grouped_scaled_mm(const Tensor& a_in, const Tensor& b_in, const Tensor& scale_a_in,
                         const Tensor& scale_b, const Tensor& offs,
                         const std::optional<Tensor>& bias_in, ScalarType out_dtype) {
  check_grouped_scaled_mm(a_in, b_in, scale_a_in, scale_b, offs, bias_in, out_dtype);
  if (scale_a_in.dim() == 1)
    return per_group_mm(a_in, b_in, scale_a_in, scale_b, offs, bias_in, out_dtype);
  const Tensor a = inner_contiguous(a_in), b = inner_contiguous(b_in);
  const Tensor scale_a = inner_contiguous(scale_a_in);
  const std::optional<Tensor> bias = inner_contiguous(bias_in);
  const int64_t T = a.size(0), N = b.size(1);
  const auto starts = group_starts("grouped_scaled_mm", offs, T);
  Tensor y = torch::stable::new_empty(a, std::vector<int64_t>{T, N}, out_dtype);

  std::vector<float> bias_row(bias ? N : 0);
  for (int64_t e = 0; e < offs.size(0); ++e) {
    const int64_t begin = starts[e], end = starts[e + 1];
    if (begin == end) continue;
    Scratch a_e = dequantize_rows(a, scale_a, begin, end);
    Scratch b_e = dequantize_weight(b, scale_b, e);
    if (bias) load_row(row_of(*bias, e), out_dtype, N, bias_row.data());
    matmul_and_store(rows_of(y, begin, end), a_e.view(), b_e.view().transposed(),
                     bias ? bias_row.data() : nullptr);
  }
  zero_rows(y, starts.back());
  return y;
}

Tensor grouped_scaled_mm_wgrad(const Tensor& dy_t_in, const Tensor& x_t_in,
                               const Tensor& scale_dy_t_in, const Tensor& scale_x_t_in,
                               const Tensor& offs, ScalarType out_dtype) {
  const char* op = "grouped_scaled_mm_wgrad";
  check_grouped_scaled_mm_wgrad(op, dy_t_in, x_t_in, scale_dy_t_in, scale_x_t_in, offs, out_dtype);
  if (scale_dy_t_in.dim() == 1)
    return per_group_wgrad(op, dy_t_in, x_t_in, scale_dy_t_in, scale_x_t_in, offs, out_dtype);
  const Tensor dy_t = torch::stable::contiguous(dy_t_in), x_t = torch::stable::contiguous(x_t_in);
  const Tensor scale_dy_t = inner_contiguous(scale_dy_t_in);
  const Tensor scale_x_t = inner_contiguous(scale_x_t_in);
  const ColumnGroups groups(op, offs, x_t.size(0));
  Tensor dw = torch::stable::new_empty(
      x_t, std::vector<int64_t>{offs.size(0), dy_t.size(1), x_t.size(1)}, out_dtype);
  write_groups(dw, groups.row_starts, [&](int64_t e, const Matrix& dw_e) {
    wgrad(dw_e, dy_t, x_t, scale_dy_t, scale_x_t, groups, e);
  });
  return dw;
}

void grouped_scaled_mm_wgrad_(const Tensor& main_grad, const Tensor& dy_t_in, const Tensor& x_t_in,
                              const Tensor& scale_dy_t_in, const Tensor& scale_x_t_in,
                              const Tensor& offs, const std::optional<Tensor>& overwrite) {
  const char* op = "grouped_scaled_mm_wgrad_";
  check_grouped_scaled_mm_wgrad(op, dy_t_in, x_t_in, scale_dy_t_in, scale_x_t_in, offs,
                                ScalarType::Float);
  check_main_grad(op, main_grad, dy_t_in, offs.size(0), dy_t_in.size(1), x_t_in.size(1), overwrite);
  if (scale_dy_t_in.dim() == 1)
    return per_group_wgrad_(op, main_grad, dy_t_in, x_t_in, scale_dy_t_in, scale_x_t_in, offs,
                            overwrite);
  const Tensor dy_t = torch::stable::contiguous(dy_t_in), x_t = torch::stable::contiguous(x_t_in);
  const Tensor scale_dy_t = inner_contiguous(scale_dy_t_in);
  const Tensor scale_x_t = inner_contiguous(scale_x_t_in);
  const ColumnGroups groups(op, offs, x_t.size(0));
  accumulate_groups(main_grad, groups.row_starts, overwrite, [&](int64_t e, const Matrix& dw_e) {
    wgrad(dw_e, dy_t, x_t, scale_dy_t, scale_x_t, groups, e);
  });
}

}  // namespace grouped_linear::cpu
