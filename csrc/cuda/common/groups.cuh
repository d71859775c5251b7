// SPDX-License-Identifier: Apache-2.0
// The rows of each group, which every thread block works out for itself from offs [E].
//
// offs are data of unknown origin. Every kernel works on the running maximum of the ends, clamped
// into [0, T]: group e owns the rows [row_end[e - 1], row_end[e]). So the groups are disjoint, in
// order and inside the tensor, whatever offs holds. (Clamping each end alone is not enough: [T, 0,
// T, 0] would give two groups the same rows.)
#pragma once

#include <cstdint>

#include "layout.h"

namespace grouped_linear::cuda {

constexpr uint32_t kFullWarp = 0xffffffff;

// A table in shared memory. tile_end[e] counts the tiles of groups 0 .. e; a group's last tile may
// be partly filled. With tiles of 128 rows, tile_end is also the padded columnwise layout.
struct GroupTable {
  int32_t row_end[kMaxGroups];
  int32_t tile_end[kMaxGroups];

  __device__ int row_begin(int e) const { return e == 0 ? 0 : row_end[e - 1]; }
  __device__ int tile_begin(int e) const { return e == 0 ? 0 : tile_end[e - 1]; }

  // The group of tile t < tile_end[E - 1]: the first with tile_end > t.
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

// The inclusive scan of op over the lanes of a warp.
template <typename Op>
__device__ __forceinline__ int scan_warp(int value, Op op) {
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) {
    const int left = __shfl_up_sync(kFullWarp, value, distance);
    if (threadIdx.x % 32 >= distance) value = op(left, value);
  }
  return value;
}

// Counts tiles of `rows` rows; the last one may be partly filled.
struct TilesOf {
  int rows;
  __device__ int operator()(int group_rows) const { return (group_rows + rows - 1) / rows; }
};

// Fills the table with tiles_of(rows) tiles a group. Called by all `threads` threads of the block;
// ends with a barrier. A GEMM loads nothing before this ends, and fetches this code anew in every
// launch. So one warp scans, each lane has a run of neighbouring groups, and the loops are not
// unrolled.
template <int threads, typename Tiles>
__device__ void load_groups(GroupTable& table, const int32_t* offs, int E, int T, Tiles tiles_of) {
#pragma unroll 1
  for (int e = threadIdx.x; e < E; e += threads) table.row_end[e] = min(max(offs[e], 0), T);
  __syncthreads();
  if (threadIdx.x < 32) {
    const auto before_lane = [](int scanned) {
      const int before = __shfl_up_sync(kFullWarp, scanned, 1);
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

// The largest of offs[first], offs[first + step], ..., clamped into [0, T].
template <int unroll>
__device__ __forceinline__ int largest_row_end(const int32_t* offs, int E, int T, int first,
                                               int step) {
  int end = 0;
#pragma unroll unroll
  for (int e = first; e < E; e += step) end = max(end, min(offs[e], T));
  return end;
}

// The end of the last group's rows, without a table. Called by all threads of the block, once.
__device__ __forceinline__ int last_row_end(const int32_t* offs, int E, int64_t T) {
  __shared__ int largest;
  if (threadIdx.x == 0) largest = 0;
  __syncthreads();
  const int rows = static_cast<int>(min(T, int64_t{INT32_MAX}));  // an end is an int32
  const int end =
      __reduce_max_sync(kFullWarp, largest_row_end<1>(offs, E, rows, threadIdx.x, blockDim.x));
  if (threadIdx.x % 32 == 0) atomicMax(&largest, end);
  __syncthreads();
  return largest;
}

}  // namespace grouped_linear::cuda
