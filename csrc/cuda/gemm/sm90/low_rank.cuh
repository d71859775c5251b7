// SPDX-License-Identifier: Apache-2.0
// A low-rank second product, a_low [T, r] @ b_low [e], in the accumulators of the first one.
//
// It takes ceil(r / 64) k-blocks of a tile through the same stages: kTileM and kTileN lines of 128
// bytes hold 64 elements of 16 bits along r, whatever the first product's operands are. a_low is
// K-major. b_low is K-major as for fprop, or N-major as for dgrad.
//
// These k-blocks are a tile's last ones, and wgmma adds them to the accumulators: in FP8 with a
// scale per group after that scale, which the epilogue then leaves out. With block scales they are
// the first ones, in a partial accumulator that is added to zero. Accumulators that wgmma writes
// would lie in the promotion's register banks (accumulator_of), and with a partial accumulator
// after the main loop ptxas (nvcc 13.0) spills.
//
// Arithmetic: wgmma takes steps of 16 along r. With r = 16 a tile of FP8 takes 192 cycles of the
// tensor cores for them, and 12288 for K = 2048. Bytes: the blocks of a cluster do not share
// b_low's tile. It is one k-block of 17 at K = 2048.
//
// The output is written once, and the sum is rounded once.
#pragma once

#include <cuda.h>

#include <type_traits>

#include "cuda/gemm/sm90/smem_layout.cuh"
#include "cuda/gemm/sm90/wgmma.cuh"

namespace grouped_linear::cuda::sm90 {

struct LowRankOperands {
  CUtensorMap a;  // boxes of 64 elements along r x 64 rows
  CUtensorMap b;  // K-major: 64 elements along r x 64 columns. N-major: 64 columns x b_box_k of r
  int b_box_k;    // which divides r and 64. 0: K-major
  bool bfloat16;  // else float16
  int r;
};
struct NoLowRank {};
template <typename Config>
using LowRankArguments = std::conditional_t<Config::kLowRank, LowRankOperands, NoLowRank>;

// Stages that a tile takes for it.
__device__ __forceinline__ int low_rank_blocks(const LowRankOperands& low) {
  return (low.r + kLowRankK - 1) / kLowRankK;
}

// By the producer: loads a tile's k-blocks of the second product.
template <typename Config>
__device__ __forceinline__ void load_low_rank(SharedStorage<Config>& shared,
                                              const LowRankOperands& low, const WorkTile& tile,
                                              PipelineState<Config::kStages>& state) {
#pragma unroll 1
  for (int k = 0; k < low.r; k += kLowRankK, state.advance()) {
    const int extent = min(low.r - k, kLowRankK), lines = low.b_box_k > 0 ? extent : 64;
    uint64_t* full = &shared.full[state.stage];
    auto& stage = shared.stages[state.stage];
    mbarrier_wait(&shared.empty[state.stage], state.phase ^ 1);
    constexpr int columns = Config::kDecodesB ? 0 : Config::kTileN;  // math warps read b_low there
    mbarrier_arrive_expect_tx(full, Config::kABytes + columns / 64 * lines * kSwizzleBytes);
#pragma unroll
    for (int half = 0; half < 2; ++half)
      tma_load_2d(stage.a + half * (Config::kABytes / 2), &low.a, full, 0, k,
                  tile.row + half * (Config::kTileM / 2));
    if constexpr (!Config::kDecodesB) {
#pragma unroll 1
      for (int col = 0; col < Config::kTileN; col += 64) {
        uint8_t* to = stage.b + col * kSwizzleBytes;
        if (low.b_box_k == 0) {
          tma_load_3d(to, &low.b, full, 0, k, tile.col + col, tile.group);
        } else {
#pragma unroll 1
          for (int line = 0; line < extent; line += low.b_box_k)
            tma_load_3d(to + line * kSwizzleBytes, &low.b, full, 0, tile.col + col, k + line,
                        tile.group);
        }
      }
    }
  }
}

// sums = (add ? sums : 0) + the second product of a tile. A step of 16 along r waits for the one
// before it: the other warpgroup's runs meanwhile.
template <typename Config>
__device__ __forceinline__ void multiply_low_rank(SharedStorage<Config>& shared,
                                                  ConsumerPipeline<Config>& pipeline,
                                                  const WgmmaOperands<Config>& operands,
                                                  const LowRankOperands& low, bool add,
                                                  float (&sums)[Config::kTileN / 2]) {
  auto& state = pipeline.state;
  const auto issue = [&]<typename T>(int k) {
    if (low.b_box_k == 0)
      operands.template issue_low_rank<T, Major::kK>(state.stage, k % kLowRankK, sums,
                                                     add || k > 0);
    else
      operands.template issue_low_rank<T, Major::kMN>(state.stage, k % kLowRankK, sums,
                                                      add || k > 0);
  };
#pragma unroll 1
  for (int k = 0; k < low.r; k += 16) {
    if (k % kLowRankK == 0) mbarrier_wait(&shared.full[state.stage], state.phase);
    fence_operand(sums);
    if constexpr (!Config::kFp8)
      issue.template operator()<typename Config::A>(k);
    else if (low.bfloat16)
      issue.template operator()<__nv_bfloat16>(k);
    else
      issue.template operator()<__half>(k);
    wgmma_wait<0>();
    fence_operand(sums);
    if (k % kLowRankK == kLowRankK - 16 || k == low.r - 16) {
      pipeline.release(state.stage);
      state.advance();
    }
  }
}

}  // namespace grouped_linear::cuda::sm90
