// SPDX-License-Identifier: Apache-2.0
// M-grouped GEMMs in BF16 of a weight in MXFP4.
#include "cuda/gemm/sm90/kernel_mxfp4.cuh"
#include "cuda/gemm/sm90/launch.h"
#include "cuda/gemm/sm90/mxfp4_scales.cuh"
#include "cuda/gemm/sm90/operands_16bit.h"  // kLine

namespace grouped_linear::cuda::sm90 {
namespace {

using Bf16 = __nv_bfloat16;

template <TileShape tile, Major b_major, bool low_rank>
using Mxfp4Gemm = GemmConfig<Bf16, Mxfp4<Bf16, tile.m>,
                             GemmTraits{.grouping = Grouping::kM,
                                        .scaling = Scaling::kNone,
                                        .a_major = Major::kK,
                                        .b_major = b_major,
                                        .gathers = false,
                                        .transposed = false,
                                        .store_work = StoreWork::kStore,
                                        .tile_n = tile.n,
                                        .stages = tile.stages,
                                        .low_rank = low_rank}>;

// The scales of w [E, N, K] in the order in which the kernel loads them.
Tensor ordered_scales(const Launch& launch, const GroupedGemm& gemm, Major major) {
  const Tensor scale = as_dense(*gemm.scale_b);
  const int64_t E = scale.size(0), N = scale.size(1), row_bytes = scale.size(2);
  const bool k_major = major == Major::kK;
  const Tensor out =
      k_major ? new_tensor(scale, {E, ceil_div(row_bytes, 2), round_up(N, 4)}, ScalarType::Int)
              : new_tensor(scale, {E, row_bytes, round_up(N, 8)}, ScalarType::BFloat16);
  const dim3 grid(static_cast<unsigned>(ceil_div(N, kScaleRows)),
                  static_cast<unsigned>(ceil_div(row_bytes, kScaleBytesAtOnce)),
                  static_cast<unsigned>(E));
  launch.run(k_major ? mxfp4_scales_kernel<true> : mxfp4_scales_kernel<false>, grid, kScaleThreads,
             0, scale.const_data_ptr<uint8_t>(), gemm.offs.const_data_ptr<int32_t>(),
             out.data_ptr(), static_cast<int>(N), static_cast<int>(out.size(2)),
             static_cast<int>(row_bytes));
  return out;
}

template <TileShape tile, Major major, bool low_rank>
void launch_mxfp4(const Launch& launch, const GroupedGemm& gemm) {
  using Gemm = Mxfp4Gemm<tile, major, low_rank>;
  static_assert(Gemm::kTileM == tile.m && Gemm::kTileK == tile.k);
  constexpr bool k_major = major == Major::kK;
  const char* op = launch.op();
  const GemmShape& shape = gemm.shape;
  check(shape.T <= RaggedRows::kOrigin, op, ": at most ", RaggedRows::kOrigin,
        " rows are supported on CUDA, got ", shape.T);
  const Tensor a = tma_readable(gemm.a, 1), codes = tma_readable(gemm.b, 2);
  const Tensor scales = ordered_scales(launch, gemm, major);
  const int64_t E = codes.size(0), N = codes.size(1), bytes = codes.size(2);

  const CUtensorMap map_a =
      tensor_map(op, a.data_ptr(), a.scalar_type(), 2, {a.size(1), a.size(0)},
                 {map_stride(a, 0, a.size(1))}, {kLine, Gemm::kTileM / 2}, true);
  const CUtensorMap map_b =
      tensor_map(op, codes.data_ptr(), ScalarType::Byte, 1, {bytes, N, E},
                 {map_stride(codes, 1, bytes), map_stride(codes, 0, N * bytes)},
                 {static_cast<uint32_t>(k_major ? Gemm::kPackedK : Gemm::kTileN) / 2,
                  static_cast<uint32_t>(k_major ? Gemm::kTileN : Gemm::kPackedK), 1},
                 CU_TENSOR_MAP_SWIZZLE_64B);
  const int64_t words = scales.size(1), stride = scales.size(2);
  const CUtensorMap map_scales =
      tensor_map(op, scales.data_ptr(), k_major ? ScalarType::Float : ScalarType::BFloat16,
                 k_major ? 4 : 2, {N, words, E}, {stride, words * stride},
                 {static_cast<uint32_t>(k_major ? Gemm::kTileN : Gemm::kPackedK),
                  static_cast<uint32_t>(k_major ? 2 : Gemm::kTileN / 32), 1},
                 false);
  TensorMaps maps{map_a, map_b, map_a, map_scales, map_a, map_b};
  if (gemm.epilogue.aligned) maps.out = out_map<Gemm>(op, gemm.epilogue, shape.cols);
  Mxfp4LowRank<Gemm> low{};
  std::optional<Tensor> low_a;
  if constexpr (low_rank) {
    low_a = tma_readable(*gemm.low.a, 1);
    const Tensor& low_b = *gemm.low.b;
    const int64_t r = low_a->size(1);
    low.operands.a = tensor_map(op, low_a->data_ptr(), ScalarType::BFloat16, 2, {r, low_a->size(0)},
                                {map_stride(*low_a, 0, r)}, {kLine, Gemm::kTileM / 2}, true);
    low.operands.r = static_cast<int>(r);
    low.b = static_cast<const uint16_t*>(low_b.const_data_ptr());
    low.group_stride = low_b.stride(0), low.col_stride = low_b.stride(1),
    low.r_stride = low_b.stride(2);
  }
  constexpr auto kernel = mxfp4_gemm_kernel<Gemm>;
  launch.allow_shared_bytes<kernel, kMxfp4Blocks<Gemm> != 1>(shared_bytes<Gemm>());
  const int clusters = kMxfp4Blocks<Gemm> * launch.multiprocessors() / kClusterSize;
  launch.run(kernel, clusters * kClusterSize, Gemm::kThreads, shared_bytes<Gemm>(), maps,
             gemm.offs.const_data_ptr<int32_t>(), low, gemm.epilogue, tile_counts<Gemm>(shape),
             shape);
}

}  // namespace

void run_mxfp4(const Launch& launch, const GroupedGemm& in, Major major) {
  // Where groups have few rows, the weight's bytes bound a GEMM. dgrad's tiles of few rows take as
  // long as the others with some 48 rows a group (H200, 2026-11).
  if (major == Major::kK && in.shape.T <= 16 * in.shape.E) return run_mxfp4_few_rows(launch, in);
  const GroupedGemm gemm = gather_before(launch, in);
  const auto run = [&]<bool low_rank>() {
    if (major == Major::kK)
      launch_mxfp4<kTileMxfp4, Major::kK, low_rank>(launch, gemm);
    else if (gemm.shape.T <= 32 * gemm.shape.E)
      launch_mxfp4<kTileMxfp4FewRows, Major::kMN, low_rank>(launch, gemm);
    else
      launch_mxfp4<kTileMxfp4, Major::kMN, low_rank>(launch, gemm);
  };
  if (gemm.low.a)
    run.template operator()<true>();
  else
    run.template operator()<false>();
}

}  // namespace grouped_linear::cuda::sm90
