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
  const auto launch_with = [&]<typename Gemm>(std::type_identity<Gemm>, const TensorMaps& all) {
    if constexpr (kGathers<T>)
      if (gemm.a_rows)
        return launch_gathering<Gemm, Operand::kA>(launch, all, gemm, {},
                                                   gathered_rows(launch.op(), gemm.a_rows, maps.a));
    launch_gemm<Gemm>(launch, all, gemm, {}, gemm.epilogue);
  };
  if (maps.b.stride(2) == 1) {
    using Gemm = MGrouped16Bit<T, Major::kK>;
    launch_with(std::type_identity<Gemm>(),
                maps.with(maps.k_major(Gemm::kTileN / Gemm::kBPieces), maps.k_major(kNarrowTileN)));
  } else {
    const CUtensorMap b = maps.mn_major();
    launch_with(std::type_identity<MGrouped16Bit<T, Major::kMN>>(), maps.with(b, b));
  }
}

// out[e] = a.T @ b over each group's rows.
template <typename T>
void run_k_grouped(const Launch& launch, const GroupedGemm& gemm) {
  using Gemm = Config16Bit<T, Grouping::kK, Major::kMN, Major::kMN>;
  const Tensor a = tma_readable(gemm.a, 1), b = tma_readable(gemm.b, 1);
  const auto map_of = [&](const Tensor& t) {
    return ragged_map(launch.op(), map_address(t, gemm.epilogue.out), t.scalar_type(), 2, t.size(1),
                      map_stride(t, 0, t.size(1)), Gemm::kTileK);
  };
  const CUtensorMap map_a = map_of(a), map_b = map_of(b);
  const TensorMaps maps{map_a, map_b, map_a, map_b, map_a, map_b};
  if constexpr (kGathers<T>) {
    if (gemm.a_rows)
      return launch_gathering<Gemm, Operand::kA>(launch, maps, gemm, {},
                                                 gathered_rows(launch.op(), gemm.a_rows, a));
    if (gemm.b_rows)
      return launch_gathering<Gemm, Operand::kB>(launch, maps, gemm, {},
                                                 gathered_rows(launch.op(), gemm.b_rows, b));
  }
  launch_gemm<Gemm>(launch, maps, gemm, {}, gemm.epilogue);
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
