// SPDX-License-Identifier: Apache-2.0
#include "cuda/gemm/gemm.h"
#include "ops.h"

namespace grouped_linear::cuda {
namespace {

// dw[e] = dy.T @ x over each group's rows, operands in the padded columnwise layout
void run_wgrad(const Launch& launch, const Tensor& dy_t, const Tensor& x_t,
               const Tensor& scale_dy_t, const Tensor& scale_x_t, const Tensor& offs,
               const EpilogueArguments& epilogue) {
  GroupedGemm gemm = k_grouped(launch, dy_t, x_t, offs, x_t.size(0) * kBlock);
  gemm.scale_a = scale_dy_t, gemm.scale_b = scale_x_t;
  gemm.epilogue = epilogue;
  run_grouped_gemm(launch, gemm);
}

}  // namespace

Tensor grouped_scaled_mm_nt(const Tensor& a, const Tensor& b, const Tensor& scale_a,
                            const Tensor& scale_b, const Tensor& offs,
                            const std::optional<Tensor>& bias_in,
                            std::optional<ScalarType> asked_dtype,
                            const std::optional<Tensor>& a_rows, const LowRank& low) {
  const ScalarType out_dtype = asked_dtype.value_or(ScalarType::BFloat16);
  check_grouped_scaled_mm(a, b, scale_a, scale_b, offs, bias_in, out_dtype, a_rows, low);

  const Launch launch("grouped_scaled_mm", a);
  if (low.a && low.a->size(0) > 0 && !adds_low_rank(launch, low)) {
    constexpr ScalarType sums = ScalarType::Float;
    const Tensor first = grouped_scaled_mm_nt(a, b, scale_a, scale_b, offs,
                                              converted(bias_in, sums), sums, a_rows, {});
    return low_rank_sum(launch, first, low, offs, out_dtype);
  }
  return m_grouped_result(launch, a, b, offs, bias_in, b.size(1), out_dtype, a_rows, low,
                          [&](GroupedGemm& gemm) {
                            gemm.scale_a = scale_a, gemm.scale_b = scale_b;
                            run_grouped_gemm(launch, gemm);
                          });
}

Tensor grouped_scaled_mm_wgrad(const Tensor& dy_t, const Tensor& x_t, const Tensor& scale_dy_t,
                               const Tensor& scale_x_t, const Tensor& offs,
                               std::optional<ScalarType> asked_dtype) {
  const ScalarType out_dtype = asked_dtype.value_or(ScalarType::BFloat16);
  const char* op = "grouped_scaled_mm_wgrad";
  check_grouped_scaled_mm_wgrad(op, dy_t, x_t, scale_dy_t, scale_x_t, offs, out_dtype);

  const Launch launch(op, x_t);
  Tensor dw = new_tensor(x_t, {offs.size(0), dy_t.size(1), x_t.size(1)}, out_dtype);
  run_wgrad(launch, dy_t, x_t, scale_dy_t, scale_x_t, offs,
            epilogue_arguments(dw, std::nullopt, false, std::nullopt));
  return dw;
}

void grouped_scaled_mm_wgrad_(const Tensor& main_grad, const Tensor& dy_t, const Tensor& x_t,
                              const Tensor& scale_dy_t, const Tensor& scale_x_t, const Tensor& offs,
                              const std::optional<Tensor>& overwrite) {
  const char* op = "grouped_scaled_mm_wgrad_";
  check_grouped_scaled_mm_wgrad(op, dy_t, x_t, scale_dy_t, scale_x_t, offs, ScalarType::Float);
  check_main_grad(op, main_grad, dy_t, offs.size(0), dy_t.size(1), x_t.size(1), overwrite);

  const Launch launch(op, x_t);
  run_wgrad(launch, dy_t, x_t, scale_dy_t, scale_x_t, offs,
            epilogue_arguments(main_grad, std::nullopt, true, overwrite));
}

}  // namespace grouped_linear::cuda
