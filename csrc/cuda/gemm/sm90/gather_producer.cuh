// SPDX-License-Identifier: Apache-2.0
// The producer of a GEMM that gathers rows: two warps that copy a's rows, while TMA loads b.
//
// TMA has no instruction on Hopper that loads rows by number: one line of 128 bytes at a time it
// issues every 9 cycles at best, from eight warps (H100, 2026-11), and a stage has 128 lines. So
// each thread copies pieces of 16 bytes with cp.async, to where TMA's swizzle would have put them,
// and the math warps notice no difference.
//
// Bytes: every block gathers its own tile. The blocks of a cluster share the other operand's.
#pragma once

#include "cuda/common/row_numbers.cuh"
#include "cuda/common/shared_memory.cuh"
#include "cuda/gemm/sm90/producer.cuh"

namespace grouped_linear::cuda::sm90 {

// A dense matrix whose rows a gathers.
struct GatheredRows {
  RowNumbers numbers;
  const uint8_t* source;
  uint32_t row_pieces;  // from row to row, in pieces of 16 bytes
  const float* scales;  // FP8: of row r and scale block j, scales[j * scale_stride + r]
  int64_t scale_stride;
};

// How two warps copy the gathered rows of a stage: each takes one half of them, 32 pieces of 16
// bytes an instruction.
template <typename Config>
struct GatheredTile {
  // M-grouped: a tile's rows, of 128 bytes a stage. K-grouped: a k-block's rows, of all columns.
  static constexpr int kRows = Config::kKGrouped ? Config::kTileK : Config::kTileM;
  static constexpr int kRowsOfWarp = kRows / 2;
  static constexpr int kLanesOfRow = Config::kKGrouped ? kTileM / 8 : 8;
  static constexpr int kRowsAtOnce = 32 / kLanesOfRow;
  static constexpr int kCopies = kRowsOfWarp / kRowsAtOnce;
  static constexpr int kRowsOfLane = (kRowsOfWarp + 31) / 32;  // whose numbers a lane knows
  // K-grouped: k-blocks whose rows' numbers are in shared memory or on their way to it. One k-block
  // is shorter than a busy L2 takes to answer.
  static constexpr int kAsked = kRowNumberBlocks;
};

// A K-grouped GEMM's rows past the end of a group are zeros.
//
// A stage is full when the copies of every lane have arrived, which the mbarrier is told without a
// lane that waits for them. wgmma reads through the async proxy, so the math warps fence first.
//
// Warp 0 loads b. Warp 1 loads b's block scales, or a lane of it schedules.
struct GatherProducer {
  using Arguments = GatheredRows;
  static constexpr int kThreads = 64;
  // Those of the lane that uses TMA, of every lane, and of the lane that writes block scales.
  template <typename Config>
  static constexpr int kArrivals = 1 + kThreads + (Config::kScale128x128 ? 1 : 0);
  static constexpr int kRegisters = 72;

  template <typename Config>
  static __device__ void prefetch(const TensorMaps& maps) {
    TmaProducer::prefetch<Config>(maps);
  }

  template <typename Config, typename Params>
  static __device__ void run(SharedStorage<Config>& shared, const Params& params);

 private:
  template <typename Config>
  static __device__ __forceinline__ void load_b(SharedStorage<Config>& shared,
                                                const TensorMaps& maps, const WorkTile& tile,
                                                int stage, int k_block);
  template <typename Config>
  static __device__ __forceinline__ void load_end_of_b(SharedStorage<Config>& shared,
                                                       const TensorMaps& maps, const WorkTile& tile,
                                                       int stage, int k_block, int cols);
};

template <typename Config>
__device__ __forceinline__ void GatherProducer::load_b(SharedStorage<Config>& shared,
                                                       const TensorMaps& maps, const WorkTile& tile,
                                                       int stage, int k_block) {
  constexpr uint16_t all = (1 << kClusterSize) - 1;
  const int rank = shared.rank;
  mbarrier_arrive_expect_tx(&shared.full[stage], Config::kBBytes);
  if (Config::kMulticastB && tile.cluster_along_m()) {
    TmaProducer::load_b<Config>(shared, maps, tile, stage, k_block, rank, all);
  } else {
#pragma unroll
    for (int box = 0; box < Config::kBBoxes; ++box)
      TmaProducer::load_b<Config>(shared, maps, tile, stage, k_block, box, 0);
  }
}

// K-grouped, of a tile that ends outside b: without the boxes there. TMA takes some 8 cycles for
// each line of zeros (H100, 2026-11). That part of the stage reaches no column that is stored.
template <typename Config>
__device__ __forceinline__ void GatherProducer::load_end_of_b(SharedStorage<Config>& shared,
                                                              const TensorMaps& maps,
                                                              const WorkTile& tile, int stage,
                                                              int k_block, int cols) {
  constexpr int column_bytes = Config::kTileK * kSwizzleBytes, half = Config::kTileN / 2;
  const int boxes = max((cols - tile.col + 63) / 64, 0);
  uint64_t* full = &shared.full[stage];
  mbarrier_arrive_expect_tx(full, boxes * column_bytes);
  const int k = tile.k_begin + k_block * Config::kTileK;
  const RaggedRows rows(k, tile.k_begin + tile.k_count);
  const int first = tile.cluster_along_m() && shared.rank == 1 ? half / 64 : 0;
  const int last = tile.cluster_along_m() && shared.rank == 0 ? half / 64 : Config::kTileN / 64;
#pragma unroll 1
  for (int i = first; i < min(last, boxes); ++i)
    tma_load_4d(shared.stages[stage].b + i * column_bytes, &maps.b, full,
                tile.cluster_along_m() ? (1 << kClusterSize) - 1 : 0, tile.col + 64 * i, rows.c1,
                rows.c2, rows.kOrigin);
}

template <typename Config, typename Params>
__device__ void GatherProducer::run(SharedStorage<Config>& shared, const Params& params) {
  using Tile = GatheredTile<Config>;
  constexpr int item = sizeof(typename Config::A);
  const TensorMaps& maps = params.maps;
  const GatheredRows& rows = params.producer;
  const GemmShape& shape = params.shape;
  const int lane = threadIdx.x % 32, lane_row = lane / Tile::kLanesOfRow;
  const bool is_second = threadIdx.x >= 32;
  const int warp_row = is_second ? Tile::kRowsOfWarp : 0;
  // Where a lane's pieces start in a source row, and in the stage: lines of 128 bytes, columns of
  // 64 elements one after another. Their places in a line repeat after eight rows.
  const int piece = lane % Tile::kLanesOfRow * 16;
  const int line =
      (lane % Tile::kLanesOfRow / 8 * Tile::kRows + warp_row + lane_row) * kSwizzleBytes;
  const auto place_of = [&](int r) { return ((lane % 8) ^ (lane_row % 8) ^ (r % 8)) * 16; };

  Scheduler<Config> scheduler(shared, params);
  constexpr Roles roles = Config::kRoles;
  constexpr bool may_schedule = roles.schedules(Role::kProducer);
  const bool schedules = may_schedule && shared.rank == 0 && threadIdx.x == 32 * roles.scheduler;
  if (schedules) scheduler.begin();
  PipelineState<Config::kStages> state;
  BlockScales<Config> scales;
  int64_t next_numbers[Config::kKGrouped ? 1 : Tile::kRowsOfLane];  // M-grouped: of the next tile
  int asked = 0;  // K-grouped: k-blocks of this tile whose numbers are on their way or there
  uint32_t k_block_number = 0;  // of all tiles
  for (int number = 0;; ++number) {
    // As a rule both are there: the one after them was published in the tile before.
    if (schedules) scheduler.publish_before(number + Config::kTilesAhead);
    const WorkTile& tile = wait_for_tile(shared, number);
    if (threadIdx.x == 0) release_tile(shared, number);
    __syncwarp();
    if (tile.k_blocks <= 0) {
      mbarrier_wait(&shared.empty[state.stage], state.phase ^ 1);
      uint64_t* full = &shared.full[state.stage];
      if (lane == 0 && (!is_second || Config::kScale128x128)) mbarrier_arrive(full);
      mbarrier_arrive(full);
      if (tile.k_blocks < 0) return;
      state.advance();
      continue;
    }

    const WorkTile& next = wait_for_tile(shared, number + 1);
    const int k_blocks = tile.k_blocks;
    const bool has_all_columns = tile.col + Config::kTileN <= shape.cols;
    const int end = Config::kKGrouped ? tile.k_begin + tile.k_count : shape.T;
    const auto first_row = [&](int k_block) {
      return warp_row + (Config::kKGrouped ? tile.k_begin + k_block * Tile::kRows : tile.row);
    };
    int row[Tile::kRowsOfLane];
    // K-grouped. Asks for the numbers of a k-block, which is counted from this tile's first one
    // into the next tile. A group of copies each, so that a lane can wait for one.
    const auto slot_of = [&](int k_block) -> int64_t& {
      return shared.row_numbers[(k_block_number + k_block) % Tile::kAsked]
                               [warp_row + lane % Tile::kRowsOfWarp];
    };
    const auto ask = [&](int k_block) {
      const bool in_next = k_block >= k_blocks;
      const WorkTile& of = in_next ? next : tile;
      const int block = in_next ? k_block - k_blocks : k_block;
      const int at = of.k_begin + block * Tile::kRows + warp_row + lane;
      if (lane < Tile::kRowsOfWarp && block < of.k_blocks && at < of.k_begin + of.k_count) {
        const uint32_t to = smem_address(&slot_of(k_block));
        if (rows.numbers.wide)
          cp_async_8(to, static_cast<const int64_t*>(rows.numbers.numbers) + at);
        else
          cp_async_4(to, static_cast<const int32_t*>(rows.numbers.numbers) + at);
      }
      cp_async_commit();
    };
    // Past the group's end it may be anything: such a row is not copied.
    const auto number_of = [&](int k_block) {
      const int64_t number = slot_of(k_block);
      return rows.numbers.clamped(rows.numbers.wide ? number : static_cast<int32_t>(number));
    };
    if constexpr (Config::kKGrouped) {
#pragma unroll 1
      for (; asked < Tile::kAsked - 1; ++asked) ask(asked);
    } else {
      const auto read = [&](int first) {  // of row 0 on where there is no next tile
#pragma unroll
        for (int i = 0; i < Tile::kRowsOfLane; ++i)
          next_numbers[i] = rows.numbers.raw(min(first + lane + 32 * i, end - 1));
      };
      if (number == 0) read(first_row(0));
#pragma unroll
      for (int i = 0; i < Tile::kRowsOfLane; ++i) row[i] = rows.numbers.clamped(next_numbers[i]);
      read(warp_row + next.row);
    }
    if (Config::kScale128x128 && is_second) scales.begin(params.scale_b, tile, shape);

    // M-grouped: of the rows that this lane copies in every k-block.
    uint32_t offsets[Config::kKGrouped ? 1 : Tile::kCopies];  // in pieces of 16 bytes
    const auto row_of_copy = [&](int i) {
      const int r = i * Tile::kRowsAtOnce;
      return __shfl_sync(0xffffffff, row[r / 32], r % 32 + lane_row);
    };
    if constexpr (!Config::kKGrouped) {
#pragma unroll
      for (int i = 0; i < Tile::kCopies; ++i) offsets[i] = row_of_copy(i) * rows.row_pieces;
    }

#pragma unroll 1
    for (int k_block = 0; k_block < k_blocks; ++k_block, state.advance()) {
      const int stage = state.stage;
      if constexpr (Config::kKGrouped) {
        ask(k_block + Tile::kAsked - 1);
        cp_async_wait<Tile::kAsked - 1>();
        row[0] = number_of(k_block);
      }
      mbarrier_wait(&shared.empty[stage], state.phase ^ 1);
      if (!is_second && elect_one()) {
        if constexpr (Config::kKGrouped) {
          if (has_all_columns)
            load_b<Config>(shared, maps, tile, stage, k_block);
          else
            load_end_of_b<Config>(shared, maps, tile, stage, k_block, shape.cols);
        } else {
          load_b<Config>(shared, maps, tile, stage, k_block);
        }
      }
      if constexpr (Config::kScale128x128) {
        if (is_second) {
          const float2 of_block = scales.next(params.scale_b, k_block, k_blocks);
          if (lane == 0) {
            shared.scales[stage].blocks = of_block;
            mbarrier_arrive(&shared.full[stage]);
          }
        }
      }
      __syncwarp();

      const int first_byte =
          piece + (!Config::kKGrouped ? k_block * kSwizzleBytes : tile.row * item);
      const int row_bytes = (!Config::kKGrouped ? shape.K : shape.rows) * item;
      const bool in_row = first_byte < row_bytes;
      const uint8_t* source = rows.source + (in_row ? first_byte : 0);
      const uint32_t to = smem_address(shared.stages[stage].a) + line;
      // K-grouped: of the rows lane_row, lane_row + kRowsAtOnce ..., so many are copied; others are
      // zeros.
      const int copied = in_row ? end - first_row(k_block) - lane_row : 0;
#pragma unroll
      for (int i = 0; i < Tile::kCopies; ++i) {
        const int r = i * Tile::kRowsAtOnce;
        const uint32_t offset = Config::kKGrouped ? row_of_copy(i) * rows.row_pieces : offsets[i];
        cp_async_16<true>(to + r * kSwizzleBytes + place_of(r), source + uint64_t{offset} * 16,
                          Config::kKGrouped ? r < copied : in_row);
      }
      if constexpr (Config::kScale128x128) {  // to where TMA puts those of consecutive rows
        float* of_rows =
            &shared.scales[stage].rows[tile.row % kRowScaleAlignment + warp_row + lane];
        const float* source_scales = rows.scales + k_block * rows.scale_stride;
#pragma unroll
        for (int i = 0; i < Tile::kRowsOfLane; ++i)
          cp_async_4(smem_address(of_rows + 32 * i), source_scales + row[i]);
      }
      cp_async_arrive(&shared.full[stage]);
      if (schedules && k_block == 0) scheduler.publish_before(number + 1 + Config::kTilesAhead);
    }
    // Those of a tile after the next one could not be asked for.
    asked = max(0, min(Tile::kAsked - 1, next.k_blocks));
    k_block_number += k_blocks;
  }
}

template <typename Config>
using ProducerOf = std::conditional_t<
    Config::kGathersRows, GatherProducer,
    std::conditional_t<Config::kLowRank, LowRankProducer,
                       std::conditional_t<Config::kSwapped, SwappedProducer, TmaProducer>>>;

}  // namespace grouped_linear::cuda::sm90
