// SPDX-License-Identifier: Apache-2.0
// FP8 operands. a may be e5m2 where it has a scale per group; everything else is e4m3.
#include "cuda/gemm/sm80/launch.h"

namespace grouped_linear::cuda::sm80 {
namespace {

template <typename A, Scaling scaling, Grouping grouping, GroupRows rows>
using Config = GemmConfig<A, __nv_fp8_e4m3, scaling, grouping, rows>;

// Scales per group go with the epilogue, others with the operands.
template <Grouping grouping, GroupRows rows>
void launch_scaled(const Launch& launch, Operands operands, const GroupedGemm& gemm) {
  const Tensor &scale_a = *gemm.scale_a, &scale_b = *gemm.scale_b;
  EpilogueArguments epilogue = gemm.epilogue;
  if (scale_a.dim() == 1) {
    const Tensor of_a = as_dense(scale_a), of_b = as_dense(scale_b);
    epilogue.scale_a = of_a.const_data_ptr<float>();
    epilogue.scale_b = of_b.const_data_ptr<float>();
    if (gemm.a.scalar_type() == ScalarType::Float8_e5m2)
      launch_gemm<Config<__nv_fp8_e5m2, Scaling::kScalePerGroup, grouping, rows>>(launch, operands,
                                                                                  gemm, epilogue);
    else
      launch_gemm<Config<__nv_fp8_e4m3, Scaling::kScalePerGroup, grouping, rows>>(launch, operands,
                                                                                  gemm, epilogue);
    return;
  }
  const Tensor of_a = with_dense_rows(scale_a);
  operands.scale_a = of_a.const_data_ptr<float>();
  operands.scale_a_stride = of_a.stride(0);
  if constexpr (grouping == Grouping::kK) {
    const Tensor of_b = with_dense_rows(scale_b);
    operands.scale_b = of_b.const_data_ptr<float>();
    operands.scale_b_k_stride = of_b.stride(0);
    launch_gemm<Config<__nv_fp8_e4m3, Scaling::kScale1x128, grouping, rows>>(launch, operands, gemm,
                                                                             epilogue);
  } else {
    operands.scale_b = scale_b.const_data_ptr<float>();
    operands.scale_b_group_stride = scale_b.stride(0);
    operands.scale_b_row_stride = scale_b.stride(1);
    operands.scale_b_k_stride = scale_b.stride(2);
    launch_gemm<Config<__nv_fp8_e4m3, Scaling::kScale128x128, grouping, rows>>(launch, operands,
                                                                               gemm, epilogue);
  }
}

}  // namespace

void run_fp8(const Launch& launch, const GroupedGemm& gemm) {
  if (gemm.grouping == Grouping::kM) {  // out = a @ b[e].T
    const Tensor a = vector_readable(gemm.a, 1), b = vector_readable(gemm.b, 2);
    const Operands operands = {view_of(a, -1, 0), view_of(b, 0, 1)};
    if (has_few_rows(gemm))
      return launch_scaled<Grouping::kM, GroupRows::kFew>(launch, operands, gemm);
    return launch_scaled<Grouping::kM, GroupRows::kMany>(launch, operands, gemm);
  }
  // out[e] = a.T @ b over each group's rows, operands in the padded columnwise layout.
  const Tensor a = vector_readable(gemm.a, 2), b = vector_readable(gemm.b, 2);
  launch_scaled<Grouping::kK, GroupRows::kMany>(launch, {view_of(a, 0, 1), view_of(b, 0, 1)}, gemm);
}

}  // namespace grouped_linear::cuda::sm80
