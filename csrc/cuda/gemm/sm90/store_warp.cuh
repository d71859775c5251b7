// SPDX-License-Identifier: Apache-2.0
// The store warp of LinearEpilogue: one thread a warpgroup writes what the math warps put into the
// epilogue's buffers to the output, with TMA, while they compute the next tile.
//
// A math warp that stored its own part would wait for TMA: 1100 to 1400 cycles a tile of 128 x 256
// in 16 bits and 250 to 450 one of 128 x 192 in FP8, during which it issues no wgmma (H200,
// 2026-11).
#pragma once

#include "cuda/gemm/sm90/epilogue.cuh"
#include "cuda/gemm/sm90/scheduler.cuh"
#include "cuda/gemm/sm90/zero_fill.cuh"

namespace grouped_linear::cuda::sm90 {

// Columns of out in a line of 128 bytes.
__host__ __device__ __forceinline__ int line_cols_of(const EpilogueArguments& epilogue) {
  return kSwizzleBytes / (epilogue.type == OutputType::kFloat ? 4 : 2);
}

// Whether one copy takes all lines of a subtile's rows, where rows consist of whole lines.
// Otherwise a copy takes one line, which ends with the row. See out_map in launch.h.
template <typename Config>
__host__ __device__ __forceinline__ bool stores_whole_rows(const EpilogueArguments& epilogue,
                                                           int cols) {
  return Config::kEpilogueRows < kWgmmaM && cols % line_cols_of(epilogue) == 0;
}

// A subtile of a warpgroup's part of a tile: lines of 128 bytes in the epilogue's buffers, and where
// they are in the output.
template <typename Config, bool whole_rows>
struct Subtile {
  static constexpr bool kTransposed = Config::kTransposed;
  static constexpr int kBuffers = Config::kEpilogueBuffers, kAtOnce = whole_rows ? kBuffers : 1;
  static constexpr int kParts = Config::kWarpgroupRows / Config::kEpilogueRows;

  uint8_t (&buffers)[kParts][kBuffers][Config::kEpilogueRows * kSwizzleBytes];
  const CUtensorMap& map;
  const RaggedRows& rows;
  int number, subtiles, line_cols;
  int row, first;  // of the tile in the output, and the subtile's first column
  int used;        // lines of a row, none where there is nothing to store
  // Transposed, 64 rows of out have a buffer for each line of 128 bytes that this warpgroup's
  // columns take: two in float32.
  int more_lines = subtiles - 1;
  // The first line's number, for copies of whole rows. No division: copies follow one another
  // closely.
  int line = whole_rows ? first >> (subtiles == 1 ? 6 : 5) : 0;

  __device__ __forceinline__ int col_of(int i) const {
    return kTransposed ? row + (i & more_lines) * line_cols : first + i * line_cols;
  }
  __device__ __forceinline__ int row_of(int part, int i) const {
    return rows.c1 + (kTransposed ? ((number * kBuffers + i) >> more_lines) * kWgmmaM
                                  : part * Config::kEpilogueRows);
  }

  // Loads what the output has, to be added to.
  __device__ __forceinline__ void load(uint64_t* loaded) const {
    const int lines = whole_rows && used > 0 ? kBuffers : max(used, 0);
    mbarrier_arrive_expect_tx(loaded, lines * kWgmmaM * kSwizzleBytes);
#pragma unroll 1
    for (int part = 0; part < kParts; ++part) {
#pragma unroll 1
      for (int i = 0; i < used; i += kAtOnce) {
        uint8_t* to = buffers[part][i];
        const int col = col_of(i), row = row_of(part, i);
        if constexpr (whole_rows)
          tma_load_5d(to, &map, loaded, 0, row, line, rows.c2, rows.kOrigin);
        else
          tma_load_4d(to, &map, loaded, 0, col, row, rows.c2, rows.kOrigin);
      }
    }
  }

  __device__ __forceinline__ void store(bool adds) const {
#pragma unroll 1
    for (int part = 0; part < kParts; ++part) {
#pragma unroll
      for (int i = 0; i < kBuffers; i += kAtOnce) {
        if (i >= used) break;
        const uint8_t* from = buffers[part][i];
        const int col = col_of(i), row = row_of(part, i);
        if constexpr (whole_rows) {
          if (adds)
            tma_reduce_add_5d(&map, from, 0, row, line, rows.c2, rows.kOrigin);
          else
            tma_store_5d(&map, from, 0, row, line, rows.c2, rows.kOrigin);
        } else if (adds) {
          tma_reduce_add_4d(&map, from, col, row, rows.c2, rows.kOrigin);
        } else {
          tma_store_4d(&map, from, col, row, rows.c2, rows.kOrigin);
        }
      }
    }
    bulk_commit();
    bulk_wait_read<0>();
  }
};

// Where the output is added to: its first subtile is loaded into the buffers and added there by the
// math warps, while wgmma runs; a second subtile (of float32) is added by L2. L2 alone adds some
// 300 float32 a nanosecond, and makes loads of operands wait (H200, 2026-11).
template <typename Config, bool whole_rows, typename Params>
__device__ void store_tiles(SharedStorage<Config>& shared, const Params& params,
                            Scheduler<Config>& scheduler, int warpgroup) {
  const CUtensorMap& map = params.maps.out;
  const EpilogueArguments& epilogue = params.epilogue;
  const GemmShape& shape = params.shape;
  const int subtiles = LinearEpilogue::subtiles(epilogue);
  const int line_cols = line_cols_of(epilogue);
  const bool adds = Config::kAdds && !overwrites(epilogue);
  uint64_t *full = &shared.epilogue_full[warpgroup], *empty = &shared.epilogue_empty[warpgroup];
  ZeroFill<Config> zero_fill(shared, epilogue, shape);
  constexpr Roles roles = Config::kRoles;
  constexpr bool may_zero = roles.zeroes(Role::kStore),
                 may_schedule = roles.schedules(Role::kStore);
  const bool zeroes = may_zero && warpgroup + 2 == roles.zeros;
  if (zeroes) zero_fill.begin();
  const bool schedules = may_schedule && warpgroup + 2 == roles.scheduler && shared.rank == 0;
  if (schedules) scheduler.begin();
  uint32_t phase = 0;
  const auto wait_for_results = [&] {
    while (zeroes && zero_fill.remaining() && !mbarrier_test(full, phase)) zero_fill.step();
    mbarrier_wait(full, phase);
    phase ^= 1;
  };
  for (int number = 0;; ++number) {
    WorkTile tile;
    if (!adds) mbarrier_arrive(empty);
    if (schedules) scheduler.publish_before(number + Config::kTilesAhead);
    if (adds) {
      tile = wait_for_tile(shared, number);
    } else {
      wait_for_results();
      tile = shared.tiles[number % kTileSlots];
    }
    // All groups' matrices are one matrix, one below the other.
    constexpr bool transposed = Config::kTransposed;
    const int out_rows = transposed ? shape.cols : shape.rows;
    const int before = Config::kKGrouped ? tile.group * out_rows : 0;
    const int row = tile.row + (Config::kSwapped ? 0 : warpgroup * kWgmmaM);
    const RaggedRows rows(before + (transposed ? tile.col : row),
                          before + (transposed ? out_rows : tile.row_end));
    const bool nothing = !epilogue.aligned || row >= tile.row_end || tile.destination_slot() > 0 ||
                         tile.k_blocks < 0 || (tile.k_blocks == 0 && adds) ||
                         (transposed && tile.col >= shape.cols);
    const int end = nothing ? 0 : shape.cols;  // of the columns to store
    for (int subtile = 0; subtile < subtiles; ++subtile) {
      constexpr int buffers = Config::kEpilogueBuffers;
      const int first =
          tile.col + (Config::kSwapped ? warpgroup * kWgmmaM : subtile * buffers * line_cols);
      const int used = !transposed ? min((end - first + line_cols - 1) / line_cols, buffers)
                       : nothing   ? 0
                                   : buffers;
      const Subtile<Config, whole_rows> lines{
          shared.epilogue[warpgroup], map, rows, subtile, subtiles, line_cols, row, first, used};
      if (adds && subtile == 0)
        lines.load(empty);
      else if (subtile > 0)
        mbarrier_arrive(empty);
      if (adds || subtile > 0) wait_for_results();
      if (tile.k_blocks < 0) break;
      lines.store(adds && subtile > 0);
    }
    if (tile.k_blocks < 0) break;
  }
  if (zeroes) zero_fill.finish();
  bulk_wait_read<0>();
}

template <typename Config, typename Params>
__device__ void LinearEpilogue::run_store_warp(SharedStorage<Config>& shared, const Params& params,
                                               int warp) {
  Scheduler<Config> scheduler(shared, params);
  if (stores_whole_rows<Config>(params.epilogue, params.shape.cols))
    store_tiles<Config, true>(shared, params, scheduler, warp - 2);
  else
    store_tiles<Config, false>(shared, params, scheduler, warp - 2);
}

}  // namespace grouped_linear::cuda::sm90
