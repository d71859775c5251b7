// SPDX-License-Identifier: Apache-2.0
#include "cuda/gemm/gemm.h"
#include "ops.h"

namespace grouped_linear::cuda {
namespace {

// dw[e] = dy.T @ x over each group's rows
void run_wgrad(const Launch& launch, const Tensor& dy, const Tensor& x, const Tensor& offs,
               const EpilogueArguments& epilogue, const std::optional<Tensor>& dy_rows,
               const std::optional<Tensor>& x_rows) {
  // A source without rows has none to gather: then all groups are empty, and no number is read.
  const bool none = dy.size(0) == 0 || x.size(0) == 0;
  GroupedGemm gemm = k_grouped(launch, dy, x, offs, none ? 0 : (x_rows ? *x_rows : x).size(0));
  gemm.epilogue = epilogue;
  if (!none) gemm.a_rows = as_dense(dy_rows), gemm.b_rows = as_dense(x_rows);
  run_grouped_gemm(launch, gemm);
}

}  // namespace

Tensor grouped_mm_nt(const Tensor& a, const Tensor& b, const Tensor& offs,
                     const std::optional<Tensor>& bias_in, std::optional<ScalarType> out_dtype,
                     const std::optional<Tensor>& a_rows, const LowRank& low) {
  const ScalarType dtype = out_dtype.value_or(dtype_of(a));
  check_grouped_mm("grouped_mm", a, b, offs, bias_in, dtype, a_rows, low);

  const Launch launch("grouped_mm", a);
  if (low.a && low.a->size(0) > 0 && !adds_low_rank(launch, low)) {
    constexpr ScalarType sums = ScalarType::Float;
    const Tensor first = grouped_mm_nt(a, b, offs, converted(bias_in, sums), sums, a_rows, {});
    return low_rank_sum(launch, first, low, offs, dtype);
  }
  return m_grouped_result(
      launch, a, b, offs, bias_in, b.size(1), dtype, a_rows, low, [&](const GroupedGemm& gemm) {
        run_grouped_gemm(launch, copies_rows(launch, gemm) ? gather_before(launch, gemm) : gemm);
      });
}

std::optional<std::tuple<Tensor, Tensor>> fused_mm_swiglu(
    const Tensor& a, const Tensor& b, const Tensor& offs, const std::optional<Tensor>& bias_in,
    const std::optional<Tensor>& a_rows, bool keep_gate_up, const SwigluForm& form) {
  const ScalarType dtype = a.scalar_type();
  const int64_t T = (a_rows ? *a_rows : a).size(0), N = b.size(1);
  if (T == 0 || a.size(0) == 0) return {};
  const Launch launch("grouped_mm_swiglu", a);
  GroupedGemm gemm = m_grouped(launch, a, b, offs, N, a_rows);
  const bool copies = copies_rows(launch, gemm);
  GroupedGemm in_order = gemm;
  if (copies) in_order.a_rows.reset();
  if (!has_swiglu(launch, in_order, form)) return {};
  if (copies) gemm = gather_before(launch, gemm);
  const Tensor gate_up = new_tensor(a, keep_gate_up ? Shape{T, N} : Shape{0}, dtype);
  const Tensor h = new_tensor(a, {T, N / 2}, dtype);
  const std::optional<Tensor> bias = with_dense_rows(bias_in);
  gemm.epilogue = epilogue_arguments(gate_up, bias, false, std::nullopt);
  run_swiglu(launch, gemm, {h, keep_gate_up, form});
  return {{gate_up, h}};
}

std::optional<std::tuple<Tensor, Tensor, Tensor>> fused_mm_swiglu_grad(
    const Tensor& a, const Tensor& b, const Tensor& gate_up, const Tensor& weight,
    const Tensor& offs, const std::optional<Tensor>& a_rows, const SwigluForm& form) {
  const ScalarType dtype = a.scalar_type();
  const int64_t T = gate_up.size(0), F = b.size(1);
  if (T == 0 || a.size(0) == 0) return {};
  const Launch launch("grouped_mm_swiglu_grad", a);
  GroupedGemm gemm = m_grouped(launch, a, b, offs, F, a_rows);
  if (!has_swiglu_grad(launch, gemm, form)) return {};
  const Tensor d_gate_up = new_tensor(a, {T, 2 * F}, dtype), h = new_tensor(a, {T, F}, dtype);
  const Tensor d_weight = new_tensor(a, {T}, ScalarType::Float);
  gemm.epilogue = epilogue_arguments(h, {}, false, std::nullopt);
  run_swiglu_grad(launch, gemm, {gate_up, as_dense(weight), d_gate_up, h, d_weight, form});
  return {{d_gate_up, h, d_weight}};
}

Tensor grouped_mm_wgrad(const Tensor& dy, const Tensor& x, const Tensor& offs,
                        std::optional<ScalarType> out_dtype, const std::optional<Tensor>& dy_rows,
                        const std::optional<Tensor>& x_rows) {
  const ScalarType dtype = out_dtype.value_or(dtype_of(dy));
  check_grouped_mm_wgrad("grouped_mm_wgrad", dy, x, offs, dtype, dy_rows, x_rows);

  const Launch launch("grouped_mm_wgrad", x);
  Tensor dw = new_tensor(x, {offs.size(0), dy.size(1), x.size(1)}, dtype);
  run_wgrad(launch, dy, x, offs, epilogue_arguments(dw, std::nullopt, false, std::nullopt), dy_rows,
            x_rows);
  return dw;
}

void grouped_mm_wgrad_(const Tensor& main_grad, const Tensor& dy, const Tensor& x,
                       const Tensor& offs, const std::optional<Tensor>& overwrite,
                       const std::optional<Tensor>& dy_rows, const std::optional<Tensor>& x_rows) {
  const char* op = "grouped_mm_wgrad_";
  check_grouped_mm_wgrad(op, dy, x, offs, ScalarType::Float, dy_rows, x_rows);
  check_main_grad(op, main_grad, dy, offs.size(0), dy.size(1), x.size(1), overwrite);

  const Launch launch(op, x);
  run_wgrad(launch, dy, x, offs, epilogue_arguments(main_grad, std::nullopt, true, overwrite),
            dy_rows, x_rows);
}

}  // namespace grouped_linear::cuda
