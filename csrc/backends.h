// SPDX-License-Identifier: Apache-2.0
// The ops that are made of other ops, for each backend. Backend names what they call.
#pragma once

#include "cpu/rows.h"
#include "expert_list_ops.h"
#include "gemm_ops.h"
#include "layer_ops.h"
#include "ops.h"
#include "tensors.h"

namespace grouped_linear::cpu {

struct Backend {
  static constexpr auto& new_output = cpu::new_output;
  static constexpr auto& splits_to_offsets = cpu::splits_to_offsets;
  static constexpr auto& quantize_rows = cpu::quantize_rows;
  static constexpr auto& quantize_rows_and_weight = cpu::quantize_rows_and_weight;
  static constexpr auto& swiglu = cpu::swiglu;
  static constexpr auto& swiglu_grad = cpu::swiglu_grad;
  static constexpr auto& grouped_mm_nt = cpu::grouped_mm_nt;
  static constexpr auto& fused_mm_swiglu = cpu::fused_mm_swiglu;
  static constexpr auto& fused_mm_swiglu_grad = cpu::fused_mm_swiglu_grad;
  static constexpr auto& grouped_mm_wgrad_ = cpu::grouped_mm_wgrad_;
  static constexpr auto& grouped_scaled_mm_nt = cpu::grouped_scaled_mm_nt;
  static constexpr auto& grouped_scaled_mm_wgrad = cpu::grouped_scaled_mm_wgrad;
  static constexpr auto& grouped_scaled_mm_wgrad_ = cpu::grouped_scaled_mm_wgrad_;
};

inline constexpr auto& grouped_mm = grouped_linear::grouped_mm<Backend>;
inline constexpr auto& grouped_scaled_mm = grouped_linear::grouped_scaled_mm<Backend>;
inline constexpr auto& grouped_mm_list = grouped_linear::grouped_mm_list<Backend>;
inline constexpr auto& grouped_mm_swiglu = grouped_linear::grouped_mm_swiglu<Backend>;
inline constexpr auto& grouped_mm_swiglu_grad = grouped_linear::grouped_mm_swiglu_grad<Backend>;
inline constexpr auto& grouped_mm_wgrad_list_ = grouped_linear::grouped_mm_wgrad_list_<Backend>;
inline constexpr auto& grouped_scaled_mm_wgrad_list_ =
    grouped_linear::grouped_scaled_mm_wgrad_list_<Backend>;
inline constexpr auto& block_scaled_linear = grouped_linear::block_scaled_linear<Backend>;
inline constexpr auto& block_scaled_linear_grad = grouped_linear::block_scaled_linear_grad<Backend>;

}  // namespace grouped_linear::cpu

#ifdef GROUPED_LINEAR_CUDA
namespace grouped_linear::cuda {

struct Backend {
  static constexpr auto& new_output = grouped_linear::new_tensor;
  static constexpr auto& splits_to_offsets = cuda::splits_to_offsets;
  static constexpr auto& quantize_rows = cuda::quantize_rows;
  static constexpr auto& quantize_rows_and_weight = cuda::quantize_rows_and_weight;
  static constexpr auto& swiglu = cuda::swiglu;
  static constexpr auto& swiglu_grad = cuda::swiglu_grad;
  static constexpr auto& grouped_mm_nt = cuda::grouped_mm_nt;
  static constexpr auto& fused_mm_swiglu = cuda::fused_mm_swiglu;
  static constexpr auto& fused_mm_swiglu_grad = cuda::fused_mm_swiglu_grad;
  static constexpr auto& grouped_mm_wgrad_ = cuda::grouped_mm_wgrad_;
  static constexpr auto& grouped_scaled_mm_nt = cuda::grouped_scaled_mm_nt;
  static constexpr auto& grouped_scaled_mm_wgrad = cuda::grouped_scaled_mm_wgrad;
  static constexpr auto& grouped_scaled_mm_wgrad_ = cuda::grouped_scaled_mm_wgrad_;
};

inline constexpr auto& grouped_mm = grouped_linear::grouped_mm<Backend>;
inline constexpr auto& grouped_scaled_mm = grouped_linear::grouped_scaled_mm<Backend>;
inline constexpr auto& grouped_mm_list = grouped_linear::grouped_mm_list<Backend>;
inline constexpr auto& grouped_mm_swiglu = grouped_linear::grouped_mm_swiglu<Backend>;
inline constexpr auto& grouped_mm_swiglu_grad = grouped_linear::grouped_mm_swiglu_grad<Backend>;
inline constexpr auto& grouped_mm_wgrad_list_ = grouped_linear::grouped_mm_wgrad_list_<Backend>;
inline constexpr auto& grouped_scaled_mm_wgrad_list_ =
    grouped_linear::grouped_scaled_mm_wgrad_list_<Backend>;
inline constexpr auto& block_scaled_linear = grouped_linear::block_scaled_linear<Backend>;
inline constexpr auto& block_scaled_linear_grad = grouped_linear::block_scaled_linear_grad<Backend>;

}  // namespace grouped_linear::cuda
#endif
