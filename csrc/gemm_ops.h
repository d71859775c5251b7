// SPDX-License-Identifier: Apache-2.0
// The M-grouped GEMMs whose b is one tensor, a[t] @ b[e]. Their b [E, K, N] is torch's; checks and
// backends see [E, N, K], a view.
#pragma once

#include "checks.h"
#include "ops.h"

namespace grouped_linear {

// A tensor of another number of dimensions stays as it is: the checks refuse it.
inline Tensor transposed_b(const Tensor& b) { return b.dim() == 3 ? transposed(b) : b; }

inline LowRank low_rank(const std::optional<Tensor>& a_low, const std::optional<Tensor>& b_low) {
  return {a_low, b_low ? std::optional(transposed_b(*b_low)) : std::nullopt};
}

template <typename Backend>
Tensor grouped_mm(const Tensor& a, const Tensor& b, const Tensor& offs,
                  const std::optional<Tensor>& bias, std::optional<ScalarType> out_dtype,
                  const std::optional<Tensor>& rows, const std::optional<Tensor>& a_low,
                  const std::optional<Tensor>& b_low) {
  return Backend::grouped_mm_nt(a, transposed_b(b), offs, bias, out_dtype, rows,
                                low_rank(a_low, b_low));
}

template <typename Backend>
Tensor grouped_scaled_mm(const Tensor& a, const Tensor& b, const Tensor& scale_a,
                         const Tensor& scale_b, const Tensor& offs,
                         const std::optional<Tensor>& bias, std::optional<ScalarType> out_dtype,
                         const std::optional<Tensor>& rows, const std::optional<Tensor>& a_low,
                         const std::optional<Tensor>& b_low) {
  return Backend::grouped_scaled_mm_nt(a, transposed_b(b), scale_a, transposed_b(scale_b), offs,
                                       bias, out_dtype, rows, low_rank(a_low, b_low));
}

// With SwiGLU, or its gradient, of what the GEMM computes: one kernel where the backend has one,
// else the GEMM and a pass over its output.
template <typename Backend>
std::tuple<Tensor, Tensor> grouped_mm_swiglu(const Tensor& a, const Tensor& b_in,
                                             const Tensor& offs, const std::optional<Tensor>& bias,
                                             const std::optional<Tensor>& rows, bool keep_gate_up,
                                             double alpha, double beta, std::optional<double> limit,
                                             bool interleaved, double cubic) {
  const Tensor b = transposed_b(b_in);
  check_grouped_mm_swiglu(a, b, offs, bias, rows);
  const SwigluForm form = checked_form("grouped_mm_swiglu", alpha, beta, limit, interleaved, cubic);
  if (const auto fused = Backend::fused_mm_swiglu(a, b, offs, bias, rows, keep_gate_up, form))
    return *fused;
  const Tensor gate_up = Backend::grouped_mm_nt(a, b, offs, bias, std::nullopt, rows, {});
  const Tensor h = Backend::swiglu(gate_up, offs, alpha, beta, limit, interleaved, cubic);
  return {keep_gate_up ? gate_up : new_tensor(a, {0}, a.scalar_type()), h};
}

template <typename Backend>
std::tuple<Tensor, Tensor, Tensor> grouped_mm_swiglu_grad(
    const Tensor& a, const Tensor& b_in, const Tensor& gate_up, const Tensor& weight,
    const Tensor& offs, const std::optional<Tensor>& rows, double alpha, double beta,
    std::optional<double> limit, bool interleaved, double cubic) {
  const Tensor b = transposed_b(b_in);
  check_grouped_mm_swiglu_grad(a, b, gate_up, weight, offs, rows);
  const SwigluForm form =
      checked_form("grouped_mm_swiglu_grad", alpha, beta, limit, interleaved, cubic);
  if (const auto fused = Backend::fused_mm_swiglu_grad(a, b, gate_up, weight, offs, rows, form))
    return *fused;
  const Tensor dh = Backend::grouped_mm_nt(a, b, offs, std::nullopt, std::nullopt, rows, {});
  return Backend::swiglu_grad(dh, gate_up, weight, offs, alpha, beta, limit, interleaved, cubic);
}

}  // namespace grouped_linear
