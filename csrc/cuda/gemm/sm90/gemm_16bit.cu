// SPDX-License-Identifier: Apache-2.0
// BF16 and FP16 operands.
#include "cuda/gemm/sm90/operands_16bit.h"

namespace grouped_linear::cuda::sm90 {
namespace {

template <typename T>
constexpr bool kGathers = std::is_same_v<T, __nv_bfloat16>;  // see gemm.h

// A fourth stage is worth more than the 64 columns of a tile that make room for it, where they do
// not leave more of the last tile empty: a sixteenth is made up for by the shorter store up to K of
// 2048 (H100, 2026-11: 0.92 to 0.99 of the time; 1.02 to 1.04 with 3% more columns and K of 7168 or
// 14336). Warps that gather copy as many rows for fewer columns. FP16 has no kernel of its own for
// this, and an N-major b is loaded in columns of 64, of which a tile of 192 has no half.
template <typename T, Major b_major>
constexpr bool kHasDeepTiles = std::is_same_v<T, __nv_bfloat16> && b_major == Major::kK;

bool takes_deep_tiles(const GroupedGemm& gemm) {
  const auto padded = [&](const TileShape& tile) {
    return int64_t{ceil_div(gemm.shape.cols, tile.n)} * tile.n;
  };
  const int64_t deep = padded(kTile16BitDeep), wide = padded(kTile16Bit);
  return !gemm.a_rows && (gemm.shape.K <= 2048 ? 16 * deep <= 17 * wide : deep <= wide);
}

// Swapped operands are for BF16, and an output of its type. Where b is K-major (fprop), tiles of 192
// columns gain about as much, but for groups that are one swapped tile (192 random rows: 1.02).
bool takes_swapped_linear(const Launch& launch, const GroupedGemm& gemm, Major b_major) {
  const bool one_tile = gemm.shape.T / gemm.shape.E <= kTile16BitSwapped.m - kSwappedUnit;
  return gemm.epilogue.type == OutputType::kBFloat16 && gemm.epilogue.aligned &&
         (b_major == Major::kMN || one_tile) && takes_swapped(launch, gemm);
}

// out = a @ b[e].T. b is dense along K (fprop) or along N (dgrad, whose b is a view of w).
template <typename T>
void run_m_grouped(const Launch& launch, const GroupedGemm& gemm) {
  const bool n_dense = gemm.b.stride(1) == 1 && gemm.b.stride(2) != 1;
  const MGroupedMaps maps(launch, gemm, n_dense ? 1 : 2);
  const auto launch_in = [&]<TileShape tile, Major major>() {
    using Gemm = MGrouped16Bit<T, major, false, StoreWork::kStore, tile>;
    constexpr bool k_major = major == Major::kK;
    const CUtensorMap b = k_major ? maps.k_major(Gemm::kTileN / Gemm::kBBoxes) : maps.mn_major();
    const TensorMaps all = maps.with(b, k_major ? maps.k_major(kNarrowTileN) : b);
    if constexpr (kGathers<T> && tile.n == kTile16Bit.n)
      if (gemm.a_rows)
        return launch_gemm<MGrouped16Bit<T, major, true>>(
            launch, all, gemm, {}, gemm.epilogue, gathered_rows(launch.op(), gemm.a_rows, maps.a));
    launch_gemm<Gemm>(launch, all, gemm, {}, gemm.epilogue);
  };
  const auto launch_with = [&]<Major major>() {
    if constexpr (std::is_same_v<T, __nv_bfloat16>)
      if (takes_swapped_linear(launch, gemm, major)) {
        const CUtensorMap b = major == Major::kK ? maps.k_major(kWgmmaM) : maps.mn_major();
        return launch_gemm<Swapped16Bit<T, major>>(launch, maps.with(b, b), gemm, {}, gemm.epilogue,
                                                   maps.row_boxes());
      }
    if constexpr (kHasDeepTiles<T, major>)
      if (takes_deep_tiles(gemm)) return launch_in.template operator()<kTile16BitDeep, major>();
    launch_in.template operator()<kTile16Bit, major>();
  };
  if (maps.b.stride(2) == 1)
    launch_with.template operator()<Major::kK>();
  else
    launch_with.template operator()<Major::kMN>();
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

// a is the operand that is gathered, or narrow: its tile has half as many columns as b's, 128. If b
// is, the operands change places, and out is stored transposed. (FP16 keeps its places: no kernel
// of it stores transposed.)
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
