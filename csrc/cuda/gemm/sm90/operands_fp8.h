// SPDX-License-Identifier: Apache-2.0
// The FP8 operands of GEMMs, as TMA reads them. a may be e5m2 where it has a scale per group;
// everything else is e4m3.
#pragma once

#include "cuda/gemm/sm90/launch.h"

namespace grouped_linear::cuda::sm90 {

template <typename A, Scaling scaling, Grouping grouping, bool gathers = false>
using Fp8Gemm = GemmConfig<A, __nv_fp8_e4m3,
                           GemmTraits{.grouping = grouping,
                                      .scaling = scaling,
                                      .a_major = Major::kK,
                                      .b_major = Major::kK,
                                      .gathers = gathers,
                                      .transposed = false,
                                      .store_work = StoreWork::kStore,
                                      .tile_n = kTileFp8.n,
                                      .stages = kTileFp8.stages}>;

// Boxes of the operands' maps, of the same size in every configuration here.
using Fp8Boxes = Fp8Gemm<__nv_fp8_e4m3, Scaling::kScalePerGroup, Grouping::kM>;
constexpr uint32_t kFp8ABoxRows = kTileM / 2, kFp8BBoxRows = Fp8Boxes::kTileN / Fp8Boxes::kBBoxes;

inline bool is_per_group(const Tensor& scale) { return scale.dim() == 1; }

inline Tensor readable_scale(const Tensor& scale) {
  return is_per_group(scale) ? as_dense(scale) : tma_readable(scale, 1);
}

// Block scales [rows, cols], read `width` columns at a time.
inline CUtensorMap scale_map(const char* op, const Tensor& scale, uint32_t width) {
  return tensor_map(op, scale.data_ptr(), ScalarType::Float, 4, {scale.size(1), scale.size(0)},
                    {map_stride(scale, 0, scale.size(1))}, {width, 1}, false);
}

// a [T, K] and b [E, N, K] of an M-grouped GEMM. Scales per group go with the epilogue, a's of 1 x
// 128 with the maps, and b's of 128 x 128, which are read by their strides, as scale_b_view.
struct MGroupedFp8 {
  Tensor a, b, scale_a, scale_b;
  TensorMaps maps;
  Scale128x128View scale_b_view{};
  EpilogueArguments epilogue;

  MGroupedFp8(const Launch& launch, const GroupedGemm& gemm)
      : a(tma_readable(gemm.a, 1)),
        b(tma_readable(gemm.b, 2)),
        scale_a(readable_scale(*gemm.scale_a)),
        scale_b(is_per_group(scale_a) ? readable_scale(*gemm.scale_b) : *gemm.scale_b),
        epilogue(gemm.epilogue) {
    const int64_t T = a.size(0), K = a.size(1), N = b.size(1), E = b.size(0);
    const CUtensorMap map_a =
        tensor_map(launch.op(), a.data_ptr(), ScalarType::Float8_e4m3fn, 1, {K, T},
                   {map_stride(a, 0, K)}, {kSwizzleBytes, kFp8ABoxRows}, true);
    const auto map_of_b = [&](uint32_t rows) {
      return tensor_map(launch.op(), b.data_ptr(), ScalarType::Float8_e4m3fn, 1, {K, N, E},
                        {map_stride(b, 1, K), map_stride(b, 0, N * K)}, {kSwizzleBytes, rows, 1},
                        true);
    };
    const CUtensorMap map_b = map_of_b(kFp8BBoxRows);
    maps = {map_a, map_b, map_a, map_b, map_a, map_of_b(kNarrowTileN)};
    if (is_per_group(scale_a)) {
      epilogue.scale_a = scale_a.const_data_ptr<float>();
      epilogue.scale_b = scale_b.const_data_ptr<float>();
    } else {
      maps.scale_a = scale_map(launch.op(), scale_a, kTileM + kRowScaleAlignment);
      scale_b_view = {scale_b.const_data_ptr<float>(), scale_b.stride(0), scale_b.stride(1),
                      scale_b.stride(2)};
    }
  }
};

}  // namespace grouped_linear::cuda::sm90
