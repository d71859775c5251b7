// Where each group's rows are, worked out by every block for itself from offs [E].
//
// offs are data of unknown origin. Every kernel works on the running maximum of the ends clamped
// into [0, T]: group e owns the rows [row_end[e - 1], row_end[e]), the groups are disjoint, in
// order, and inside the tensor, whatever offs holds. (Clamping each end alone is not enough: [T, 0,
// T, 0] would give two groups the same rows.)
#pragma once

#include <cstdint>

#include "../../layout.h"

namespace grouped_linear::cuda {

// One table in shared memory. tile_end[e] counts the tiles of `rows_per_tile` rows of groups 0 ..
// e, each group's last tile rounded up; with 128 rows a tile it is also the padded columnwise
// layout.
struct GroupTable {
  int32_t row_end[kMaxGroups];
  int32_t tile_end[kMaxGroups];
  int32_t warp_carry[32];

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

namespace detail {

struct Maximum {
  __device__ int operator()(int a, int b) const { return max(a, b); }
};
struct Sum {
  __device__ int operator()(int a, int b) const { return a + b; }
};

// values[i] = op over values[0 .. i], in place, by all `threads` threads of the block; op has 0 as
// its neutral element. Ends with a barrier.
template <int threads, typename Op>
__device__ void scan(int32_t* values, int count, int32_t* warp_carry, Op op) {
  static_assert(threads % 32 == 0 && threads <= 1024);
  constexpr int per_thread = (kMaxGroups + threads - 1) / threads;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, first = threadIdx.x * per_thread;
  int local[per_thread], total = 0;
#pragma unroll
  for (int i = 0; i < per_thread; ++i) {
    total = op(total, first + i < count ? values[first + i] : 0);
    local[i] = total;
  }
  int inclusive = total;
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) {
    const int left = __shfl_up_sync(0xffffffff, inclusive, distance);
    if (lane >= distance) inclusive = op(left, inclusive);
  }
  if (lane == 31) warp_carry[warp] = inclusive;
  const int left = __shfl_up_sync(0xffffffff, inclusive, 1);
  __syncthreads();
  int before = lane == 0 ? 0 : left;
  for (int w = 0; w < warp; ++w) before = op(before, warp_carry[w]);
#pragma unroll
  for (int i = 0; i < per_thread; ++i)
    if (first + i < count) values[first + i] = op(before, local[i]);
  __syncthreads();
}

}  // namespace detail

// Tiles of `rows` rows, a group's last one rounded up.
struct TilesOf {
  int rows;
  __device__ int operator()(int group_rows) const { return (group_rows + rows - 1) / rows; }
};

// Fills the table with tiles_of(rows) tiles a group; called by all `threads` threads of the block,
// ends with a barrier.
template <int threads, typename Tiles>
__device__ void load_groups(GroupTable& table, const int32_t* offs, int E, int T, Tiles tiles_of) {
  for (int e = threadIdx.x; e < E; e += threads) table.row_end[e] = min(max(offs[e], 0), T);
  __syncthreads();
  detail::scan<threads>(table.row_end, E, table.warp_carry, detail::Maximum());
  for (int e = threadIdx.x; e < E; e += threads)
    table.tile_end[e] = tiles_of(table.row_end[e] - table.row_begin(e));
  __syncthreads();
  detail::scan<threads>(table.tile_end, E, table.warp_carry, detail::Sum());
}

}  // namespace grouped_linear::cuda
