// SPDX-License-Identifier: Apache-2.0
// Block scaling of a layer's x and weight in one launch: some thread blocks step through the tiles
// of x, the others quantize one tile of the weight each. Both are bound by memory, and neither
// alone fills the GPU where the layer is small. Bytes: those of block.cuh and weight.cuh.
#pragma once

#include "cuda/quantize/block.cuh"
#include "cuda/quantize/weight.cuh"

namespace grouped_linear::cuda {

// The first row_blocks thread blocks have x.
template <typename Element>
__global__ void __launch_bounds__(kTileThreads, kTileOccupancy<Element>)
    quantize_rows_and_weight_kernel(Rows<Element> rows, const int32_t* offs, int E, int T, int K,
                                    BlockOutputs out, unsigned row_blocks, PackedExperts<Element> w,
                                    bool vectorised, WeightOutputs out_w, ScaleRule rule) {
  grid_dependency_wait();
  __shared__ TransposedTile transposed;
  if (blockIdx.x < row_blocks)
    quantize_tiles_of_block<Element>(rows, offs, E, T, K, rule, out, transposed, blockIdx.x,
                                     row_blocks);
  else
    quantize_weight_tile<Element>(w, vectorised, rule, out_w, transposed, blockIdx.x - row_blocks);
}

}  // namespace grouped_linear::cuda
