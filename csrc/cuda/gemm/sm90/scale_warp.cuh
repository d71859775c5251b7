// SPDX-License-Identifier: Apache-2.0
// The warp that prepares the block scales of b for the main loop, next to the producer.
#pragma once

#include "cuda/gemm/sm90/low_rank.cuh"
#include "cuda/gemm/sm90/scheduler.cuh"

namespace grouped_linear::cuda::sm90 {

// b's two scales in each k-block of a tile. A tile of 192 columns = 128 + 64 meets two scale
// blocks: its first 64 columns are in one, its last 64 in the other, those between in either. (A
// tile of up to 128 columns meets one or two as well.) A warp reads the scales of 32 k-blocks at
// once: whatever their layout, their latency is hidden while the pipeline is full.
template <typename Config>
class BlockScales {
  static_assert(
      !Config::kScale128x128 || Config::kTileN <= kScaleBlock + 64,
      "a tile has two scales of b: one for its first 64 columns, one for those from column "
      "128 on");

 public:
  __device__ void begin(const Scale128x128View& scale, const WorkTile& tile,
                        const GemmShape& shape) {
    const float* group = scale.scale + tile.group * scale.group_stride;
    first_ = group + min(tile.col, shape.cols - 1) / kScaleBlock * scale.row_stride;
    last_ = group + min(tile.col + kScaleBlock, shape.cols - 1) / kScaleBlock * scale.row_stride;
  }
  // By a whole warp, one k-block after the other.
  __device__ __forceinline__ float2 next(const Scale128x128View& scale, int k_block, int k_blocks) {
    if (k_block % 32 == 0) {
      const int lane = threadIdx.x % 32;
      const int64_t k = min(k_block + lane, k_blocks - 1) * scale.k_stride;
      of_first_ = first_[k];
      of_last_ = last_[k];
    }
    return make_float2(__shfl_sync(0xffffffff, of_first_, k_block % 32),
                       __shfl_sync(0xffffffff, of_last_, k_block % 32));
  }

 private:
  const float *first_, *last_;
  float of_first_, of_last_;
};

// Scale128x128: writes b's scales beside the operands of every k-block, without BlockScales: with
// it ptxas (nvcc 13.0) gives 167 promotions of the main loop registers of one bank.
template <typename Config, typename Params>
__device__ void load_block_scales(SharedStorage<Config>& shared, const Params& params) {
  static_assert(
      Config::kTileN <= kScaleBlock + 64,
      "a tile has two scales of b: one for its first 64 columns, one for those from column "
      "128 on");
  const Scale128x128View& scale = params.scale_b;
  const GemmShape& shape = params.shape;
  const int lane = threadIdx.x % 32;
  PipelineState<Config::kStages> state;
  const auto put = [&](float of_first, float of_last) {
    mbarrier_wait(&shared.empty[state.stage], state.phase ^ 1);
    if (lane == 0) {
      shared.scales[state.stage].blocks = make_float2(of_first, of_last);
      mbarrier_arrive(&shared.full[state.stage]);
    }
    state.advance();
  };
#pragma unroll 1
  for (int number = 0;; ++number) {
    const WorkTile tile = wait_for_tile(shared, number);
    if (tile.k_blocks < 0) break;
    const int first = min(tile.col, shape.cols - 1) / kScaleBlock;
    const int last = min(tile.col + kScaleBlock, shape.cols - 1) / kScaleBlock;
    const float* group = scale.scale + tile.group * scale.group_stride;
    if constexpr (Config::kLowRank)
#pragma unroll 1
      for (int i = 0; i < low_rank_blocks(params.producer); ++i) put(1, 1);  // which nobody reads
#pragma unroll 1
    for (int begin = 0; begin < tile.k_blocks; begin += 32) {
      const int64_t k = min(begin + lane, tile.k_blocks - 1) * scale.k_stride;
      const float of_first = group[first * scale.row_stride + k];
      const float of_last = group[last * scale.row_stride + k];
#pragma unroll 1
      for (int i = 0; i < min(32, tile.k_blocks - begin); ++i)
        put(__shfl_sync(0xffffffff, of_first, i), __shfl_sync(0xffffffff, of_last, i));
    }
  }
  put(0, 0);  // the end takes a stage too
}

// Scale1x128: finds out for every k-block whether the columns of each 128 share a scale (quantizers
// make them share one where their magnitudes allow it), and writes these scales where Scale128x128
// has its own, or kPerColumnScale. It starts as soon as the columns' scales are there, mostly while
// the operands are still on their way.
template <typename Config, typename Params>
__device__ void find_shared_column_scales(SharedStorage<Config>& shared, const Params& params) {
  static_assert(Config::kTileN <= kScaleBlock + 64, "see BlockScales");
  constexpr int parts = Config::kColumnParts;
  // The first column of the second scale block, or the last one of a tile that has a single block.
  constexpr int tile_n = Config::kTileN;
  constexpr int second_block = tile_n > kScaleBlock ? kScaleBlock : tile_n - 1;
  const int lane = threadIdx.x % 32;
  PipelineState<Config::kStages> state;
  for (int number = 0;; ++number) {
    const WorkTile& tile = wait_for_tile(shared, number);
    mbarrier_wait(&shared.scales_full[state.stage], state.phase);
    const int k_blocks = tile.k_blocks, columns = params.shape.cols - tile.col;
    const bool between_is_first = tile.col % kScaleBlock == 0;
    const int first_of_last = max(min(between_is_first ? second_block : 64, columns - 1), 0);
    const auto find = [&] {
      auto& scales = shared.scales[state.stage];
      const float first = scales.columns[0], last = scales.columns[first_of_last];
      const float of_part[] = {first, between_is_first ? first : last, last};
      bool same = true;
#pragma unroll
      for (int i = 0; i < parts; ++i) {
        const float2 two = *reinterpret_cast<const float2*>(&scales.columns[64 * i + 2 * lane]);
        same =
            same && ((two.x == of_part[i] && two.y == of_part[i]) || 64 * i + 2 * lane >= columns);
      }
      same = __all_sync(0xffffffff, same);
      if (lane == 0) {
        scales.blocks = make_float2(same ? first : kPerColumnScale, last);
        mbarrier_arrive(&shared.full[state.stage]);
      }
      state.advance();
    };
    find();
#pragma unroll 1
    for (int k_block = 1; k_block < k_blocks; ++k_block) {  // a tile without any takes a stage too
      mbarrier_wait(&shared.scales_full[state.stage], state.phase);
      find();
    }
    if (k_blocks < 0) return;
  }
}

// The scale warp.
template <typename Config, typename Params>
__device__ __forceinline__ void prepare_scales(SharedStorage<Config>& shared,
                                               const Params& params) {
  if constexpr (Config::kScale1x128)
    find_shared_column_scales<Config>(shared, params);
  else
    load_block_scales<Config>(shared, params);
}

}  // namespace grouped_linear::cuda::sm90
