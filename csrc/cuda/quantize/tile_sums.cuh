// Column sums of a tile that a block holds in patches, in the CPU's order: see block_sums of
// group_quantize.cuh.
#pragma once

#include "cuda/quantize/block_scale.cuh"

namespace grouped_linear::cuda {

struct TileSums {
  alignas(16) float of_patches[kPatches][kTile];

  // Called by every thread, before what is not finite turns into NaN; then a barrier.
  template <typename Element>
  __device__ __forceinline__ void put(const Patch<Element>& patch) {
    float sums[kPatch];
    patch.column_sums(sums);
    float4* piece = reinterpret_cast<float4*>(
        &of_patches[Patch<Element>::row()][Patch<Element>::column() * kPatch]);
    piece[0] = make_float4(sums[0], sums[1], sums[2], sums[3]);
    piece[1] = make_float4(sums[4], sums[5], sums[6], sums[7]);
  }
  __device__ __forceinline__ float column(int c) const {
    float sum = 0;
#pragma unroll
    for (int p = 0; p < kPatches; ++p) sum = __fadd_rn(sum, of_patches[p][c]);
    return sum;
  }
};

}  // namespace grouped_linear::cuda
