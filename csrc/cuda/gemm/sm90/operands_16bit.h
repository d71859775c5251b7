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
                                            .stages = tile.stages}>;

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
  TensorMaps with(const CUtensorMap& map_b, const CUtensorMap& narrow_b) const {
    const CUtensorMap map_a = map(a, {K, a.size(0)}, {map_stride(a, 0, K)}, {kLine, kTileM / 2});
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
