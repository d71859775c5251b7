// SPDX-License-Identifier: Apache-2.0
// The 16-bit operands of M-grouped GEMMs, as TMA reads them.
#pragma once

#include "cuda/gemm/sm90/launch.h"

namespace grouped_linear::cuda::sm90 {

constexpr int kLine = kSwizzleBytes / 2;  // elements in a line of 128 bytes

template <typename T, Major b_major, bool gathers = false, StoreWork store_work = StoreWork::kStore,
          TileShape tile = kTile16Bit>
using MGrouped16Bit = GemmConfig<T, T,
                                 GemmTraits{.grouping = Grouping::kM,
                                            .scaling = Scaling::kNone,
                                            .a_major = Major::kK,
                                            .b_major = b_major,
                                            .gathers = gathers,
                                            .transposed = false,
                                            .store_work = store_work,
                                            .tile_n = tile.n,
                                            .stages = tile.stages,
                                            .tile_m = tile.m}>;

template <typename T, Major b_major, StoreWork store_work = StoreWork::kStore>
using Swapped16Bit = MGrouped16Bit<T, b_major, false, store_work, kTile16BitSwapped>;

// Whether operands are swapped (swapped.cuh), where that has a kernel: where groups that end anywhere
// lose more in tiles of 128 rows than smaller tiles cost. From 192 to 288 rows the second tile of 192
// is mostly empty (224 random rows: 1.07 to 1.15 of the time). Clusters have all their columns, and
// all have tiles.
inline bool takes_swapped(const Launch& launch, const GroupedGemm& gemm) {
  const GemmShape& shape = gemm.shape;
  constexpr int rows = kTile16BitSwapped.m, cols = kTile16BitSwapped.n * kClusterSize;
  const int mean = shape.T / shape.E;
  const bool fits = mean > rows ? mean >= 288 : mean >= 128;
  return fits && !gemm.a_rows && gemm.epilogue.bias == nullptr && shape.K >= 512 &&
         shape.cols % cols == 0 &&
         int64_t{shape.T} / rows * (shape.cols / cols) >= launch.multiprocessors() / kClusterSize;
}

// a [T, K], and b [E, N, K] that is dense along K, where N may be gate and up, or along N.
struct MGroupedMaps {
  const char* op;
  Tensor a, b;
  int64_t N, K, E;

  // inner: the dimension of b along which it is read if it is dense there. A copy is dense along K.
  MGroupedMaps(const Launch& launch, const GroupedGemm& gemm, int64_t inner)
      : op(launch.op()),
        a(tma_readable(gemm.a, 1)),
        b(tma_readable(gemm.b, inner)),
        N(b.size(1)),
        K(b.size(2)),
        E(b.size(0)) {}

  // b's boxes have so many columns of the output.
  CUtensorMap k_major(uint32_t cols) const {
    return map(b, {K, N, E}, {map_stride(b, 1, K), map_stride(b, 0, N * K)}, {kLine, cols, 1});
  }
  CUtensorMap gated(uint32_t cols) const {
    const int64_t stride = map_stride(b, 1, K);
    return map(b, {K, N / 2, 2, E}, {stride, N / 2 * stride, map_stride(b, 0, N * K)},
               {kLine, cols, 1, 1});
  }
  CUtensorMap mn_major() const {
    return map(b, {N, K, E}, {map_stride(b, 2, N), map_stride(b, 0, N * K)}, {kLine, kLine, 1});
  }
  // a in boxes of so many rows.
  CUtensorMap rows(uint32_t count) const {
    return map(a, {K, a.size(0)}, {map_stride(a, 0, K)}, {kLine, count});
  }
  RowBoxes row_boxes() const { return {rows(8), rows(16), rows(32), rows(64)}; }
  TensorMaps with(const CUtensorMap& map_b, const CUtensorMap& narrow_b) const {
    const CUtensorMap map_a = rows(kTileM / 2);
    return {map_a, map_b, map_a, map_b, map_a, narrow_b};
  }

 private:
  CUtensorMap map(const Tensor& t, std::initializer_list<int64_t> sizes,
                  std::initializer_list<int64_t> strides,
                  std::initializer_list<uint32_t> box) const {
    return tensor_map(op, t.data_ptr(), t.scalar_type(), 2, sizes, strides, box, true);
  }
};

}  // namespace grouped_linear::cuda::sm90
