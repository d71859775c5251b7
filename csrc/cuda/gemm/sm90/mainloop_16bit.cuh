// SPDX-License-Identifier: Apache-2.0
// The 16-bit main loop: wgmma accumulates in float32, straight into the accumulator.
//
// One k-block's wgmma stays in flight while the next one's is issued. A stage is released when the
// wgmma of the stage after it has been issued and its own is complete.
#pragma once

#include "cuda/gemm/sm90/gather_producer.cuh"
#include "cuda/gemm/sm90/low_rank.cuh"

namespace grouped_linear::cuda::sm90 {

// accum += the tile's k_blocks of a @ b.T, and a second product, if the kernel has one.
// The first stage is full already. n: see WgmmaOperands::issue.
template <typename Config, int n = Config::kTileN, typename Params>
__device__ __forceinline__ void mainloop_16bit(SharedStorage<Config>& shared,
                                               ConsumerPipeline<Config>& pipeline,
                                               const WgmmaOperands<Config>& operands,
                                               const WorkTile& tile, int k_blocks,
                                               const Params& params,
                                               float (&accum)[Config::kAccumulators]) {
  constexpr int whole = Config::kTileK / Config::kWgmmaK;
  // K-grouped: the last k-block may have fewer rows, in units of kWgmmaK; the others there are
  // zero.
  int last = whole;
  if constexpr (Config::kKGrouped)
    last = (tile.k_count - (k_blocks - 1) * Config::kTileK + Config::kWgmmaK - 1) / Config::kWgmmaK;
  const int whole_k_blocks = last < whole ? k_blocks - 1 : k_blocks;
  auto& state = pipeline.state;
  int previous = -1;
  bool ready = true;
#pragma unroll 1
  for (int k_block = 0; k_block < whole_k_blocks; ++k_block) {
    if (!ready) mbarrier_wait(&shared.full[state.stage], state.phase);
    if constexpr (Config::kNeedsProxyFence) fence_proxy_async();
    fence_operand(accum);
    operands.template issue<Config::kTileK, n>(state.stage, accum, true);
    const int stage = state.stage;
    state.advance();
    ready = mbarrier_test(pipeline.full(state.stage), state.phase);
    wgmma_wait<1>();
    if (previous >= 0) pipeline.release(previous);
    previous = stage;
  }
  wgmma_wait<0>();
  fence_operand(accum);
  if (previous >= 0) pipeline.release(previous);
  if constexpr (Config::kLowRank)
    multiply_low_rank<Config>(shared, pipeline, operands, params.producer, true, accum);
  if constexpr (Config::kKGrouped) {
    const auto finish = [&](auto units) {
      if (!ready) mbarrier_wait(&shared.full[state.stage], state.phase);
      if constexpr (Config::kNeedsProxyFence) fence_proxy_async();
      fence_operand(accum);
      operands.template issue<units * Config::kWgmmaK>(state.stage, accum, true);
      wgmma_wait<0>();
      fence_operand(accum);
      pipeline.release(state.stage);
      state.advance();
    };
    static_assert(whole == 2 || whole == 4,
                  "there is a case for every number of steps in a partial k-block");
    if (last == 1) finish(Int<1>());
    if constexpr (whole == 4) {
      if (last == 2) finish(Int<2>());
      if (last == 3) finish(Int<3>());
    }
  }
}

}  // namespace grouped_linear::cuda::sm90
