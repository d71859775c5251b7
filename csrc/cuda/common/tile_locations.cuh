// SPDX-License-Identifier: Apache-2.0
// From the number of a tile to its group and rows. Groups are cut into tiles of `tile_rows` rows;
// the last tile of a group may have fewer. Tiles are numbered from the first group's to the last
// group's.
//
// A kernel chooses the table that it can afford:
//   GroupTable  shared memory, any number of groups; a barrier to fill it, a binary search to read
//   WarpGroups  a warp's registers, at most 32 groups; no barrier to fill it, one vote to read
#pragma once

#include "cuda/common/groups.cuh"

namespace grouped_linear::cuda {

// Rows [row_begin, row_begin + rows) of the tensor: `group`, from its row row_in_group on.
struct TileLocation {
  int group, row_in_group;
  int row_begin, rows;
};

template <int tile_rows>
__device__ __forceinline__ TileLocation locate_tile(const GroupTable& table, int E, int tile) {
  TileLocation at;
  at.group = table.group_of_tile(tile, E);
  at.row_in_group = (tile - table.tile_begin(at.group)) * tile_rows;
  at.row_begin = table.row_begin(at.group) + at.row_in_group;
  at.rows = min(tile_rows, table.row_end[at.group] - at.row_begin);
  return at;
}

// One group a lane.
template <int tile_rows>
struct WarpGroups {
  int row_end, tile_end;

  __device__ __forceinline__ void load(const int32_t* offs, int E, int T) {
    const int lane = threadIdx.x % 32;
    row_end = scan_warp(lane < E ? min(max(offs[lane], 0), T) : 0,
                        [](int a, int b) { return max(a, b); });
    const int left = __shfl_up_sync(kFullWarp, row_end, 1);
    const int rows = row_end - (lane == 0 ? 0 : left);
    tile_end = scan_warp(TilesOf{tile_rows}(rows), [](int a, int b) { return a + b; });
  }

  // Takes all rows of all groups as one group. Any number of groups.
  __device__ __forceinline__ void load_as_one(const int32_t* offs, int E, int T) {
    row_end = __reduce_max_sync(kFullWarp, largest_row_end<4>(offs, E, T, threadIdx.x % 32, 32));
    tile_end = TilesOf{tile_rows}(row_end);
  }

  __device__ __forceinline__ int tiles() const { return __shfl_sync(kFullWarp, tile_end, 31); }

  // tile < tiles(), the same in every lane.
  __device__ __forceinline__ TileLocation locate(int tile) const {
    TileLocation at;
    at.group = __popc(__ballot_sync(kFullWarp, tile_end <= tile));
    const int row_left = __shfl_sync(kFullWarp, row_end, at.group - 1);  // unused for group 0
    const int tile_left = __shfl_sync(kFullWarp, tile_end, at.group - 1);
    at.row_in_group = (at.group == 0 ? tile : tile - tile_left) * tile_rows;
    at.row_begin = at.group == 0 ? at.row_in_group : row_left + at.row_in_group;
    at.rows = min(tile_rows, __shfl_sync(kFullWarp, row_end, at.group) - at.row_begin);
    return at;
  }
};

// x [T, K] in groups that end at offs; or a weight [E, group_rows, K] where offs is null. The rows
// of all groups fit into an int32.
struct GroupedMatrix {
  const int32_t* offs;
  int E, T, K, group_rows;

  // Calls each(at, block, col, cols) for every gridDim.x-th tile of tile_size x tile_size elements:
  // where its rows are, its number by rows, its first column, and how many it has. Fills the table;
  // called by all `threads` threads of the block.
  template <int tile_size, int threads, typename Each>
  __device__ __forceinline__ void for_each_tile(GroupTable& table, const Each& each) const {
    constexpr TilesOf tiles_of{tile_size};
    if (offs)
      load_groups<threads>(table, offs, E, T, tiles_of);
    else
      load_equal_groups<threads>(table, tiles_of(group_rows));
    const int col_tiles = tiles_of(K);
    const int64_t tiles = static_cast<int64_t>(table.tile_end[E - 1]) * col_tiles;
    for (int64_t t = blockIdx.x; t < tiles; t += gridDim.x) {
      const int block = static_cast<int>(t / col_tiles);
      const int col = static_cast<int>(t % col_tiles) * tile_size;
      each(locate_tile<tile_size>(table, E, block), block, col, min(tile_size, K - col));
    }
  }

 private:
  template <int threads>
  __device__ __forceinline__ void load_equal_groups(GroupTable& table, int group_tiles) const {
    for (int e = threadIdx.x; e < E; e += threads) {
      table.row_end[e] = (e + 1) * group_rows;
      table.tile_end[e] = (e + 1) * group_tiles;
    }
    __syncthreads();
  }
};

}  // namespace grouped_linear::cuda
