// SPDX-License-Identifier: Apache-2.0
// Grouped GEMM for every NVIDIA GPU of compute capability 8.0 and up, by mma and cp.async: BF16,
// FP16 and FP8 with scales per group or of blocks.
//
//   M-grouped (fprop, dgrad): out[t, n]    = sum_k a[t, k] * b[e, n, k]   rows t of group e
//   K-grouped (wgrad):        out[e, n, k] = sum_t a[t, n] * b[t, k]      rows t of group e
//
// Persistent blocks, one or two an SM, take tiles one by one, see TileCounter. All threads load,
// multiply and store. Loads run ahead across the ends of tiles.
//
// Group sizes are read on the device, and groups end anywhere: loads and stores end with the group.
// No tile is split along K, so equal inputs give equal bits, and a row's result depends on that row
// and its group's matrix alone.
#pragma once

#include "cuda/common/pdl.cuh"
#include "cuda/gemm/sm80/epilogue.cuh"
#include "cuda/gemm/sm80/mainloop.cuh"

namespace grouped_linear::cuda::sm80 {

template <typename Config>
__global__ void __launch_bounds__(Config::kThreads, Config::kBlocksPerSm)
    grouped_gemm_kernel(const __grid_constant__ OperandsOf<Config> operands, const int32_t* offs,
                        const __grid_constant__ EpilogueArguments epilogue,
                        const StampedTickets tickets, const __grid_constant__ TileCounts counts,
                        const __grid_constant__ GemmShape shape) {
  extern __shared__ __align__(128) uint8_t raw[];
  auto& shared = *reinterpret_cast<SharedStorage<Config>*>(raw);
  grid_dependency_wait();
  build_group_table<Config>(shared.groups, offs, shape);
  const bool overwrite = overwrites(epilogue);
  const int pairs = Config::kKGrouped ? shape.E * static_cast<int>(counts.matrix.divisor)
                                      : shared.groups.tile_end[shape.E - 1];
  if (!Config::kKGrouped) zero_tail_rows(epilogue, shared.groups, shape);

  const MmaThread thread = MmaThread::of<Config>();
  Pipeline<Config> pipeline(shared, operands, counts, shape, tickets, 2 * pairs);
  WarpTile<Config> warp_tile(pipeline, thread);
  while (true) {
    const WorkTile& tile = pipeline.next_tile();
    if (tile.k_blocks < 0) break;
    const int k_blocks = pipeline.k_blocks(tile);
    // An empty group adds nothing.
    const bool has_outputs = tile.row + thread.row < tile.row_end &&
                             tile.col + thread.col < shape.cols && (tile.k_blocks > 0 || overwrite);
    if (!has_outputs) {
      warp_tile.skip(k_blocks);
      continue;
    }
    if (Config::kAdds && !overwrite) prefetch_outputs<Config>(epilogue, shape, tile, thread);
    Accumulators<Config> accum;
    if constexpr (Config::kFp8)
      warp_tile.multiply_fp8(k_blocks, accum);
    else
      warp_tile.multiply_16bit(k_blocks, accum);
    run_epilogue<Config>(accum, shared.epilogue[threadIdx.x / 32], epilogue, shape, tile, thread,
                         overwrite);
  }
  cp_async_wait<0>();  // zeros that nobody reads
}

}  // namespace grouped_linear::cuda::sm80
