// SPDX-License-Identifier: Apache-2.0
// What a block has in shared memory.
#pragma once

#include <type_traits>

#include "cuda/common/groups.cuh"
#include "cuda/gemm/sm80/config.h"
#include "cuda/gemm/sm80/ptx.cuh"
#include "cuda/gemm/tile_order.cuh"

namespace grouped_linear::cuda::sm80 {

// Scales of a k-block, one for each thread to load: of a's rows, and of b's columns (Scale128x128:
// the first alone is read).
template <typename Config>
struct KBlockScales {
  float rows[Config::kTileM], columns[Config::kThreads - Config::kTileM];
};

// Eight rows of a warp's accumulators on their way to the output. Eight floats more a row: the rows
// of a store share no bank.
template <typename Config>
struct EpilogueRows {
  float rows[8][Config::kWarpN + 8];
};

// Scales are loaded kStages - 1 stages ahead, while those of the k-block before are read.
constexpr int kScaleSlots = 4;

// Tiles from the one that is computed to the one that is loaded: a tile has a stage at least.
constexpr int kTileSlots = 4;

template <typename Config>
struct SharedStorage {
  alignas(128) uint8_t stages[Config::kStages][Config::kStageBytes];  // a's tile, then b's
  EpilogueRows<Config> epilogue[Config::kThreads / 32];
  // One byte where there are none.
  std::conditional_t<Config::kBlockScaled, KBlockScales<Config>[kScaleSlots], char> scales;
  WorkTile tiles[kTileSlots];
  GroupTable groups;
  int tile_numbers[2];  // of the tile that is loaded next, and of the one after it
  static_assert(Config::kStages <= kTileSlots, "a tile is overwritten while it is computed");
  static_assert(kScaleSlots * Config::kStagesPerKBlock >=
                    Config::kStages + Config::kStagesPerKBlock,
                "scales are overwritten while they are read");
};

template <typename Config>
constexpr int shared_bytes() {
  static_assert(sizeof(SharedStorage<Config>) <= kMaxSharedBytes,
                "a block's shared memory is what every GPU from 8.0 on has");
  return sizeof(SharedStorage<Config>);
}

// A thread's place in the block's tile.
struct MmaThread {
  int lane, row, col;  // of the warp's first accumulator in the tile

  template <typename Config>
  static __device__ __forceinline__ MmaThread of() {
    const int warp = threadIdx.x / 32;
    return {static_cast<int>(threadIdx.x % 32), warp / Config::kWarpsN * Config::kWarpM,
            warp % Config::kWarpsN * Config::kWarpN};
  }
};

// accum[i][j][2 h + l] belongs to row 16 i + 8 h + lane / 4 and column 8 j + 2 (lane % 4) + l of
// the warp's part of the tile.
template <typename Config>
using Accumulators = float[Config::kWarpM / 16][Config::kWarpN / 8][4];

}  // namespace grouped_linear::cuda::sm80
