// SPDX-License-Identifier: Apache-2.0
// Split-K fix-up: a cluster that computes a slice of a tile writes its accumulators to a workspace
// slot, and the cluster with the tile's last slice adds them to its own, in the order of their
// slots.
//
// Bytes: a block's tile of float32, 128 KiB in 16 bits and 96 KiB in FP8, is written once and read
// once, mostly in L2. The reader waits for a flag, which is the launch's stamp, and clears it. So no
// flag outlives the kernel that set it, and the workspace needs no clearing before.
#pragma once

#include "cuda/gemm/sm90/params.cuh"
#include "cuda/gemm/sm90/smem_layout.cuh"

namespace grouped_linear::cuda::sm90 {

constexpr int kCounterWords = 16;  // StampedTickets', and what keeps the rest aligned
constexpr int kFlagsPerSlot = kClusterSize * kMathWarps;
template <typename Config>
constexpr int kAccumulatorsPerSlot = kClusterSize * kTileM * Config::kTileN;
// There are as many slots as clusters at most, and a WorkTile names them in 8 bits.
constexpr int kMaxClusters = WorkTile::kMaxSlots;

// This warp's index among all slots' warps.
__device__ __forceinline__ int64_t slot_warp(int slot) {
  const int warp = reread_thread_index() / 32 - 4;
  return (int64_t{slot - 1} * kClusterSize + cluster_rank()) * kMathWarps + warp;
}

template <int count>
__device__ __forceinline__ void write_partial(const SplitKWorkspace& workspace, int slot,
                                              const float (&accum)[count]) {
  const int64_t warp = slot_warp(slot);
  const int lane = reread_thread_index() % 32;
  float* to = workspace.accumulators + warp * 32 * count + lane;
#pragma unroll
  for (int i = 0; i < count; ++i) st_global_cg(to + 32 * i, accum[i]);
  __syncwarp();
  if (lane == 0) st_release(workspace.flags + warp, workspace.tickets.stamp);
}

// Adds the slots [first, first + slots). Waits for clusters of lower numbers, which the GPU has
// started before this one: see scheduler.cuh.
template <int count>
__device__ __forceinline__ void add_partials(const SplitKWorkspace& workspace, int first, int slots,
                                             float (&accum)[count]) {
  const int lane = reread_thread_index() % 32;
#pragma unroll 1
  for (int slot = first; slot < first + slots; ++slot) {
    const int64_t warp = slot_warp(slot);
    // By all lanes: where one waits ptxas keeps wgmma's descriptors in no uniform registers.
    const DebugWait wait("a split-K slice");
    while (!__all_sync(kFullWarp, ld_acquire(workspace.flags + warp) == workspace.tickets.stamp)) {
      wait.check();
      __nanosleep(64);
    }
    if (lane == 0) workspace.flags[warp] = 0;
    const float* from = workspace.accumulators + warp * 32 * count + lane;
#pragma unroll
    for (int i = 0; i < count; ++i) accum[i] += ld_global_cg(from + 32 * i);
  }
}

}  // namespace grouped_linear::cuda::sm90
