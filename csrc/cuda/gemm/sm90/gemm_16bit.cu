// BF16 and FP16 operands.
#include "cuda/gemm/sm90/operands_16bit.h"

namespace grouped_linear::cuda::sm90 {
namespace {

template <typename T>
constexpr bool kGathers = std::is_same_v<T, __nv_bfloat16>;  // see gemm.h

// out = a @ b[e].T. b is dense along K (fprop) or along N (dgrad, whose b is a view of w).
template <typename T>
void run_m_grouped(const Launch& launch, const GroupedGemm& gemm) {
  const bool n_dense = gemm.b.stride(1) == 1 && gemm.b.stride(2) != 1;
  const MGroupedMaps maps(launch, gemm, n_dense ? 1 : 2);
  const auto launch_with = [&]<Major major>(std::integral_constant<Major, major>,
                                            const TensorMaps& all) {
    if constexpr (kGathers<T>)
      if (gemm.a_rows)
        return launch_gemm<MGrouped16Bit<T, major, true>>(
            launch, all, gemm, {}, gemm.epilogue, gathered_rows(launch.op(), gemm.a_rows, maps.a));
    launch_gemm<MGrouped16Bit<T, major>>(launch, all, gemm, {}, gemm.epilogue);
  };
  if (maps.b.stride(2) == 1) {
    using Gemm = MGrouped16Bit<T, Major::kK>;
    launch_with(std::integral_constant<Major, Major::kK>(),
                maps.with(maps.k_major(Gemm::kTileN / Gemm::kBPieces), maps.k_major(kNarrowTileN)));
  } else {
    const CUtensorMap b = maps.mn_major();
    launch_with(std::integral_constant<Major, Major::kMN>(), maps.with(b, b));
  }
}

template <typename T, bool gathers, bool transposed>
using KGrouped16Bit =
    GemmConfig<T, T,
               GemmTraits{.grouping = Grouping::kK,
                          .scaling = Scaling::kNone,
                          .a_major = Major::kMN,
                          .b_major = Major::kMN,
                          .gathers = gathers,
                          .transposed = transposed,
                          .store_work = StoreWork::kStore,
                          .tile_n = kTile16Bit.n,
                          .stages = gathers ? kTile16Bit.stages : kTile16BitKGrouped.stages}>;

// out[e] = a.T @ b over each group's rows, or its transpose.
template <typename T, bool gathers, bool transposed = false>
void launch_k_grouped(const Launch& launch, const GroupedGemm& gemm) {
  using Gemm = KGrouped16Bit<T, gathers, transposed>;
  const Tensor a = tma_readable(gemm.a, 1), b = tma_readable(gemm.b, 1);
  const auto map_of = [&](const Tensor& t) {
    return ragged_map(launch.op(), map_address(t, gemm.epilogue.out), t.scalar_type(), 2, t.size(1),
                      map_stride(t, 0, t.size(1)), Gemm::kTileK);
  };
  const CUtensorMap map_a = map_of(a), map_b = map_of(b);
  const TensorMaps maps{map_a, map_b, map_a, map_b, map_a, map_b};
  if constexpr (gathers)
    launch_gemm<Gemm>(launch, maps, gemm, {}, gemm.epilogue,
                      gathered_rows(launch.op(), gemm.a_rows, a));
  else
    launch_gemm<Gemm>(launch, maps, gemm, {}, gemm.epilogue);
}

// What is gathered, or narrow, is a, whose tile has half as many columns as b's: 128. Where that is
// b, the operands change places, and out is stored transposed. (FP16 keeps its places: no kernel of
// it stores transposed.)
template <typename T>
void run_k_grouped(const Launch& launch, const GroupedGemm& gemm) {
  const auto exchanged = [&] {
    GroupedGemm other = gemm;
    std::swap(other.a, other.b);
    std::swap(other.a_rows, other.b_rows);
    std::swap(other.shape.rows, other.shape.cols);
    return other;
  };
  if constexpr (kGathers<T>) {
    if (gemm.a_rows) return launch_k_grouped<T, true>(launch, gemm);
    if (gemm.b_rows) return launch_k_grouped<T, true, true>(launch, exchanged());
    if (gemm.shape.cols <= kTileM && gemm.shape.rows > kTileM)
      return launch_k_grouped<T, false, true>(launch, exchanged());
  }
  launch_k_grouped<T, false>(launch, gemm);
}

}  // namespace

void run_16bit(const Launch& launch, const GroupedGemm& gemm) {
  const bool bfloat16 = gemm.a.scalar_type() == ScalarType::BFloat16;
  if (gemm.grouping == Grouping::kM)
    return bfloat16 ? run_m_grouped<__nv_bfloat16>(launch, gemm)
                    : run_m_grouped<__half>(launch, gemm);
  return bfloat16 ? run_k_grouped<__nv_bfloat16>(launch, gemm)
                  : run_k_grouped<__half>(launch, gemm);
}

}  // namespace grouped_linear::cuda::sm90
