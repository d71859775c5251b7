// FP8 products with one scale a group. Arguments are those of the ops, checked.
#pragma once

#include "rows.h"

namespace grouped_linear::cpu {

Tensor per_group_mm(const Tensor& a, const Tensor& b, const Tensor& scale_a, const Tensor& scale_b,
                    const Tensor& offs, const std::optional<Tensor>& bias, ScalarType out_dtype);
Tensor per_group_wgrad(const char* op, const Tensor& dy_t, const Tensor& x_t,
                       const Tensor& scale_dy_t, const Tensor& scale_x_t, const Tensor& offs,
                       ScalarType out_dtype);
void per_group_wgrad_(const char* op, const Tensor& main_grad, const Tensor& dy_t,
                      const Tensor& x_t, const Tensor& scale_dy_t, const Tensor& scale_x_t,
                      const Tensor& offs, const std::optional<Tensor>& overwrite);

}  // namespace grouped_linear::cpu
