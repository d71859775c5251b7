// SPDX-License-Identifier: Apache-2.0
// FP8 operands. a may be e5m2 where it has a scale per group; everything else is e4m3.
#include "cuda/gemm/sm90/operands_fp8.h"

namespace grouped_linear::cuda::sm90 {
namespace {

// A kernel for each type of a and kind of scales. gathered: of a's rows, M-grouped.
template <Grouping grouping>
void launch_scaled(const Launch& launch, const TensorMaps& maps, const GroupedGemm& gemm,
                   bool per_group, const EpilogueArguments& epilogue,
                   const Scale128x128View& scale_b_view = {},
                   const std::optional<GatheredRows>& gathered = {}) {
  if (!per_group) {
    constexpr Scaling scaling =
        grouping == Grouping::kK ? Scaling::kScale1x128 : Scaling::kScale128x128;
    if constexpr (grouping == Grouping::kM) {
      if (gathered)
        return launch_gemm<Fp8Gemm<__nv_fp8_e4m3, scaling, grouping, true>>(
            launch, maps, gemm, scale_b_view, epilogue, *gathered);
    }
    return launch_gemm<Fp8Gemm<__nv_fp8_e4m3, scaling, grouping>>(launch, maps, gemm, scale_b_view,
                                                                  epilogue);
  }
  if (gemm.a.scalar_type() == ScalarType::Float8_e5m2)
    launch_gemm<Fp8Gemm<__nv_fp8_e5m2, Scaling::kScalePerGroup, grouping>>(launch, maps, gemm, {},
                                                                           epilogue);
  else
    launch_gemm<Fp8Gemm<__nv_fp8_e4m3, Scaling::kScalePerGroup, grouping>>(launch, maps, gemm, {},
                                                                           epilogue);
}

// out = a @ b[e].T
void run_m_grouped(const Launch& launch, const GroupedGemm& gemm) {
  const MGroupedFp8 operands(launch, gemm);
  std::optional<GatheredRows> gathered;
  if (gemm.a_rows) {
    const Tensor& scale_a = operands.scale_a;
    gathered = gathered_rows(launch.op(), gemm.a_rows, operands.a);
    gathered->scales = scale_a.const_data_ptr<float>();
    gathered->scale_stride = map_stride(scale_a, 0, scale_a.size(1));
  }
  launch_scaled<Grouping::kM>(launch, operands.maps, gemm, is_per_group(operands.scale_a),
                              operands.epilogue, operands.scale_b_view, gathered);
}

// out[e] = a.T @ b over each group's rows, operands in the padded columnwise layout.
void run_k_grouped(const Launch& launch, const GroupedGemm& gemm) {
  const Tensor a = tma_readable(gemm.a, 2), b = tma_readable(gemm.b, 2);
  const Tensor scale_a = readable_scale(*gemm.scale_a), scale_b = readable_scale(*gemm.scale_b);
  const int64_t blocks = b.size(0);
  const auto map_of = [&](const Tensor& t, uint32_t rows) {
    const int64_t features = t.size(1);
    return tensor_map(launch.op(), map_address(t, gemm.epilogue.out), ScalarType::Float8_e4m3fn, 1,
                      {kPaddedBlock, features, std::max<int64_t>(blocks, 1)},
                      {map_stride(t, 1, kPaddedBlock), map_stride(t, 0, features * kPaddedBlock)},
                      {kSwizzleBytes, rows, 1}, true);
  };
  const CUtensorMap map_a = map_of(a, kFp8ABoxRows), map_b = map_of(b, kFp8BBoxRows);
  TensorMaps maps{map_a, map_b, map_a, map_b, map_a, map_b};
  EpilogueArguments epilogue = gemm.epilogue;
  if (is_per_group(scale_a)) {
    epilogue.scale_a = scale_a.const_data_ptr<float>();
    epilogue.scale_b = scale_b.const_data_ptr<float>();
  } else if (blocks > 0) {
    maps.scale_a = scale_map(launch.op(), scale_a, kTileM);
    maps.scale_b = scale_map(launch.op(), scale_b, Fp8Boxes::kTileN);
  }
  launch_scaled<Grouping::kK>(launch, maps, gemm, is_per_group(scale_a), epilogue);
}

}  // namespace

void run_fp8(const Launch& launch, const GroupedGemm& gemm) {
  return gemm.grouping == Grouping::kM ? run_m_grouped(launch, gemm) : run_k_grouped(launch, gemm);
}

}  // namespace grouped_linear::cuda::sm90
