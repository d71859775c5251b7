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

// A lane's copies of the rows that a gathers, and the numbers of these rows. M-grouped, a lane
// copies the same rows in every k-block of a tile, and reads their numbers during the tile before.
// K-grouped, each k-block has rows of its own.
template <typename Config>
class RowGatherer {
  using Tile = GatheredTile<Config>;
  static constexpr bool kKGrouped = Config::kKGrouped;

 public:
  // Beside the class: stores to an array next to its pointers cost loads of them (nvcc 13.0).
  struct Rows {
    int numbers[Tile::kRowsOfLane];
    int64_t next_numbers[kKGrouped ? 1 : Tile::kRowsOfLane];  // M-grouped: of the next tile
    uint32_t offsets[kKGrouped ? 1 : Tile::kCopies];          // M-grouped: in pieces of 16 bytes
  };

  __device__ RowGatherer(SharedStorage<Config>& shared, const GatheredRows& rows,
                         const GemmShape& shape)
      : shared_(shared), source_(rows), shape_(shape) {}

  __device__ __forceinline__ void begin(const WorkTile& tile, const WorkTile& next, int number,
                                        Rows& rows) {
    k_blocks_ = tile.k_blocks;
    end_ = kKGrouped ? tile.k_begin + tile.k_count : shape_.T;
    if constexpr (kKGrouped) {
#pragma unroll 1
      for (; asked_ < Tile::kAsked - 1; ++asked_) ask(tile, next, asked_);
    } else {
      const auto read = [&](int first) {  // of row 0 on where there is no next tile
#pragma unroll
        for (int i = 0; i < Tile::kRowsOfLane; ++i)
          rows.next_numbers[i] = source_.numbers.raw(min(first + lane_ + 32 * i, end_ - 1));
      };
      if (number == 0) read(first_row(tile, 0));
#pragma unroll
      for (int i = 0; i < Tile::kRowsOfLane; ++i)
        rows.numbers[i] = source_.numbers.clamped(rows.next_numbers[i]);
      read(first_row(next, 0));
    }
  }
  // M-grouped, after begin().
  __device__ __forceinline__ void find_offsets(Rows& rows) const {
    if constexpr (!kKGrouped) {
#pragma unroll
      for (int i = 0; i < Tile::kCopies; ++i) rows.offsets[i] = offset_of_copy(rows, i);
    }
  }

  // Before the copies of a k-block.
  __device__ __forceinline__ void find_numbers(const WorkTile& tile, const WorkTile& next,
                                               int k_block, Rows& rows) const {
    if constexpr (kKGrouped) {
      ask(tile, next, k_block + Tile::kAsked - 1);
      cp_async_wait<Tile::kAsked - 1>();
      // Past the group's end it may be anything: such a row is not copied.
      const int64_t number = slot_of(k_block);
      rows.numbers[0] =
          source_.numbers.clamped(source_.numbers.wide ? number : static_cast<int32_t>(number));
    }
  }
  __device__ __forceinline__ void copy(const WorkTile& tile, int stage, int k_block,
                                       const Rows& rows) const {
    constexpr int item = sizeof(typename Config::A);
    const int first_byte = piece_ + (!kKGrouped ? k_block * kSwizzleBytes : tile.row * item);
    const int row_bytes = (!kKGrouped ? shape_.K : shape_.rows) * item;
    const bool in_row = first_byte < row_bytes;
    const uint8_t* source = source_.source + (in_row ? first_byte : 0);
    const uint32_t to = smem_address(shared_.stages[stage].a) + line_;
    // K-grouped: rows that are copied, counted from this lane's first; others are zeros.
    const int copied = in_row ? end_ - first_row(tile, k_block) - lane_row_ : 0;
#pragma unroll
    for (int i = 0; i < Tile::kCopies; ++i) {
      const int r = i * Tile::kRowsAtOnce;
      const uint32_t offset = kKGrouped ? offset_of_copy(rows, i) : rows.offsets[i];
      const int place = ((lane_ % 8) ^ (lane_row_ % 8) ^ (r % 8)) * 16;
      cp_async_16<true>(to + r * kSwizzleBytes + place, source + uint64_t{offset} * 16,
                        kKGrouped ? r < copied : in_row);
    }
    if constexpr (Config::kScale128x128) {  // to where TMA puts those of consecutive rows
      float* of_rows =
          &shared_.scales[stage].rows[tile.row % kRowScaleAlignment + warp_row_ + lane_];
      const float* source_scales = source_.scales + k_block * source_.scale_stride;
#pragma unroll
      for (int i = 0; i < Tile::kRowsOfLane; ++i)
        cp_async_4(smem_address(of_rows + 32 * i), source_scales + rows.numbers[i]);
    }
    cp_async_arrive(&shared_.full[stage]);
  }
  // Those of a tile after the next one could not be asked for.
  __device__ __forceinline__ void end(const WorkTile& next) {
    asked_ = max(0, min(Tile::kAsked - 1, next.k_blocks));
    k_block_number_ += k_blocks_;
  }

 private:
  __device__ __forceinline__ int first_row(const WorkTile& tile, int k_block) const {
    return warp_row_ + (kKGrouped ? tile.k_begin + k_block * Tile::kRows : tile.row);
  }
  __device__ __forceinline__ uint32_t offset_of_copy(const Rows& rows, int i) const {
    const int r = i * Tile::kRowsAtOnce;
    return __shfl_sync(0xffffffff, rows.numbers[r / 32], r % 32 + lane_row_) * source_.row_pieces;
  }
  // Where the number of this lane's row of a k-block is. K-blocks count from this tile's first one
  // into the next tile.
  __device__ __forceinline__ int64_t& slot_of(int k_block) const {
    return shared_.row_numbers[(k_block_number_ + k_block) % Tile::kAsked]
                              [warp_row_ + lane_ % Tile::kRowsOfWarp];
  }
  // Asks for the numbers of a k-block. A group of copies each, so that a lane can wait for one.
  __device__ __forceinline__ void ask(const WorkTile& tile, const WorkTile& next,
                                      int k_block) const {
    const bool in_next = k_block >= k_blocks_;
    const WorkTile& of = in_next ? next : tile;
    const int block = in_next ? k_block - k_blocks_ : k_block;
    const int at = of.k_begin + block * Tile::kRows + warp_row_ + lane_;
    if (lane_ < Tile::kRowsOfWarp && block < of.k_blocks && at < of.k_begin + of.k_count) {
      const uint32_t to = smem_address(&slot_of(k_block));
      if (source_.numbers.wide)
        cp_async_8(to, static_cast<const int64_t*>(source_.numbers.numbers) + at);
      else
        cp_async_4(to, static_cast<const int32_t*>(source_.numbers.numbers) + at);
    }
    cp_async_commit();
  }

  SharedStorage<Config>& shared_;
  const GatheredRows& source_;
  const GemmShape& shape_;
  const int lane_ = threadIdx.x % 32, lane_row_ = lane_ / Tile::kLanesOfRow;
  const int warp_row_ = threadIdx.x >= 32 ? Tile::kRowsOfWarp : 0;
  // Where a lane's pieces start in a source row, and in the stage: lines of 128 bytes, columns of
  // 64 elements one after another. Their places in a line repeat after eight rows.
  const int piece_ = lane_ % Tile::kLanesOfRow * 16;
  const int line_ =
      (lane_ % Tile::kLanesOfRow / 8 * Tile::kRows + warp_row_ + lane_row_) * kSwizzleBytes;
  int k_blocks_, end_;  // of the tile; of the group's rows
  // K-grouped: k-blocks of this tile whose numbers are on their way or there; of all tiles before.
  int asked_ = 0;
  uint32_t k_block_number_ = 0;
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
  const TensorMaps& maps = params.maps;
  const GemmShape& shape = params.shape;
  const int lane = threadIdx.x % 32;
  const bool is_second = threadIdx.x >= 32;
  RowGatherer<Config> gatherer(shared, params.producer, shape);

  Scheduler<Config> scheduler(shared, params);
  constexpr Roles roles = Config::kRoles;
  constexpr bool may_schedule = roles.schedules(Role::kProducer);
  const bool schedules = may_schedule && shared.rank == 0 && threadIdx.x == 32 * roles.scheduler;
  if (schedules) scheduler.begin();
  PipelineState<Config::kStages> state;
  BlockScales<Config> scales;
  typename RowGatherer<Config>::Rows rows;
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
    gatherer.begin(tile, next, number, rows);
    if (Config::kScale128x128 && is_second) scales.begin(params.scale_b, tile, shape);
    gatherer.find_offsets(rows);
#pragma unroll 1
    for (int k_block = 0; k_block < k_blocks; ++k_block, state.advance()) {
      const int stage = state.stage;
      gatherer.find_numbers(tile, next, k_block, rows);
      mbarrier_wait(&shared.empty[stage], state.phase ^ 1);
      if (!is_second && elect_one()) {
        if (!Config::kKGrouped || has_all_columns)
          load_b<Config>(shared, maps, tile, stage, k_block);
        else
          load_end_of_b<Config>(shared, maps, tile, stage, k_block, shape.cols);
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
      gatherer.copy(tile, stage, k_block, rows);
      if (schedules && k_block == 0) scheduler.publish_before(number + 1 + Config::kTilesAhead);
    }
    gatherer.end(next);
  }
}

template <typename Config>
using ProducerOf = std::conditional_t<
    Config::kGathersRows, GatherProducer,
    std::conditional_t<Config::kLowRank, LowRankProducer,
                       std::conditional_t<Config::kSwapped, SwappedProducer, TmaProducer>>>;

}  // namespace grouped_linear::cuda::sm90
