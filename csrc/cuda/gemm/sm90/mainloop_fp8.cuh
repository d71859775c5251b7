// SPDX-License-Identifier: Apache-2.0
// The FP8 main loop, with promotion.
//
// The tensor cores keep about 14 bits of an FP8 dot product; float32 keeps 24. So the 128 products
// of a k-block are summed by the tensor cores in a partial accumulator, which is scaled and added
// to the accumulator in float32.
//
// One warpgroup's wgmma runs while the other warpgroup promotes. A warpgroup prepares the next
// k-block while its wgmma runs: whatever it does between two wgmma counts twice.
#pragma once

#include "cuda/gemm/sm90/gather_producer.cuh"
#include "cuda/gemm/sm90/low_rank.cuh"

namespace grouped_linear::cuda::sm90 {

// The block scales of a math thread's part of a tile, in every stage.
template <typename Config>
class StageScales {
  static constexpr int kParts = Config::kColumnParts;

 public:
  __device__ __forceinline__ StageScales(SharedStorage<Config>& shared, const WorkTile& tile,
                                         MathThread thread) {
    if constexpr (Config::kBlockScaled) {
      const int row = thread.warpgroup * kWgmmaM + thread.warp % 4 * 16 + thread.lane / 4;
      auto& scales = shared.scales[0];
      rows_ = kept_smem_address(
          &scales.rows[row + (Config::kKGrouped ? 0 : tile.row % kRowScaleAlignment)]);
      blocks_ = kept_smem_address(&scales.blocks);
      if constexpr (Config::kScale1x128)
        columns_ = kept_smem_address(&scales.columns[2 * (thread.lane % 4)]);
    }
    between_is_first_ = tile.col % kScaleBlock == 0;
  }

  // b's scale of each 64 columns, times a's of this thread's two rows. Returns whether columns
  // share scales, see scale_warp.cuh.
  __device__ __forceinline__ bool read(int stage, float (&scales)[2 * kParts]) const {
    const uint32_t offset = stage * kBytes;
    const float2 block = ld_shared_float2(blocks_ + offset);
    const float of_part[] = {block.x, between_is_first_ ? block.x : block.y, block.y};
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float row_scale = ld_shared_float(rows_ + offset + h * 8 * sizeof(float));
#pragma unroll
      for (int i = 0; i < kParts; ++i) scales[2 * i + h] = row_scale * of_part[i];
    }
    fence_operand(scales);
    return !Config::kScale1x128 || block.x != kPerColumnScale;
  }

  // accum += partial times the scales of each row and of each column.
  __device__ __forceinline__ void promote(int stage, const float (&partial)[Config::kTileN / 2],
                                          float (&accum)[Config::kTileN / 2]) const {
    const uint32_t offset = stage * kBytes;
    const float row_0 = ld_shared_float(rows_ + offset),
                row_1 = ld_shared_float(rows_ + offset + 8 * sizeof(float));
#pragma unroll
    for (int i = 0; i < Config::kTileN / 2; i += 4) {
      const float2 column = ld_shared_float2(columns_ + offset + i * 2 * sizeof(float));
      accum[accumulator_of<Config>(i + 0)] += row_0 * (column.x * partial[i + 0]);
      accum[accumulator_of<Config>(i + 1)] += row_0 * (column.y * partial[i + 1]);
      accum[accumulator_of<Config>(i + 2)] += row_1 * (column.x * partial[i + 2]);
      accum[accumulator_of<Config>(i + 3)] += row_1 * (column.y * partial[i + 3]);
    }
  }

 private:
  static constexpr size_t kBytes = sizeof(SharedStorage<Config>::scales[0]);

  // Addresses in the first stage: of this thread's first row's, first columns', and the blocks'.
  uint32_t rows_ = 0, columns_ = 0, blocks_ = 0;
  bool between_is_first_;
};

template <int count>
__device__ __forceinline__ void apply_group_scales(const EpilogueArguments& epilogue, int group,
                                                   float (&accum)[count]) {
  const float scale_a = epilogue.scale_a[group], scale_b = epilogue.scale_b[group];
#pragma unroll
  for (int i = 0; i < count; ++i) accum[i] = __fmul_rn(__fmul_rn(accum[i], scale_a), scale_b);
}

// accum += the tile's k_blocks of a @ b.T. With block scales and at least one k-block, it clears
// accum first. The first stage is full already. A second product joins the sum, if the
// kernel has one; a scale per group is of the first one alone, and is then applied here.
template <typename Config, typename Params>
__device__ __forceinline__ void mainloop_fp8(SharedStorage<Config>& shared,
                                             ConsumerPipeline<Config>& pipeline,
                                             const WgmmaOperands<Config>& operands,
                                             const WorkTile& tile, int k_blocks, MathThread thread,
                                             const Params& params,
                                             float (&accum)[Config::kTileN / 2]) {
  constexpr int count = Config::kTileN / 2;
  auto& state = pipeline.state;
  bool ready = true, first = true;
  int left = k_blocks;
  float partial[count];
  const StageScales<Config> of_stages(shared, tile, thread);
  float scales[2 * Config::kColumnParts];

  if constexpr (Config::kLowRankFirst) {
    clear_accumulator(accum);
    multiply_low_rank<Config>(shared, pipeline, operands, params.producer, false, partial);
#pragma unroll
    for (int i = 0; i < count; ++i) accum[accumulator_of<Config>(i)] += partial[i];
    ready = first = false;
  }

  // partial = the k-block in `stage`. Returns whether columns share scales.
  const auto multiply = [&](auto stage) {
    if (!ready) mbarrier_wait(pipeline.full(stage), state.phase);
    if constexpr (Config::kNeedsProxyFence) fence_proxy_async();
    fence_operand(partial);
    operands.issue(stage, partial, false);
    if (Config::kBlockScaled && first) clear_accumulator(accum);  // while wgmma runs
    first = false;
    const int next = stage + 1 == Config::kStages ? 0 : stage + 1;
    if (next == 0) state.phase ^= 1;
    bool shared_scales = true;
    if constexpr (Config::kBlockScaled) shared_scales = of_stages.read(stage, scales);
    ready = mbarrier_test(pipeline.full(next), state.phase);
    wgmma_wait<0>();
    fence_operand(partial);
    state.stage = next;
    return shared_scales;
  };

  const auto promote = [&](auto stage) {
    pipeline.release(stage);
#pragma unroll
    for (int i = 0; i < count; ++i) {
      if constexpr (Config::kBlockScaled)
        accum[accumulator_of<Config>(i)] += scales[i / 32 * 2 + i / 2 % 2] * partial[i];
      else
        accum[i] += partial[i];
    }
  };

  // Whole rounds over the stages have their addresses as constants in the instructions, since
  // address arithmetic between two wgmma costs time that the tensor cores do not get back. A
  // k-block whose columns have scales of their own ends a round: one copy of the code for those
  // serves every stage. (The round is written out: from a fold over the stages ptxas makes other
  // code.)
  static_assert(Config::kStages <= kMaxFp8Stages);
#pragma unroll 1
  while (left > 0) {
    if (state.stage == 0 && left >= Config::kStages) {
      bool complete = false;
      while (!complete) {
        if (!multiply(Int<0>())) break;
        promote(Int<0>());
        if (!multiply(Int<1>())) break;
        promote(Int<1>());
        if constexpr (Config::kStages > 2) {
          if (!multiply(Int<2>())) break;
          promote(Int<2>());
        }
        if constexpr (Config::kStages > 3) {
          if (!multiply(Int<3>())) break;
          promote(Int<3>());
        }
        left -= Config::kStages;
        complete = left < Config::kStages;
      }
      if (complete) continue;
      left -= state.stage == 0 ? Config::kStages : state.stage;
    } else {
      const int stage = state.stage;
      --left;
      if (multiply(stage)) {
        promote(stage);
        continue;
      }
    }
    if constexpr (Config::kScale1x128) {
      const int stage = state.stage == 0 ? Config::kStages - 1 : state.stage - 1;
      of_stages.promote(stage, partial, accum);
      pipeline.release(stage);
    }
  }

  if constexpr (Config::kLowRank && !Config::kLowRankFirst) {
    apply_group_scales(params.epilogue, tile.group, accum);
    multiply_low_rank<Config>(shared, pipeline, operands, params.producer, true, accum);
  }
}

}  // namespace grouped_linear::cuda::sm90
