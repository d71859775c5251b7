// Sums of a part of a tile, which one cluster leaves in memory for another.
//
// Bytes: a block's tile of float32, 128 KiB in 16 bits and 96 in FP8, written once and read once, mostly
// in L2. Whoever takes them waits for a mark, and wipes it off. So no mark outlives the kernel that made
// it, and nobody has to clear the memory before: whatever else lies there is not that number, of 2^64.
#pragma once

#include "cuda/gemm/sm90/tiles.cuh"

namespace grouped_linear::cuda {

// A place has the marks of both blocks' warps, and their sums. Places count from 1.
struct PartialSums {
  uint64_t* ticket;  // see TileNumbers
  uint64_t* marks;
  float* sums;  // null: there is no room for any, and no tile is cut
};

constexpr int kTicketWords = 16;  // one, and what keeps the rest aligned
constexpr int kMarksOfPlace = kCluster * kMathWarps;
template <typename Config>
constexpr int kSumsOfPlace = kCluster * kTileM * Config::kTileN;

constexpr uint64_t kMark = 0x9d1fa0c7b3e85d26;

__device__ __forceinline__ int64_t warps_before(int place) {
  const int warp = sm90::thread_index() / 32 - 4;
  return (int64_t{place - 1} * kCluster + sm90::cluster_rank()) * kMathWarps + warp;
}

template <int count>
__device__ __forceinline__ void leave_sums(const PartialSums& partial, int place,
                                           const float (&sum)[count]) {
  const int64_t before = warps_before(place);
  const int lane = sm90::thread_index() % 32;
  float* to = partial.sums + before * 32 * count + lane;
#pragma unroll
  for (int i = 0; i < count; ++i) sm90::store_past_l1(to + 32 * i, sum[i]);
  __syncwarp();
  if (lane == 0) sm90::store_release(partial.marks + before, kMark);
}

// Adds what parts left in `places` places from place `first` on.
template <int count>
__device__ __forceinline__ void add_sums(const PartialSums& partial, int first, int places,
                                         float (&sum)[count]) {
  const int lane = sm90::thread_index() % 32;
#pragma unroll 1
  for (int place = first; place < first + places; ++place) {
    const int64_t before = warps_before(place);
    if (lane == 0) {
      while (sm90::load_acquire(partial.marks + before) != kMark) __nanosleep(64);
      partial.marks[before] = 0;
    }
    __syncwarp();
    const float* from = partial.sums + before * 32 * count + lane;
#pragma unroll
    for (int i = 0; i < count; ++i) sum[i] += sm90::load_past_l1(from + 32 * i);
  }
}

}  // namespace grouped_linear::cuda
