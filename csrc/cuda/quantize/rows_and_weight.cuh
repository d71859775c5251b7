// A layer's x and weight in one pass: blocks that take x's tiles, then one a tile of the weight. Both
// are bound by memory, and neither fills the GPU where the layer is small.
#pragma once

#include "cuda/quantize/group_quantize.cuh"
#include "cuda/quantize/quantize_weight.cuh"

namespace grouped_linear::cuda {

template <typename Element>
__global__ void __launch_bounds__(kTileThreads, kTileOccupancy<Element>)
    quantize_rows_and_weight_kernel(Rows<Element> rows, const int32_t* offs, int E, int T, int K,
                                    GroupQuantized out, unsigned row_blocks,
                                    PackedExperts<Element> w, bool vectorised,
                                    WeightQuantized out_w, ScaleRule rule) {
  grid_dependency_wait();
  __shared__ TurnedTile turned;
  if (blockIdx.x < row_blocks)
    quantize_tiles_of_block<Element>(rows, offs, E, T, K, rule, out, turned, blockIdx.x,
                                     row_blocks);
  else
    quantize_weight_tile<Element>(w, vectorised, rule, out_w, turned, blockIdx.x - row_blocks);
}

}  // namespace grouped_linear::cuda
