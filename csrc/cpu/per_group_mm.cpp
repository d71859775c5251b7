// FP8 numbers are multiplied as they are, in float32, and a group's two scales are applied to the
// sums, first a's or dy's: that is what an epilogue does on a GPU.

#include "per_group_mm.h"

#include "../checks.h"
#include "matmul.h"

namespace grouped_linear::cpu {
namespace {

float scale_of(const Tensor& scale_E, int64_t e) {
  return scale_E.const_data_ptr<float>()[e * scale_E.stride(0)];
}

// out = (a @ b) * scale_a * scale_b + bias, rounded once. bias: one float32 row or null.
void multiply(const Matrix& out, const Matrix& a, const Matrix& b, float scale_a, float scale_b,
              const float* bias) {
  Scratch y(out.rows, out.cols);
  matmul(y.view(), a, b);
  torch::stable::parallel_for(0, out.rows, 16, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r)
      for (int64_t c = 0; c < out.cols; ++c) y.row(r)[c] = y.row(r)[c] * scale_a * scale_b;
  });
  store(y, bias, out);
}

// The blocks of q_t [blocks, K, 128] that hold one group's rows, as float32 [K, rows].
Scratch load_columns(const Tensor& q_t, const std::vector<RowBlock>& blocks, int64_t first_row,
                     int64_t rows) {
  const int64_t K = q_t.size(1);
  Scratch x_t(K, rows);
  torch::stable::parallel_for(0, K, 16, [&](int64_t begin, int64_t end) {
    for (const RowBlock& block : blocks)
      for (int64_t k = begin; k < end; ++k)
        load_row(row_of(q_t, block.index) + k * kBlock, q_t.scalar_type(), block.end - block.begin,
                 x_t.row(k) + block.begin - first_row);
  });
  return x_t;
}

// Calls visit(wgrad) with what writes group e's weight gradient into a matrix.
template <typename Visit>
void with_wgrad(const char* op, const Tensor& dy_t_in, const Tensor& x_t_in,
                const Tensor& scale_dy_t, const Tensor& scale_x_t, const Tensor& offs,
                const Visit& visit) {
  const Tensor dy_t = torch::stable::contiguous(dy_t_in), x_t = torch::stable::contiguous(x_t_in);
  const auto starts = group_starts(op, offs, x_t.size(0) * kBlock);
  const auto blocks = row_blocks(starts);
  check(static_cast<int64_t>(blocks.size()) <= x_t.size(0), op, ": offs need ", blocks.size(),
        " blocks of ", kBlock, " rows, dy_t has ", x_t.size(0));
  visit(starts, [&](int64_t e, const Matrix& dw) {
    std::vector<RowBlock> own;
    for (const RowBlock& block : blocks)
      if (block.group == e) own.push_back(block);
    const int64_t rows = starts[e + 1] - starts[e];
    Scratch dy = load_columns(dy_t, own, starts[e], rows);
    Scratch x = load_columns(x_t, own, starts[e], rows);
    multiply(dw, dy.view(), x.view().transposed(), scale_of(scale_dy_t, e), scale_of(scale_x_t, e),
             nullptr);
  });
}

}  // namespace

Tensor per_group_mm(const Tensor& a_in, const Tensor& b_in, const Tensor& scale_a,
                    const Tensor& scale_b, const Tensor& offs, const std::optional<Tensor>& bias_in,
                    ScalarType out_dtype) {
  const Tensor a = inner_contiguous(a_in), b = inner_contiguous(b_in);
  const std::optional<Tensor> bias = inner_contiguous(bias_in);
  const int64_t T = a.size(0), N = b.size(1);
  const auto starts = group_starts("grouped_scaled_mm", offs, T);
  Tensor y = torch::stable::new_empty(a, std::vector<int64_t>{T, N}, out_dtype);

  std::vector<float> bias_row(bias ? N : 0);
  for (int64_t e = 0; e < offs.size(0); ++e) {
    const int64_t begin = starts[e], end = starts[e + 1];
    if (begin == end) continue;
    Scratch a_e = to_float(rows_of(a, begin, end)), b_e = to_float(group_of(b, e));
    if (bias) load_row(row_of(*bias, e), out_dtype, N, bias_row.data());
    multiply(rows_of(y, begin, end), a_e.view(), b_e.view().transposed(), scale_of(scale_a, e),
             scale_of(scale_b, e), bias ? bias_row.data() : nullptr);
  }
  zero_rows(y, starts.back());
  return y;
}

Tensor per_group_wgrad(const char* op, const Tensor& dy_t, const Tensor& x_t,
                       const Tensor& scale_dy_t, const Tensor& scale_x_t, const Tensor& offs,
                       ScalarType out_dtype) {
  Tensor dw = torch::stable::new_empty(
      x_t, std::vector<int64_t>{offs.size(0), dy_t.size(1), x_t.size(1)}, out_dtype);
  with_wgrad(op, dy_t, x_t, scale_dy_t, scale_x_t, offs,
             [&](const auto& starts, const auto& wgrad) { write_groups(dw, starts, wgrad); });
  return dw;
}

void per_group_wgrad_(const char* op, const Tensor& main_grad, const Tensor& dy_t,
                      const Tensor& x_t, const Tensor& scale_dy_t, const Tensor& scale_x_t,
                      const Tensor& offs, const std::optional<Tensor>& overwrite) {
  with_wgrad(op, dy_t, x_t, scale_dy_t, scale_x_t, offs,
             [&](const auto& starts, const auto& wgrad) {
               accumulate_groups(main_grad, starts, overwrite, wgrad);
             });
}

}  // namespace grouped_linear::cpu
