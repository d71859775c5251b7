// FP8 operands. a may be e5m2 where it has a scale per group; everything else is e4m3.
#include "cuda/gemm/sm90/launch.h"

namespace grouped_linear::cuda::sm90 {
namespace {

template <typename A, Scaling scaling, Grouping grouping, bool gathers = false>
using Config = GemmConfig<A, __nv_fp8_e4m3,
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
using Boxes = Config<__nv_fp8_e4m3, Scaling::kScalePerGroup, Grouping::kM>;
constexpr uint32_t kABoxRows = kTileM / 2, kBBoxRows = Boxes::kTileN / Boxes::kBPieces;

bool is_per_group(const Tensor& scale) { return scale.dim() == 1; }

Tensor readable_scale(const Tensor& scale) {
  return is_per_group(scale) ? as_dense(scale) : tma_readable(scale, 1);
}

// Block scales [rows, cols], read `width` columns at a time.
CUtensorMap scale_map(const char* op, const Tensor& scale, uint32_t width) {
  return tensor_map(op, scale.data_ptr(), ScalarType::Float, 4, {scale.size(1), scale.size(0)},
                    {map_stride(scale, 0, scale.size(1))}, {width, 1}, false);
}

// Scales per group go with the epilogue, 1 x 128 with the maps, and 128 x 128 as scale_b_view.
template <Grouping grouping>
void launch_scaled(const Launch& launch, const TensorMaps& maps, const GroupedGemm& gemm,
                   const Tensor& scale_a, const Tensor& scale_b,
                   const Scale128x128View& scale_b_view,
                   const std::optional<GatheredRows>& gathered = {}) {
  EpilogueArguments epilogue = gemm.epilogue;
  if (!is_per_group(scale_a)) {
    constexpr Scaling scaling =
        grouping == Grouping::kK ? Scaling::kScale1x128 : Scaling::kScale128x128;
    if constexpr (grouping == Grouping::kM) {
      if (gathered)
        return launch_gemm<Config<__nv_fp8_e4m3, scaling, grouping, true>>(
            launch, maps, gemm, scale_b_view, epilogue, *gathered);
    }
    return launch_gemm<Config<__nv_fp8_e4m3, scaling, grouping>>(launch, maps, gemm, scale_b_view,
                                                                 epilogue);
  }
  epilogue.scale_a = scale_a.const_data_ptr<float>();
  epilogue.scale_b = scale_b.const_data_ptr<float>();
  if (gemm.a.scalar_type() == ScalarType::Float8_e5m2)
    launch_gemm<Config<__nv_fp8_e5m2, Scaling::kScalePerGroup, grouping>>(launch, maps, gemm, {},
                                                                          epilogue);
  else
    launch_gemm<Config<__nv_fp8_e4m3, Scaling::kScalePerGroup, grouping>>(launch, maps, gemm, {},
                                                                          epilogue);
}

// out = a @ b[e].T
void run_m_grouped(const Launch& launch, const GroupedGemm& gemm) {
  const Tensor a = tma_readable(gemm.a, 1), b = tma_readable(gemm.b, 2);
  const Tensor scale_a = readable_scale(*gemm.scale_a);
  const int64_t T = a.size(0), K = a.size(1), N = b.size(1), E = b.size(0);
  const CUtensorMap map_a =
      tensor_map(launch.op(), a.data_ptr(), ScalarType::Float8_e4m3fn, 1, {K, T},
                 {map_stride(a, 0, K)}, {kSwizzleBytes, kABoxRows}, true);
  const auto map_of_b = [&](uint32_t rows) {
    return tensor_map(launch.op(), b.data_ptr(), ScalarType::Float8_e4m3fn, 1, {K, N, E},
                      {map_stride(b, 1, K), map_stride(b, 0, N * K)}, {kSwizzleBytes, rows, 1},
                      true);
  };
  const CUtensorMap map_b = map_of_b(kBBoxRows);
  TensorMaps maps{map_a, map_b, map_a, map_b, map_a, map_of_b(kNarrowTileN)};
  Tensor scale_b = *gemm.scale_b;  // 128 x 128: read by its strides
  Scale128x128View scale_b_view{};
  std::optional<GatheredRows> gathered;
  if (gemm.a_rows) {
    gathered = gathered_rows(launch.op(), gemm.a_rows, a);
    gathered->scales = scale_a.const_data_ptr<float>();
    gathered->scale_stride = map_stride(scale_a, 0, scale_a.size(1));
  }
  if (is_per_group(scale_a)) {
    scale_b = readable_scale(scale_b);
  } else {
    maps.scale_a = scale_map(launch.op(), scale_a, kTileM + kRowScaleAlignment);
    scale_b_view = {scale_b.const_data_ptr<float>(), scale_b.stride(0), scale_b.stride(1),
                    scale_b.stride(2)};
  }
  launch_scaled<Grouping::kM>(launch, maps, gemm, scale_a, scale_b, scale_b_view, gathered);
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
  const CUtensorMap map_a = map_of(a, kABoxRows), map_b = map_of(b, kBBoxRows);
  TensorMaps maps{map_a, map_b, map_a, map_b, map_a, map_b};
  if (blocks > 0 && !is_per_group(scale_a)) {
    maps.scale_a = scale_map(launch.op(), scale_a, kTileM);
    maps.scale_b = scale_map(launch.op(), scale_b, Boxes::kTileN);
  }
  launch_scaled<Grouping::kK>(launch, maps, gemm, scale_a, scale_b, {});
}

}  // namespace

void run_fp8(const Launch& launch, const GroupedGemm& gemm) {
  return gemm.grouping == Grouping::kM ? run_m_grouped(launch, gemm) : run_k_grouped(launch, gemm);
}

}  // namespace grouped_linear::cuda::sm90
