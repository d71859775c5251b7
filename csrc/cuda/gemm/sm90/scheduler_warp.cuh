// The thread that schedules tiles dynamically and zeroes what no tile writes, in kernels whose warp
// 1 is idle otherwise. Code like this before the producer's loop would slow the producer down:
// ptxas (nvcc 13.0) then takes its loop for divergent, and moves every TMA's operands to uniform
// registers (32 more R2UR a k-block).
#pragma once

#include "cuda/gemm/sm90/tile_scheduler.cuh"
#include "cuda/gemm/sm90/zero_fill.cuh"

namespace grouped_linear::cuda::sm90 {

template <typename Config>
__device__ void schedule_tiles(SharedStorage<Config>& shared, const SplitKWorkspace& workspace,
                               const EpilogueArguments& epilogue, const TileCounts& counts,
                               const GemmShape& shape) {
  AtomicScheduler<Config> dynamic(shared, workspace.tile_counter);
  dynamic.begin(counts);
  ZeroFill<Config> zero_fill(shared, epilogue, shape);
  zero_fill.begin();
  for (uint32_t number = 0; dynamic.more(); ++number) {
    const uint32_t phase = number & 1;
    while (zero_fill.remaining() && !mbarrier_test(&shared.tile_begun, phase)) zero_fill.step();
    mbarrier_wait(&shared.tile_begun, phase);
    if (shared.tiles[number % kTileSlots].k_blocks < 0) break;
    dynamic.draw();
    dynamic.publish();
  }
  zero_fill.finish();
}

}  // namespace grouped_linear::cuda::sm90
