// SPDX-License-Identifier: Apache-2.0
// The bias gradient [E, K]: sums over the rows of each group, in the CPU's order.
//
// A pass over tiles writes partial sums [row blocks, K], one row for every 128 rows of a group.
// Within a block, rows are added in eights, from the first to the last, then the eights; every sum
// starts from +0. Rows past the block's end are zero and change nothing, because no sum is -0. A
// second kernel adds a group's blocks from the first to the last. The partial sums cost 4/128 bytes
// an element to write.
#pragma once

#include "cuda/common/fragments.cuh"
#include "cuda/common/pdl.cuh"
#include "cuda/common/tile_locations.cuh"

namespace grouped_linear::cuda {

// Column sums of a tile that a thread block holds in fragments.
struct alignas(16) TileColumnSums {
  float of_fragments[kFragmentsPerSide][kTileSide];

  // Called by every thread, before elements that are not finite become NaN; then a barrier.
  template <typename Element>
  __device__ __forceinline__ void put(const Fragment<Element>& fragment) {
    float sums[kFragmentSize];
    fragment.column_sums(sums);
    float4* to = reinterpret_cast<float4*>(
        &of_fragments[Fragment<Element>::row()][Fragment<Element>::column() * kFragmentSize]);
    to[0] = make_float4(sums[0], sums[1], sums[2], sums[3]);
    to[1] = make_float4(sums[4], sums[5], sums[6], sums[7]);
  }
  __device__ __forceinline__ float column(int c) const {
    float sum = 0;
#pragma unroll
    for (int p = 0; p < kFragmentsPerSide; ++p) sum = __fadd_rn(sum, of_fragments[p][c]);
    return sum;
  }
};

constexpr int kBiasGradThreads = 256;

// bias_grad [E, K] from partial sums [row blocks, K]. A thread adds one column: blockIdx.x selects
// 256 columns, blockIdx.y every gridDim.y-th group.
static __global__ void __launch_bounds__(kBiasGradThreads)
    sum_partial_bias_grad_kernel(const float* partial, const int32_t* offs, int E, int T, int K,
                                 float* bias_grad) {
  grid_dependency_wait();
  __shared__ GroupTable table;
  load_groups<kBiasGradThreads>(table, offs, E, T, TilesOf{kTileSide});
  const int k = blockIdx.x * kBiasGradThreads + threadIdx.x;
  if (k >= K) return;
  for (int e = blockIdx.y; e < E; e += gridDim.y) {
    float sum = 0;
    const int end = table.tile_end[e];
#pragma unroll 8
    for (int block = table.tile_begin(e); block < end; ++block)
      sum = __fadd_rn(sum, partial[static_cast<int64_t>(block) * K + k]);
    bias_grad[static_cast<int64_t>(e) * K + k] = sum;
  }
}

}  // namespace grouped_linear::cuda
