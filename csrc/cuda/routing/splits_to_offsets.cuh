// SPDX-License-Identifier: Apache-2.0
// Turns group sizes into group ends, in one thread block with one thread a group: a few
// microseconds of launch latency and nothing else. Sizes are data of unknown origin: negative ones
// count as zero, and sums saturate at num_rows, so no end points outside a tensor of num_rows rows.
#pragma once

#include <cstdint>

#include "cuda/common/pdl.cuh"

namespace grouped_linear::cuda {

// a + b for a, b in [0, limit], without leaving [0, limit].
__device__ __forceinline__ int64_t saturating_add(int64_t a, int64_t b, int64_t limit) {
  return b > limit - a ? limit : a + b;
}

// The inclusive sum over a thread block of whole warps, saturated at limit. Saturating addition of
// non-negative numbers is associative, so the order of the additions does not matter.
__device__ __forceinline__ int64_t block_inclusive_sum(int64_t value, int64_t limit) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  __shared__ int64_t warp_sums[32];
  const auto warp_inclusive_sum = [&](int64_t sum) {
    for (int distance = 1; distance < 32; distance *= 2) {
      const int64_t left = __shfl_up_sync(0xffffffff, sum, distance);
      if (lane >= distance) sum = saturating_add(left, sum, limit);
    }
    return sum;
  };
  value = warp_inclusive_sum(value);
  if (blockDim.x == 32) return value;
  if (lane == 31) warp_sums[warp] = value;
  __syncthreads();
  if (warp == 0) warp_sums[lane] = warp_inclusive_sum(lane < blockDim.x / 32 ? warp_sums[lane] : 0);
  __syncthreads();
  return warp == 0 ? value : saturating_add(warp_sums[warp - 1], value, limit);
}

template <typename Split, typename Offset>
__global__ void __launch_bounds__(1024)
    splits_to_offsets_kernel(const Split* m_splits, int E, int64_t num_rows, int64_t alignment,
                             int64_t stride, Offset* offs) {
  grid_dependency_wait();
  const int e = threadIdx.x;
  int64_t size = e < E ? static_cast<int64_t>(m_splits[e]) : 0;
  size = size < 0 ? 0 : size > num_rows ? num_rows : size;
  if (alignment > 1) {
    // Rounding up in units of alignment cannot overflow for a size that is at most num_rows.
    const int64_t short_by = size % alignment == 0 ? 0 : alignment - size % alignment;
    size = short_by > num_rows - size ? num_rows : size + short_by;
  }
  const int64_t end = block_inclusive_sum(size, num_rows);
  if (e < E) offs[e] = static_cast<Offset>(end * stride);
}

}  // namespace grouped_linear::cuda
