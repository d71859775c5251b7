// SPDX-License-Identifier: Apache-2.0
#include "checks.h"
#include "cpu/gemm_operands.h"
#include "ops.h"

namespace grouped_linear::cpu {
namespace {

// If K is no multiple of 32, torch's bf16 GEMM on AMX units also reads what follows a row, and an
// infinity or NaN there times zero is NaN (torch 2.11 and 2.13, Xeon, 2026-11).
constexpr int64_t kAmxElements = 32;

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

// t, or its rows by number.
Tensor rows_in_order(const char* op, const char* owner, const Tensor& t, const char* name,
                     const std::optional<Tensor>& rows, int64_t count) {
  return rows ? gathered_rows(t, checked_rows(op, *rows, count, owner, t.size(0), name)) : t;
}

// The operands of a wgrad, and the rows of its groups.
struct WgradOperands {
  std::vector<int64_t> starts;
  Tensor dy, x;

  WgradOperands(const char* op, const Tensor& dy_in, const Tensor& x_in, const Tensor& offs,
                const std::optional<Tensor>& dy_rows, const std::optional<Tensor>& x_rows)
      : starts(group_starts(op, offs, (x_rows ? *x_rows : x_in).size(0))),
        dy(rows_in_order(op, "dy", with_dense_rows(dy_in), "dy_rows", dy_rows, starts.back())),
        x(rows_in_order(op, "x", with_dense_rows(x_in), "x_rows", x_rows, starts.back())) {}

  void compute(int64_t e, const Matrix& dw) const {
    wgrad(dw, rows_of(dy, starts[e], starts[e + 1]), rows_of(x, starts[e], starts[e + 1]));
  }
};

// The ends of groups, and the numbers of rows that are gathered.
void check_numbers(const char* op, const Tensor& a, const Tensor& offs,
                   const std::optional<Tensor>& rows) {
  const auto starts = group_starts(op, offs, (rows ? *rows : a).size(0));
  if (rows) checked_rows(op, *rows, starts.back(), "a", a.size(0));
}

}  // namespace

Tensor separate_rows(const Tensor& a) {
  const int64_t T = a.size(0), K = a.size(1), padded = round_up(K, kAmxElements);
  const Tensor dense = as_dense(a);
  if (a.scalar_type() != ScalarType::BFloat16 || padded == K) return dense;
  const Tensor rows = new_tensor(a, {T, padded}, a.scalar_type());
  const int64_t item = element_size(a.scalar_type());
  torch::stable::parallel_for(0, T, 16, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      std::memcpy(row_of(rows, t), row_of(dense, t), K * item);
      std::memset(row_of(rows, t) + K * item, 0, (padded - K) * item);
    }
  });
  return rows;
}

Tensor beside(const Tensor& t, const Tensor& low) {
  const int64_t last = t.dim() - 1, K = t.size(last), r = low.size(last);
  Tensor both =
      new_tensor(t, t.dim() == 2 ? Shape{t.size(0), K + r} : Shape{t.size(0), t.size(1), K + r},
                 t.scalar_type());
  Tensor first = torch::stable::narrow(both, last, 0, K);
  torch::stable::copy_(first, t);
  // It is made now: where autograd records, as in an exported graph, a view older than the first
  // copy is a leaf to it, which the second could not write.
  Tensor second = torch::stable::narrow(both, last, K, r);
  torch::stable::copy_(second, low);
  return both;
}

void multiply_group(const Matrix& out, const Matrix& a, const Matrix& b, const void* bias) {
  if (out.dtype == a.dtype) {
    std::optional<Matrix> row;  // one for the whole group
    if (bias) row = {const_cast<void*>(bias), out.dtype, out.rows, out.cols, 0, 1};
    return matmul(out, a, b, row);
  }
  std::vector<float> values(bias ? out.cols : 0);
  if (bias) load_row(bias, out.dtype, out.cols, values.data());
  matmul_in_float(out, a, b, bias ? values.data() : nullptr);
}

Tensor grouped_mm_nt(const Tensor& a_in, const Tensor& b_in, const Tensor& offs,
                     const std::optional<Tensor>& bias_in, std::optional<ScalarType> out_dtype,
                     const std::optional<Tensor>& rows, const LowRank& low) {
  const ScalarType dtype = out_dtype.value_or(dtype_of(a_in));
  check_grouped_mm("grouped_mm", a_in, b_in, offs, bias_in, dtype, rows, low);
  const Tensor b = low.b ? beside(b_in, *low.b) : dense_operand(b_in);
  const std::optional<Tensor> bias = with_dense_rows(bias_in);
  const int64_t T = (rows ? *rows : a_in).size(0);
  const auto starts = group_starts("grouped_mm", offs, T);
  Tensor a = rows_in_order("grouped_mm", "a", with_dense_rows(a_in), "rows", rows, starts.back());
  if (Tensor a_low = low.a.value_or(a); low.a)
    a = beside(a, torch::stable::narrow(a_low, 0, 0, a.size(0)));  // as many rows as are gathered
  a = separate_rows(a);
  Tensor y = new_tensor(a, {T, b.size(1)}, dtype);

  for (int64_t e = 0; e < offs.size(0); ++e) {
    const int64_t begin = starts[e], end = starts[e + 1];
    if (begin == end) continue;
    Matrix a_e = rows_of(a, begin, end);
    a_e.cols = b.size(2);
    multiply_group(rows_of(y, begin, end), a_e, group_of(b, e).transposed(),
                   bias ? row_of(*bias, e) : nullptr);
  }
  zero_rows(y, starts.back());
  return y;
}

// A CPU has no fused kernel. The arguments are checked all the same, with errors in this op's name.
std::optional<std::tuple<Tensor, Tensor>> fused_mm_swiglu(const Tensor& a, const Tensor&,
                                                          const Tensor& offs,
                                                          const std::optional<Tensor>&,
                                                          const std::optional<Tensor>& rows, bool,
                                                          const SwigluForm&) {
  check_numbers("grouped_mm_swiglu", a, offs, rows);
  return {};
}

std::optional<std::tuple<Tensor, Tensor, Tensor>> fused_mm_swiglu_grad(
    const Tensor& a, const Tensor&, const Tensor&, const Tensor&, const Tensor& offs,
    const std::optional<Tensor>& rows, const SwigluForm&) {
  check_numbers("grouped_mm_swiglu_grad", a, offs, rows);
  return {};
}

Tensor grouped_mm_wgrad(const Tensor& dy, const Tensor& x, const Tensor& offs,
                        std::optional<ScalarType> out_dtype, const std::optional<Tensor>& dy_rows,
                        const std::optional<Tensor>& x_rows) {
  const char* op = "grouped_mm_wgrad";
  const ScalarType dtype = out_dtype.value_or(dtype_of(dy));
  check_grouped_mm_wgrad(op, dy, x, offs, dtype, dy_rows, x_rows);
  const WgradOperands operands(op, dy, x, offs, dy_rows, x_rows);
  Tensor dw = new_tensor(x, {offs.size(0), dy.size(1), x.size(1)}, dtype);
  write_groups(dw, operands.starts,
               [&](int64_t e, const Matrix& dw_e) { operands.compute(e, dw_e); });
  return dw;
}

void grouped_mm_wgrad_(const Tensor& main_grad, const Tensor& dy, const Tensor& x,
                       const Tensor& offs, const std::optional<Tensor>& overwrite,
                       const std::optional<Tensor>& dy_rows, const std::optional<Tensor>& x_rows) {
  const char* op = "grouped_mm_wgrad_";
  check_grouped_mm_wgrad(op, dy, x, offs, ScalarType::Float, dy_rows, x_rows);
  check_main_grad(op, main_grad, dy, offs.size(0), dy.size(1), x.size(1), overwrite);
  const WgradOperands operands(op, dy, x, offs, dy_rows, x_rows);
  accumulate_groups(main_grad, operands.starts, overwrite,
                    [&](int64_t e, const Matrix& dw_e) { operands.compute(e, dw_e); });
}

}  // namespace grouped_linear::cpu
