// Grouped GEMMs with SwiGLU, or its gradient, of what they compute: one kernel where the backend
// has one, else the GEMM and a pass over its output.
#pragma once

#include "checks.h"
#include "ops.h"

namespace grouped_linear {

template <typename Backend>
std::tuple<Tensor, Tensor> grouped_mm_swiglu(const Tensor& a, const Tensor& b, const Tensor& offs,
                                             const std::optional<Tensor>& bias,
                                             const std::optional<Tensor>& rows, bool keep_gate_up,
                                             double alpha, double beta, std::optional<double> limit,
                                             bool interleaved, double cubic) {
  check_grouped_mm_swiglu(a, b, offs, bias, rows);
  const SwigluForm form = checked_form("grouped_mm_swiglu", alpha, beta, limit, interleaved, cubic);
  if (const auto fused = Backend::fused_mm_swiglu(a, b, offs, bias, rows, keep_gate_up, form))
    return *fused;
  const Tensor gate_up = Backend::grouped_mm(a, b, offs, bias, std::nullopt, rows);
  const Tensor h = Backend::swiglu(gate_up, offs, alpha, beta, limit, interleaved, cubic);
  return {keep_gate_up ? gate_up : new_tensor(a, {0}, a.scalar_type()), h};
}

template <typename Backend>
std::tuple<Tensor, Tensor, Tensor> grouped_mm_swiglu_grad(
    const Tensor& a, const Tensor& b, const Tensor& gate_up, const Tensor& weight,
    const Tensor& offs, const std::optional<Tensor>& rows, double alpha, double beta,
    std::optional<double> limit, bool interleaved, double cubic) {
  check_grouped_mm_swiglu_grad(a, b, gate_up, weight, offs, rows);
  const SwigluForm form =
      checked_form("grouped_mm_swiglu_grad", alpha, beta, limit, interleaved, cubic);
  if (const auto fused = Backend::fused_mm_swiglu_grad(a, b, gate_up, weight, offs, rows, form))
    return *fused;
  const Tensor dh = Backend::grouped_mm(a, b, offs, std::nullopt, std::nullopt, rows);
  return Backend::swiglu_grad(dh, gate_up, weight, offs, alpha, beta, limit, interleaved, cubic);
}

}  // namespace grouped_linear
