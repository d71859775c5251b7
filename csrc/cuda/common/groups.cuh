// Where each group's rows are, worked out by every block for itself from offs [E].
//
// offs are data of unknown origin. Every kernel works on the running maximum of the ends clamped
// into [0, T]: group e owns the rows [row_end[e - 1], row_end[e]), the groups are disjoint, in
// order, and inside the tensor, whatever offs holds. (Clamping each end alone is not enough: [T, 0,
// T, 0] would give two groups the same rows.)
#pragma once

#include <cstdint>

#include "layout.h"

namespace grouped_linear::cuda {

// One table in shared memory. tile_end[e] counts the tiles of `rows_per_tile` rows of groups 0 ..
// e, each group's last tile rounded up; with 128 rows a tile it is also the padded columnwise
// layout.
struct GroupTable {
  int32_t row_end[kMaxGroups];
  int32_t tile_end[kMaxGroups];

  __device__ int row_begin(int e) const { return e == 0 ? 0 : row_end[e - 1]; }
  __device__ int tile_begin(int e) const { return e == 0 ? 0 : tile_end[e - 1]; }

  // The group that tile t belongs to: the first with tile_end > t. t < tile_end[E - 1].
  __device__ int group_of_tile(int t, int E) const {
    int low = 0, high = E - 1;
    while (low < high) {
      const int middle = (low + high) / 2;
      if (tile_end[middle] > t)
        high = middle;
      else
        low = middle + 1;
    }
    return low;
  }
};

// op over the values of the lanes up to this one.
template <typename Op>
__device__ __forceinline__ int scan_warp(int value, Op op) {
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) {
    const int left = __shfl_up_sync(0xffffffff, value, distance);
    if (threadIdx.x % 32 >= distance) value = op(left, value);
  }
  return value;
}

// Tiles of `rows` rows, a group's last one rounded up.
struct TilesOf {
  int rows;
  __device__ int operator()(int group_rows) const { return (group_rows + rows - 1) / rows; }
};

// Fills the table with tiles_of(rows) tiles a group; called by all `threads` threads of the block, ends
// with a barrier. A product waits for it before it can load anything, and its code is fetched anew in
// every launch: so one warp scans, with a run of neighbouring groups a lane, in loops that stay loops.
template <int threads, typename Tiles>
__device__ void load_groups(GroupTable& table, const int32_t* offs, int E, int T, Tiles tiles_of) {
#pragma unroll 1
  for (int e = threadIdx.x; e < E; e += threads) table.row_end[e] = min(max(offs[e], 0), T);
  __syncthreads();
  if (threadIdx.x < 32) {
    const auto before_lane = [](int scanned) {
      const int before = __shfl_up_sync(0xffffffff, scanned, 1);
      return threadIdx.x == 0 ? 0 : before;
    };
    const int run = (E + 31) / 32, first = min(static_cast<int>(threadIdx.x) * run, E),
              end = min(first + run, E);
    int rows = 0;
#pragma unroll 1
    for (int e = first; e < end; ++e) rows = max(rows, table.row_end[e]);
    rows = before_lane(scan_warp(rows, [](int a, int b) { return max(a, b); }));
    int tiles = 0;
#pragma unroll 1
    for (int e = first; e < end; ++e) {
      const int row_end = max(table.row_end[e], rows);
      tiles += tiles_of(row_end - rows);
      table.row_end[e] = rows = row_end;
      table.tile_end[e] = tiles;
    }
    tiles = before_lane(scan_warp(tiles, [](int a, int b) { return a + b; }));
#pragma unroll 1
    for (int e = first; e < end; ++e) table.tile_end[e] += tiles;
  }
  __syncthreads();
}

}  // namespace grouped_linear::cuda
