// SPDX-License-Identifier: Apache-2.0
// Grouped GEMMs whose experts are E tensors. The arguments are checked here, then the
// backend computes with one tensor. Nothing is copied if the experts are adjacent in
// memory.
#pragma once

#include "checks.h"
#include "experts.h"
#include "ops.h"

namespace grouped_linear {

template <typename Backend>
Tensor grouped_mm_list(const Tensor& a, const std::vector<Tensor>& b, const Tensor& offs,
                       const std::optional<Tensor>& bias, std::optional<ScalarType> out_dtype,
                       bool transpose_b, const std::optional<Tensor>& rows) {
  check_grouped_mm_list(a, b, offs, bias, out_dtype.value_or(dtype_of(a)), transpose_b, rows);
  const Tensor all = packed(b);
  return Backend::grouped_mm_nt(a, transpose_b ? all : transposed(all), offs, bias, out_dtype, rows,
                                {});
}

template <typename Backend>
void grouped_mm_wgrad_list_(const std::vector<Tensor>& main_grad, const Tensor& dy, const Tensor& x,
                            const Tensor& offs, const std::optional<Tensor>& overwrite,
                            const std::optional<Tensor>& dy_rows,
                            const std::optional<Tensor>& x_rows) {
  const char* op = "grouped_mm_wgrad_list_";
  check_grouped_mm_wgrad(op, dy, x, offs, ScalarType::Float, dy_rows, x_rows);
  check_main_grad_list(op, main_grad, dy, offs.size(0), dy.size(1), x.size(1), overwrite);
  write_packed(main_grad, [&](const Tensor& all) {
    Backend::grouped_mm_wgrad_(all, dy, x, offs, overwrite, dy_rows, x_rows);
  });
}

template <typename Backend>
void grouped_scaled_mm_wgrad_list_(const std::vector<Tensor>& main_grad, const Tensor& dy_t,
                                   const Tensor& x_t, const Tensor& scale_dy_t,
                                   const Tensor& scale_x_t, const Tensor& offs,
                                   const std::optional<Tensor>& overwrite) {
  const char* op = "grouped_scaled_mm_wgrad_list_";
  check_grouped_scaled_mm_wgrad(op, dy_t, x_t, scale_dy_t, scale_x_t, offs, ScalarType::Float);
  check_main_grad_list(op, main_grad, dy_t, offs.size(0), dy_t.size(1), x_t.size(1), overwrite);
  write_packed(main_grad, [&](const Tensor& all) {
    Backend::grouped_scaled_mm_wgrad_(all, dy_t, x_t, scale_dy_t, scale_x_t, offs, overwrite);
  });
}

}  // namespace grouped_linear
