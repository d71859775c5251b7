// SPDX-License-Identifier: Apache-2.0
// The table of groups that every block builds from offs: which groups have tiles, and whether all
// narrow tiles find room at once.
#pragma once

#include "cuda/gemm/epilogue_math.cuh"
#include "cuda/gemm/sm90/smem_layout.cuh"

namespace grouped_linear::cuda::sm90 {

// K-grouped: removes groups without rows from the table. Their matrices are zeroed beside the tiles
// (zero_fill.cuh), or nothing is added to them. They stay where TMA cannot write out. By one warp.
template <typename Config>
__device__ void keep_active_groups(SharedStorage<Config>& shared, const EpilogueArguments& epilogue,
                                   const GemmShape& shape) {
  GroupTable& groups = shared.groups;
  const bool all = !epilogue.aligned && overwrites(epilogue);
  int count = 0, most_rows = 0, least_rows = shape.T + 1;
#pragma unroll 1
  for (int first = 0; first < shape.E; first += 32) {
    const int e = first + threadIdx.x, at = min(e, shape.E - 1);
    const int row_end = groups.row_end[at], tile_end = groups.tile_end[at];
    const int rows = row_end - groups.row_begin(at);
    const bool active = e < shape.E && (all || rows > 0);
    const unsigned active_lanes = __ballot_sync(0xffffffff, active);
    __syncwarp();  // every lane has read what others write over
    if (active) {
      most_rows = max(most_rows, rows);
      least_rows = min(least_rows, rows);
      const int to = count + __popc(active_lanes & ((1u << threadIdx.x) - 1));
      groups.row_end[to] = row_end;
      groups.tile_end[to] = tile_end;
      shared.active()[to] = static_cast<uint16_t>(e);
    }
    count += __popc(active_lanes);
    __syncwarp();
  }
  most_rows = __reduce_max_sync(0xffffffff, most_rows);
  shared.active_groups = count;
  shared.rows_of_each = most_rows == __reduce_min_sync(0xffffffff, least_rows) ? most_rows : 0;
}

// M-grouped: whether all narrow tiles find room at once. Then no tile waits for another, and more
// blocks work. A row tile takes at least half as many clusters as there are wide column tiles, so
// the clusters of the wide tiles tell how many row tiles there are at most.
//
// In 16 bits also where half of a wide tile would lie outside b: TMA takes some 8 cycles for each
// line of zeros there, more than all else takes (H100, 2026-11: 240 us in place of 113).
template <typename Config>
__device__ bool takes_narrow(const GroupTable& groups, const GemmShape& shape) {
  const int64_t row_tiles = 2 * int64_t{groups.tile_end[shape.E - 1]} / col_tiles<Config>(shape);
  const int narrow_cols = col_tiles<NarrowOf<Config>>(shape);
  if (!Config::kFp8 && 2 * shape.cols <= Config::kTileN) return true;
  return row_tiles * ((narrow_cols + 1) / 2) <= gridDim.x / kClusterSize;
}

}  // namespace grouped_linear::cuda::sm90
