// SPDX-License-Identifier: Apache-2.0
// The producer: one thread that loads a and b, k-block by k-block, with TMA.
//
// A kernel has the producer of its Config (ProducerOf). A producer says how many threads run it
// (kThreads, 1 or 64), how many registers it takes (kRegisters), how often it arrives at
// full[stage] (kArrivals), and what the kernel is given for it (Arguments). With 64 threads it
// loads block scales too, and may have to schedule (roles.h). It must
//   - wait for this block's tiles, one after the other, and release each (scheduler.cuh);
//   - for each k-block wait for shared.empty[stage] and fill the stage, with kArrivals arrivals at
//     shared.full[stage] (a scale warp arrives too, see prologue in kernel.cuh);
//   - take one stage for a tile without k-blocks, and one for the end (k_blocks = -1).
#pragma once

#include "cuda/gemm/sm90/low_rank.cuh"
#include "cuda/gemm/sm90/scale_warp.cuh"
#include "cuda/gemm/sm90/tensor_maps.cuh"

namespace grouped_linear::cuda::sm90 {

// Loads every operand with TMA. Loads of an M-grouped GEMM may run past a group's end, into the
// next group's rows: these only reach outputs that are not stored. Loads of a K-grouped GEMM find
// zeros there, in the padded layout (FP8) or because the tensor map ends there (16-bit, see
// RaggedRows).
//
// Where the blocks of a cluster share an operand's tile, each loads one half of it into both.
struct TmaProducer {
  using Arguments = NoLowRank;
  static constexpr int kThreads = 1, kRegisters = 40;
  template <typename Config>
  static constexpr int kArrivals = 1;

  template <typename Config>
  static __device__ void prefetch(const TensorMaps& maps) {
    prefetch_tensor_map(&maps.a);
    prefetch_tensor_map(&maps.b);
    if (Config::kBlockScaled) prefetch_tensor_map(&maps.scale_a);
    if (Config::kScale1x128) prefetch_tensor_map(&maps.scale_b);
    if (!Config::kKGrouped) prefetch_tensor_map(&maps.narrow_b);
  }

  template <typename Config, typename Params>
  static __device__ void run(SharedStorage<Config>& shared, const Params& params);

  template <typename Config>
  static __device__ __forceinline__ void load_a(SharedStorage<Config>& shared,
                                                const TensorMaps& maps, const WorkTile& tile,
                                                int stage, int k_block, int half, uint16_t mask);
  template <typename Config>
  static __device__ __forceinline__ void load_b(SharedStorage<Config>& shared,
                                                const TensorMaps& maps, const WorkTile& tile,
                                                int stage, int k_block, int box, uint16_t mask);
};

// Loads one half of a's tile, kTileM / 2 rows, into the blocks of the cluster that mask names (0:
// this one).
template <typename Config>
__device__ __forceinline__ void TmaProducer::load_a(SharedStorage<Config>& shared,
                                                    const TensorMaps& maps, const WorkTile& tile,
                                                    int stage, int k_block, int half,
                                                    uint16_t mask) {
  uint8_t* to = shared.stages[stage].a + half * (Config::kABytes / 2);
  uint64_t* full = &shared.full[stage];
  const int row = tile.row + half * (Config::kTileM / 2);
  if constexpr (Config::kPadded) {
    tma_load_3d(to, &maps.a, full, mask, 0, row, tile.k_begin + k_block);
  } else if constexpr (Config::kKGrouped) {
    const int k = tile.k_begin + k_block * Config::kTileK;
    const RaggedRows rows(k, tile.k_begin + tile.k_count);
    tma_load_4d(to, &maps.a, full, mask, row, rows.c1, rows.c2, rows.kOrigin);
  } else {
    tma_load_2d(to, &maps.a, full, mask, k_block * Config::kTileK, row);
  }
}

// Loads one of b's boxes, kTileN / kBBoxes columns of the output.
template <typename Config>
__device__ __forceinline__ void TmaProducer::load_b(SharedStorage<Config>& shared,
                                                    const TensorMaps& maps, const WorkTile& tile,
                                                    int stage, int k_block, int box,
                                                    uint16_t mask) {
  constexpr int cols = Config::kTileN / Config::kBBoxes;
  uint8_t* to = shared.stages[stage].b + box * (Config::kBBytes / Config::kBBoxes);
  uint64_t* full = &shared.full[stage];
  const int col = tile.col + box * cols;
  if constexpr (Config::kPadded) {
    tma_load_3d(to, &maps.b, full, mask, 0, col, tile.k_begin + k_block);
  } else if constexpr (Config::kGated) {  // columns of gate or of up, gate or up
    tma_load_4d(to, Config::kNarrow ? &maps.narrow_b : &maps.b, full, mask,
                k_block * Config::kTileK, tile.col / 2, box, tile.group);
  } else if constexpr (Config::kBMajor == Major::kK) {
    tma_load_3d(to, Config::kNarrow ? &maps.narrow_b : &maps.b, full, mask,
                k_block * Config::kTileK, col, tile.group);
  } else {
    const int k = tile.k_begin + k_block * Config::kTileK;
    const RaggedRows rows(k, tile.k_begin + tile.k_count);
#pragma unroll
    for (int c = 0; c < cols; c += 64) {
      uint8_t* column = to + c / 64 * Config::kTileK * kSwizzleBytes;
      if constexpr (Config::kKGrouped)
        tma_load_4d(column, &maps.b, full, mask, col + c, rows.c1, rows.c2, rows.kOrigin);
      else
        tma_load_3d(column, &maps.b, full, mask, col + c, k, tile.group);
    }
  }
}

// a in boxes of 8, 16, 32 and 64 rows.
struct RowBoxes {
  CUtensorMap a[4];
};

// Loads one half of a swapped tile's rows into both blocks, in a box of each size at most.
template <typename Config>
__device__ __forceinline__ void load_rows(SharedStorage<Config>& shared, const RowBoxes& boxes,
                                          const WorkTile& tile, int stage, int k_block, int half) {
  constexpr uint16_t all = (1 << kClusterSize) - 1;
  const int units = swapped_units(tile);
  int row = half * units * (kSwappedUnit / 2);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if ((units >> i & 1) == 0) continue;
    tma_load_2d(shared.stages[stage].a + row * kSwizzleBytes, &boxes.a[i], &shared.full[stage], all,
                k_block * Config::kTileK, tile.row + row);
    row += 8 << i;
  }
}

template <typename Config, typename Params>
__device__ void TmaProducer::run(SharedStorage<Config>& shared, const Params& params) {
  const TensorMaps& maps = params.maps;
  constexpr int scale_bytes = Config::kBlockScaled ? 4 * Config::kRowScales : 0;
  constexpr uint16_t all = (1 << kClusterSize) - 1;
  // From shared memory: the special register would be read in every k-block (H200, 2026-11: 0.8% of
  // a K-grouped FP8 GEMM).
  const int rank = shared.rank;
  PipelineState<Config::kStages> state;
  for (int number = 0;; ++number) {
    const WorkTile tile = wait_for_tile(shared, number);
    release_tile(shared, number);
    if (tile.k_blocks <= 0) {
      mbarrier_wait(&shared.empty[state.stage], state.phase ^ 1);
      mbarrier_arrive(&shared.full[state.stage]);
      if constexpr (Config::kScale1x128) mbarrier_arrive(&shared.scales_full[state.stage]);
      if (tile.k_blocks < 0) return;
      state.advance();
    }
    if constexpr (Config::kLowRankFirst)
      load_low_rank<Config>(shared, params.producer, tile, state);
#pragma unroll 1
    for (int k_block = 0; k_block < tile.k_blocks; ++k_block, state.advance()) {
      const int stage = state.stage;
      uint64_t* full = &shared.full[stage];
      mbarrier_wait(&shared.empty[stage], state.phase ^ 1);
      if constexpr (Config::kScale1x128) {  // first: a warp looks at them while the rest arrives
        uint64_t* scales_full = &shared.scales_full[stage];
        mbarrier_arrive_expect_tx(scales_full, sizeof(shared.scales[stage].columns));
        tma_load_2d(shared.scales[stage].columns, &maps.scale_b, scales_full, 0, tile.col,
                    tile.k_begin + k_block);
      }
      const int a_bytes =
          Config::kSwapped ? swapped_units(tile) * kSwappedUnit * kSwizzleBytes : Config::kABytes;
      constexpr int b_bytes = Config::kDecodesB ? 0 : Config::kBBytes;
      mbarrier_arrive_expect_tx(full, a_bytes + b_bytes + scale_bytes);
      if (Config::kMulticastB && tile.cluster_along_m()) {
        load_a<Config>(shared, maps, tile, stage, k_block, 0, 0);
        load_a<Config>(shared, maps, tile, stage, k_block, 1, 0);
        if constexpr (!Config::kDecodesB)
          load_b<Config>(shared, maps, tile, stage, k_block, rank, all);
      } else {
        if (Config::kLoneColumnAlongM && tile.cluster_along_m()) {
          load_a<Config>(shared, maps, tile, stage, k_block, 0, 0);
          load_a<Config>(shared, maps, tile, stage, k_block, 1, 0);
        } else if constexpr (Config::kSwapped) {
          load_rows<Config>(shared, params.producer, tile, stage, k_block, rank);
        } else {
          load_a<Config>(shared, maps, tile, stage, k_block, rank, all);
        }
        if constexpr (!Config::kDecodesB) {
#pragma unroll
          for (int box = 0; box < Config::kBBoxes; ++box)
            load_b<Config>(shared, maps, tile, stage, k_block, box, 0);
        }
      }
      if constexpr (Config::kScale1x128) {
        tma_load_2d(shared.scales[stage].rows, &maps.scale_a, full, 0, tile.row,
                    tile.k_begin + k_block);
      } else if constexpr (Config::kBlockScaled) {
        // The innermost coordinate must be a multiple of 16 bytes (H200, 2026-11: an "illegal
        // instruction" otherwise), and a group may start at any row.
        tma_load_2d(shared.scales[stage].rows, &maps.scale_a, full, 0,
                    tile.row & ~(kRowScaleAlignment - 1), k_block);
      }
    }
    if constexpr (Config::kLowRank && !Config::kLowRankFirst)
      load_low_rank<Config>(shared, params.producer, tile, state);
  }
}

// The same with the second product's operands, or with a's boxes for swapped tiles.
struct LowRankProducer : TmaProducer {
  using Arguments = LowRankOperands;
};
struct SwappedProducer : TmaProducer {
  using Arguments = RowBoxes;
};

}  // namespace grouped_linear::cuda::sm90
