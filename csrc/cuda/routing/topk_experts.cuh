// The experts with the largest scores, a warp a token.
//
// Bytes: T E scores are read once, T k int64 are written. Each choice costs two
// reductions over a warp and four instructions for each of a lane's scores.
#pragma once

#include <cstdint>

#include "cuda/common/elements.cuh"
#include "cuda/common/groups.cuh"
#include "cuda/common/pdl.cuh"

namespace grouped_linear::cuda {

constexpr int kTopkThreads = 256;

// Larger for larger scores and largest for NaN; the same for both zeros; never 0.
__device__ __forceinline__ uint32_t rank_of(float score) {
  if (isnan(score)) return 0xffffffff;
  const uint32_t bits = __float_as_uint(__fadd_rn(score, 0.0f));  // -0 becomes 0
  return bits & 0x80000000 ? ~bits : bits | 0x80000000;
}

// experts [T, k] of scores [T, E]: a lane has every 32nd expert, at most per_lane of them.
template <typename Element, int per_lane>
__global__ void __launch_bounds__(kTopkThreads)
    topk_experts_kernel(const Element* scores, int64_t stride, int64_t T, int E, int k,
                        int64_t* experts) {
  grid_dependency_wait();
  const int lane = threadIdx.x % 32;
  const int64_t t = (int64_t{blockIdx.x} * kTopkThreads + threadIdx.x) / 32;
  if (t >= T) return;
  uint32_t rank[per_lane];  // 0: chosen already, or no expert
#pragma unroll
  for (int i = 0; i < per_lane; ++i) {
    const int e = 32 * i + lane;
    rank[i] = e < E ? rank_of(static_cast<float>(scores[t * stride + e])) : 0;
  }
  int64_t* chosen = experts + t * k;
  unsigned own = 0;  // every 32nd choice, until 32 are written at once
  for (int c = 0; c < k; ++c) {
    uint32_t largest = 0;
#pragma unroll
    for (int i = 0; i < per_lane; ++i) largest = max(largest, rank[i]);
    largest = __reduce_max_sync(kFullWarp, largest);
    unsigned first = 32 * per_lane;
#pragma unroll
    for (int i = per_lane - 1; i >= 0; --i)
      if (rank[i] == largest) first = 32 * i + lane;
    first = __reduce_min_sync(kFullWarp, first);
#pragma unroll
    for (int i = 0; i < per_lane; ++i)
      if (32 * i + lane == first) rank[i] = 0;
    if (lane == c % 32) own = first;
    if ((c % 32 == 31 || c == k - 1) && lane <= c % 32) chosen[c / 32 * 32 + lane] = own;
  }
}

}  // namespace grouped_linear::cuda
