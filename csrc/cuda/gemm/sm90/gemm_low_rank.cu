// SPDX-License-Identifier: Apache-2.0
// M-grouped GEMMs with a low-rank second product: BF16 and FP16 operands, and FP8 ones with a
// second product in BF16 or FP16. a's rows lie in order: gather_before has copied what is gathered.
#include "cuda/gemm/sm90/operands_16bit.h"
#include "cuda/gemm/sm90/operands_fp8.h"

namespace grouped_linear::cuda::sm90 {
namespace {

// a_low [T, r] and b_low [E, N, r], which is dense along r (fprop) or along N (dgrad).
struct ReadableLowRank {
  Tensor a, b;

  explicit ReadableLowRank(const LowRank& low)
      : a(tma_readable(*low.a, 1)),
        b(tma_readable(*low.b, low.b->stride(1) == 1 && low.b->stride(2) != 1 ? 1 : 2)) {}

  LowRankOperands operands(const char* op) const {
    const int64_t r = a.size(1), T = a.size(0), N = b.size(1), E = b.size(0);
    const bool k_major = b.stride(2) == 1;  // a copy is
    const int box_k = r % 64 == 0 ? 64 : r % 32 == 0 ? 32 : 16;
    const ScalarType dtype = a.scalar_type();
    const CUtensorMap map_a = tensor_map(op, a.data_ptr(), dtype, 2, {r, T}, {map_stride(a, 0, r)},
                                         {kLine, kTileM / 2}, true);
    const int64_t group_stride = map_stride(b, 0, N * r);
    const CUtensorMap map_b =
        k_major
            ? tensor_map(op, b.data_ptr(), dtype, 2, {r, N, E}, {map_stride(b, 1, r), group_stride},
                         {kLine, 64, 1}, true)
            : tensor_map(op, b.data_ptr(), dtype, 2, {N, r, E}, {map_stride(b, 2, N), group_stride},
                         {kLine, static_cast<uint32_t>(box_k), 1}, true);
    return {map_a, map_b, k_major ? 0 : box_k, dtype == ScalarType::BFloat16, static_cast<int>(r)};
  }
};

template <typename T>
void run_16bit_low_rank(const Launch& launch, const GroupedGemm& gemm, const LowRankOperands& low) {
  const bool n_dense = gemm.b.stride(1) == 1 && gemm.b.stride(2) != 1;
  const MGroupedMaps maps(launch, gemm, n_dense ? 1 : 2);
  if (maps.b.stride(2) == 1) {
    using Gemm = LowRankOf<MGrouped16Bit<T, Major::kK>>;
    const TensorMaps all =
        maps.with(maps.k_major(Gemm::kTileN / Gemm::kBBoxes), maps.k_major(kNarrowTileN));
    launch_gemm<Gemm>(launch, all, gemm, {}, gemm.epilogue, low);
  } else {
    const CUtensorMap b = maps.mn_major();
    launch_gemm<LowRankOf<MGrouped16Bit<T, Major::kMN>>>(launch, maps.with(b, b), gemm, {},
                                                         gemm.epilogue, low);
  }
}

template <typename A, Scaling scaling>
void run_fp8_low_rank(const Launch& launch, const GroupedGemm& gemm, const LowRankOperands& low) {
  const MGroupedFp8 operands(launch, gemm);
  launch_gemm<LowRankOf<Fp8Gemm<A, scaling, Grouping::kM>>>(
      launch, operands.maps, gemm, operands.scale_b_view, operands.epilogue, low);
}

}  // namespace

void run_low_rank(const Launch& launch, const GroupedGemm& gemm) {
  const ReadableLowRank low(gemm.low);
  const LowRankOperands operands = low.operands(launch.op());
  if (!gemm.scale_a) {
    return gemm.a.scalar_type() == ScalarType::BFloat16
               ? run_16bit_low_rank<__nv_bfloat16>(launch, gemm, operands)
               : run_16bit_low_rank<__half>(launch, gemm, operands);
  }
  if (!is_per_group(*gemm.scale_a))
    return run_fp8_low_rank<__nv_fp8_e4m3, Scaling::kScale128x128>(launch, gemm, operands);
  if (gemm.a.scalar_type() == ScalarType::Float8_e5m2)
    return run_fp8_low_rank<__nv_fp8_e5m2, Scaling::kScalePerGroup>(launch, gemm, operands);
  run_fp8_low_rank<__nv_fp8_e4m3, Scaling::kScalePerGroup>(launch, gemm, operands);
}

}  // namespace grouped_linear::cuda::sm90
