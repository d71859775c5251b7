#include "checks.h"
#include "cpu/matmul.h"
#include "ops.h"

namespace grouped_linear::cpu {
namespace {

// Rows along K must be adjacent. If K is no multiple of 32, torch's bf16 GEMM on AMX units also
// reads what follows a row, and a NaN there times zero is NaN (torch 2.13, Xeon, 2026-11).
//
// b [E, N, K] may be a transposed view, as dgrad reads the weight: either of its last two
// dimensions may be the dense one.
Tensor dense_operand(const Tensor& b) {
  const bool dense_rows = b.stride(2) == 1 && b.stride(1) == b.size(2);
  return dense_rows || b.stride(1) == 1 ? b : as_dense(b);
}

// m's elements as float32; m may be a transposed view.
Scratch operand_to_float(const Matrix& m, Matrix* view) {
  const bool transposed = m.col_stride != 1;
  Scratch values = to_float(transposed ? m.transposed() : m);
  *view = transposed ? values.view().transposed() : values.view();
  return values;
}

// out = a @ b + bias in float32, rounded once to out's dtype.
void matmul_in_float(const Matrix& out, const Matrix& a, const Matrix& b, const float* bias) {
  Matrix a_view, b_view;
  const Scratch a_values = operand_to_float(a, &a_view), b_values = operand_to_float(b, &b_view);
  Scratch y(out.rows, out.cols);
  matmul(y.view(), a_view, b_view);
  store(y, bias, out);
}

// dw = dy.T @ x
void wgrad(const Matrix& dw, const Matrix& dy, const Matrix& x) {
  if (dw.dtype == dy.dtype)
    matmul(dw, dy.transposed(), x);
  else
    matmul_in_float(dw, dy.transposed(), x, nullptr);
}

}  // namespace

Tensor grouped_mm(const Tensor& a_in, const Tensor& b_in, const Tensor& offs,
                  const std::optional<Tensor>& bias_in, std::optional<ScalarType> out_dtype) {
  const ScalarType dtype = out_dtype.value_or(a_in.scalar_type());
  check_grouped_mm(a_in, b_in, offs, bias_in, dtype);
  const Tensor a = as_dense(a_in), b = dense_operand(b_in);
  const std::optional<Tensor> bias = with_dense_rows(bias_in);
  const auto starts = group_starts("grouped_mm", offs, a.size(0));
  Tensor y = new_tensor(a, {a.size(0), b.size(1)}, dtype);

  for (int64_t e = 0; e < offs.size(0); ++e) {
    const int64_t begin = starts[e], end = starts[e + 1];
    if (begin == end) continue;
    const Matrix y_e = rows_of(y, begin, end), a_e = rows_of(a, begin, end);
    const Matrix b_e = group_of(b, e).transposed();
    std::optional<Matrix> bias_e;
    if (bias) {
      bias_e = rows_of(*bias, e, e + 1);
      bias_e->rows = end - begin;  // one row for the whole group
      bias_e->row_stride = 0;
    }
    if (dtype == a.scalar_type()) {
      matmul(y_e, a_e, b_e, bias_e);
    } else {
      std::vector<float> bias_row(bias ? y.size(1) : 0);
      if (bias) load_row(bias_e->first, dtype, y.size(1), bias_row.data());
      matmul_in_float(y_e, a_e, b_e, bias ? bias_row.data() : nullptr);
    }
  }
  zero_rows(y, starts.back());
  return y;
}

Tensor grouped_mm_wgrad(const Tensor& dy_in, const Tensor& x_in, const Tensor& offs,
                        std::optional<ScalarType> out_dtype) {
  const ScalarType dtype = out_dtype.value_or(dy_in.scalar_type());
  check_grouped_mm_wgrad("grouped_mm_wgrad", dy_in, x_in, offs, dtype);
  const Tensor dy = with_dense_rows(dy_in), x = with_dense_rows(x_in);
  const auto starts = group_starts("grouped_mm_wgrad", offs, x.size(0));
  Tensor dw = new_tensor(x, {offs.size(0), dy.size(1), x.size(1)}, dtype);
  write_groups(dw, starts, [&](int64_t e, const Matrix& dw_e) {
    wgrad(dw_e, rows_of(dy, starts[e], starts[e + 1]), rows_of(x, starts[e], starts[e + 1]));
  });
  return dw;
}

void grouped_mm_wgrad_(const Tensor& main_grad, const Tensor& dy_in, const Tensor& x_in,
                       const Tensor& offs, const std::optional<Tensor>& overwrite) {
  const char* op = "grouped_mm_wgrad_";
  check_grouped_mm_wgrad(op, dy_in, x_in, offs, ScalarType::Float);
  check_main_grad(op, main_grad, dy_in, offs.size(0), dy_in.size(1), x_in.size(1), overwrite);
  const Tensor dy = with_dense_rows(dy_in), x = with_dense_rows(x_in);
  const auto starts = group_starts(op, offs, x.size(0));
  accumulate_groups(main_grad, starts, overwrite, [&](int64_t e, const Matrix& dw_e) {
    wgrad(dw_e, rows_of(dy, starts[e], starts[e + 1]), rows_of(x, starts[e], starts[e + 1]));
  });
}

}  // namespace grouped_linear::cpu
