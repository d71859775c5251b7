// Block-scaled FP8 products: operands are dequantized a group at a time and multiplied by torch's
// kernels, which sum in float32 throughout. That is what promoting every 128 of K is for on a GPU.
//
// Powers of two as scales make the operands bf16 numbers. Where the result is bf16 too, and the CPU
// multiplies bf16, nothing is lost and a product takes a quarter of the time (AMD EPYC 9005, 2
// cores: 950 against 230 GFLOP/s). Other operands are float32.

#include "../checks.h"
#include "../ops.h"
#include "matmul.h"
#include "per_group_mm.h"

namespace grouped_linear::cpu {
namespace {

bool multiplies_bf16() {
#if defined(__x86_64__) && defined(__GNUC__)
  static const bool supported = __builtin_cpu_supports("avx512bf16");
  return supported;
#else
  return false;
#endif
}

// Whether scales [rows, cols] of any strides leave e4m3 numbers exact in bf16.
bool exact_in_bf16(const float* scales, int64_t rows, int64_t cols, int64_t row_stride,
                   int64_t col_stride) {
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t c = 0; c < cols; ++c)
      if (!scale_is_exact_in_bf16(scales[r * row_stride + c * col_stride])) return false;
  return true;
}

template <typename Exact>
ScalarType operand_dtype(ScalarType out_dtype, const Exact& exact) {
  return out_dtype == ScalarType::BFloat16 && multiplies_bf16() && exact() ? ScalarType::BFloat16
                                                                           : ScalarType::Float;
}

// Rows [begin, end) of q [T, K] with scale [ceil(K / 128), >= T].
Scratch dequantize_rows(const Tensor& q, const Tensor& scale, int64_t begin, int64_t end,
                        ScalarType dtype) {
  const Matrix m = rows_of(q, begin, end);
  const auto* first = static_cast<const char*>(m.first);
  const float* scales = scale.const_data_ptr<float>() + begin;
  const int64_t scale_stride = scale.stride(0);
  Scratch x(m.rows, m.cols, dtype);
  torch::stable::parallel_for(0, m.rows, 16, [&](int64_t from, int64_t to) {
    for (int64_t r = from; r < to; ++r)
      dequantize_row(first + r * m.row_stride, m.cols, scales + r, scale_stride, dtype,
                     x.element(r, 0));
  });
  return x;
}

// Expert e of q [E, N, K] with scale [E, ceil(N / 128), ceil(K / 128)] of any strides.
Scratch dequantize_weight(const Tensor& q, const Tensor& scale, int64_t e, ScalarType dtype) {
  const Matrix m = group_of(q, e);
  const auto* first = static_cast<const char*>(m.first);
  const float* scales = scale.const_data_ptr<float>() + e * scale.stride(0);
  const int64_t row_stride = scale.stride(1), col_stride = scale.stride(2);
  Scratch w(m.rows, m.cols, dtype);
  torch::stable::parallel_for(0, m.rows, 16, [&](int64_t from, int64_t to) {
    for (int64_t n = from; n < to; ++n)
      dequantize_row(first + n * m.row_stride, m.cols, scales + n / kBlock * row_stride, col_stride,
                     dtype, w.element(n, 0));
  });
  return w;
}

// One group of columnwise data: the blocks from `begin` on of q_t [blocks, K, 128] with
// scale_t [blocks, K] -> [K, rows].
Scratch dequantize_columns(const Tensor& q_t, const Tensor& scale_t, int64_t begin, int64_t rows,
                           ScalarType dtype) {
  const int64_t K = q_t.size(1);
  const char* first = row_of(q_t, begin);
  const float* scales = scale_t.const_data_ptr<float>() + begin * scale_t.stride(0);
  const int64_t scale_stride = scale_t.stride(0);
  Scratch x_t(K, rows, dtype);
  torch::stable::parallel_for(0, K, 16, [&](int64_t from, int64_t to) {
    for (int64_t r = 0; r < rows; r += kBlock)
      for (int64_t k = from; k < to; ++k)
        dequantize_row(first + (r / kBlock * K + k) * kBlock, std::min(kBlock, rows - r),
                       scales + r / kBlock * scale_stride + k, 0, dtype, x_t.element(k, r));
  });
  return x_t;
}

// out = a @ b + bias summed in float32 and rounded once to out's dtype. bias: one row for all.
void matmul_and_store(const Matrix& out, const Matrix& a, const Matrix& b,
                      const std::optional<Matrix>& bias) {
  if (out.dtype == a.dtype) {
    std::optional<Matrix> rows = bias;
    if (rows) rows->rows = out.rows, rows->row_stride = 0;
    return matmul(out, a, b, rows);
  }
  Scratch y(out.rows, out.cols);
  matmul(y.view(), a, b);
  if (!bias) return store(y, nullptr, out);
  Scratch bias_row = to_float(*bias);
  store(y, bias_row.row(0), out);
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
  const auto exact = [&](const Tensor& scale_t) {
    const float* scales = scale_t.const_data_ptr<float>() + begin * scale_t.stride(0);
    return exact_in_bf16(scales, ceil_div(rows, kBlock), scale_t.size(1), scale_t.stride(0), 1);
  };
  const ScalarType dtype =
      operand_dtype(dw.dtype, [&] { return exact(scale_dy_t) && exact(scale_x_t); });
  Scratch dy = dequantize_columns(dy_t, scale_dy_t, begin, rows, dtype);
  Scratch x = dequantize_columns(x_t, scale_x_t, begin, rows, dtype);
  matmul_and_store(dw, dy.view(), x.view().transposed(), std::nullopt);
}

}  // namespace

Tensor grouped_scaled_mm(const Tensor& a_in, const Tensor& b_in, const Tensor& scale_a_in,
                         const Tensor& scale_b, const Tensor& offs,
                         const std::optional<Tensor>& bias_in,
                         std::optional<ScalarType> asked_dtype) {
  const ScalarType out_dtype = asked_dtype.value_or(ScalarType::BFloat16);
  check_grouped_scaled_mm(a_in, b_in, scale_a_in, scale_b, offs, bias_in, out_dtype);
  if (scale_a_in.dim() == 1)
    return per_group_mm(a_in, b_in, scale_a_in, scale_b, offs, bias_in, out_dtype);
  const Tensor a = inner_contiguous(a_in), b = inner_contiguous(b_in);
  const Tensor scale_a = inner_contiguous(scale_a_in);
  const std::optional<Tensor> bias = inner_contiguous(bias_in);
  const int64_t T = a.size(0), N = b.size(1);
  const auto starts = group_starts("grouped_scaled_mm", offs, T);
  Tensor y = torch::stable::new_empty(a, std::vector<int64_t>{T, N}, out_dtype);

  for (int64_t e = 0; e < offs.size(0); ++e) {
    const int64_t begin = starts[e], end = starts[e + 1];
    if (begin == end) continue;
    const ScalarType dtype = operand_dtype(out_dtype, [&] {
      return exact_in_bf16(scale_a.const_data_ptr<float>() + begin, scale_a.size(0), end - begin,
                           scale_a.stride(0), 1) &&
             exact_in_bf16(scale_b.const_data_ptr<float>() + e * scale_b.stride(0), scale_b.size(1),
                           scale_b.size(2), scale_b.stride(1), scale_b.stride(2));
    });
    Scratch a_e = dequantize_rows(a, scale_a, begin, end, dtype);
    Scratch b_e = dequantize_weight(b, scale_b, e, dtype);
    std::optional<Matrix> bias_e;
    if (bias) bias_e = rows_of(*bias, e, e + 1);
    matmul_and_store(rows_of(y, begin, end), a_e.view(), b_e.view().transposed(), bias_e);
  }
  zero_rows(y, starts.back());
  return y;
}

Tensor grouped_scaled_mm_wgrad(const Tensor& dy_t_in, const Tensor& x_t_in,
                               const Tensor& scale_dy_t_in, const Tensor& scale_x_t_in,
                               const Tensor& offs, std::optional<ScalarType> asked_dtype) {
  const ScalarType out_dtype = asked_dtype.value_or(ScalarType::BFloat16);
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
