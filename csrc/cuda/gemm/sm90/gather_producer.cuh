// The producer of a GEMM that gathers rows: a warp that copies the rows of one operand, while TMA
// loads the other.
//
// TMA has no instruction on Hopper that loads rows by number: one line of 128 bytes at a time it
// issues every 9 cycles at best, from eight warps (H100, 2026-11), and a stage has 128 lines. So
// each thread copies pieces of 16 bytes with cp.async, to where TMA's swizzle would have put them,
// and the math warps notice no difference.
//
// Bytes: every block gathers its own tile. The blocks of a cluster share the other operand's.
#pragma once

#include "cuda/common/row_numbers.cuh"
#include "cuda/gemm/sm90/producer.cuh"

namespace grouped_linear::cuda::sm90 {

enum class Operand { kA, kB };

// A dense matrix whose rows an operand gathers.
struct GatheredRows {
  RowNumbers numbers;
  const uint8_t* source;
  uint32_t row_bytes;  // from row to row
  const float* scales;  // FP8: of row r and scale block j, scales[j * scale_stride + r]
  int64_t scale_stride;
};

// source + row * row_bytes, in one instruction.
__device__ __forceinline__ const void* row_address(const void* source, int row,
                                                   uint32_t row_bytes) {
  const void* address;
  asm("mad.wide.u32 %0, %1, %2, %3;" : "=l"(address) : "r"(row), "r"(row_bytes), "l"(source));
  return address;
}

// How a warp copies the gathered rows of a stage: each instruction takes 32 pieces of 16 bytes.
template <typename Config, Operand operand>
struct GatheredTile {
  static constexpr bool kIsA = operand == Operand::kA;
  static_assert(kIsA || Config::kKGrouped, "b's rows are gathered in a K-grouped GEMM alone");
  static_assert(!Config::kKGrouped || !Config::kFp8,
                "a K-grouped FP8 GEMM reads the padded layout, which has no rows to gather");
  static_assert(kIsA || !Config::kSharesB, "every block gathers all of its own tile");

  // M-grouped: a tile's rows, of 128 bytes a stage. K-grouped: a k-block's rows, of all columns.
  static constexpr int kRows = Config::kKGrouped ? Config::kTileK : Config::kTileM;
  static constexpr int kLanesOfRow = !Config::kKGrouped ? 8 : (kIsA ? kTileM : Config::kTileN) / 8;
  static constexpr int kRowsAtOnce = 32 / kLanesOfRow;
  static constexpr int kCopies = kRows / kRowsAtOnce;
  static constexpr int kRowsOfLane = kRows / 32;  // whose numbers a lane knows
};

// Gathers a (M-grouped, and 16-bit K-grouped) or b (16-bit K-grouped). A K-grouped GEMM's rows past
// the end of a group are zeros.
//
// A stage is completed after the copies of the next one have been issued, so that two are on their
// way at any time. wgmma reads through the async proxy: each lane waits for its copies and fences
// before the warp arrives.
template <Operand operand>
struct GatherProducer {
  using Arguments = GatheredRows;
  static constexpr int kThreads = 32;
  static constexpr int kArrivals = 2;  // of the lane that uses TMA, and of the warp
  static constexpr int kRegisters = 72;

  template <typename Config>
  static __device__ void prefetch(const TensorMaps& maps) {
    TmaProducer::prefetch<Config>(maps);
  }

  template <typename Config>
  static __device__ void run(SharedStorage<Config>& shared, const TensorMaps& maps,
                             const Arguments& rows, const TileCounts& counts,
                             const GemmShape& shape);

 private:
  template <typename Config>
  static __device__ __forceinline__ void load_other(SharedStorage<Config>& shared,
                                                    const TensorMaps& maps, const WorkTile& tile,
                                                    int stage, int k_block);
};

// The operand that is not gathered, by TMA.
template <Operand operand>
template <typename Config>
__device__ __forceinline__ void GatherProducer<operand>::load_other(SharedStorage<Config>& shared,
                                                                    const TensorMaps& maps,
                                                                    const WorkTile& tile, int stage,
                                                                    int k_block) {
  constexpr uint16_t all = (1 << kClusterSize) - 1;
  const int rank = shared.rank;
  mbarrier_arrive_expect_tx(&shared.full[stage],
                            operand == Operand::kA ? Config::kBBytes : Config::kABytes);
  if constexpr (operand == Operand::kB) {
    TmaProducer::load_a<Config>(shared, maps, tile, stage, k_block, rank, all);
  } else if (Config::kSharesB && tile.shares_b()) {
    TmaProducer::load_b<Config>(shared, maps, tile, stage, k_block, rank, all);
  } else {
#pragma unroll
    for (int piece = 0; piece < Config::kBPieces; ++piece)
      TmaProducer::load_b<Config>(shared, maps, tile, stage, k_block, piece, 0);
  }
}

template <Operand operand>
template <typename Config>
__device__ void GatherProducer<operand>::run(SharedStorage<Config>& shared, const TensorMaps& maps,
                                             const Arguments& rows, const TileCounts& counts,
                                             const GemmShape& shape) {
  using Tile = GatheredTile<Config, operand>;
  constexpr int item = sizeof(typename Config::A), batch = 8;
  static_assert(Tile::kCopies % batch == 0);
  const int lane = threadIdx.x, lane_row = lane / Tile::kLanesOfRow;
  // Where a lane's pieces start in a source row, and in the stage: lines of 128 bytes, columns of
  // 64 elements one after another.
  const int piece = lane % Tile::kLanesOfRow * 16;
  const int line = (lane % Tile::kLanesOfRow / 8 * Tile::kRows + lane_row) * kSwizzleBytes;

  PipelineState<Config::kStages> state;
  int pending = -1;  // a stage whose copies are on their way
  const auto arrive = [&](int stage) {
    __syncwarp();
    if (lane == 0) mbarrier_arrive(&shared.full[stage]);
  };

  TileScheduler<Config> scheduler(shared, counts, shape);
  for (int number = 0;; ++number) {
    WorkTile& slot = shared.tiles[number % kTileSlots];
    if (elect_one()) {
      const WorkTile next = scheduler.next();
      mbarrier_wait(&shared.empty[state.stage], state.phase ^ 1);
      slot = next;
      if constexpr (Config::kKGrouped) mbarrier_arrive(&shared.tile_begun);
    }
    __syncwarp();
    const WorkTile& tile = slot;

    // The numbers of a lane's rows, K-grouped in one k-block. They are read long before their first
    // use, which is where a lane waits for them.
    int64_t numbers[Tile::kRowsOfLane];
    const int end = Config::kKGrouped ? tile.k_begin + tile.k_count : shape.T;
    const auto first_row = [&](int k_block) {
      return lane + (Config::kKGrouped ? tile.k_begin + k_block * Tile::kRows : tile.row);
    };
    const auto read_numbers = [&](int k_block) {
#pragma unroll
      for (int i = 0; i < Tile::kRowsOfLane; ++i)
        numbers[i] = rows.numbers.raw(min(first_row(k_block) + 32 * i, end - 1));
    };
    if (tile.k_blocks > 0) read_numbers(0);
    if (pending >= 0) {
      cp_async_wait<0>();
      fence_proxy_async();
      arrive(pending);
      pending = -1;
    }
    if (tile.k_blocks <= 0) {
      if (elect_one()) mbarrier_arrive(&shared.full[state.stage]);
      arrive(state.stage);
      if (tile.k_blocks < 0) return;
      state.advance();
    }

#pragma unroll 1
    for (int k_block = 0; k_block < tile.k_blocks; ++k_block, state.advance()) {
      const int stage = state.stage;
      int row[Tile::kRowsOfLane];
#pragma unroll
      for (int i = 0; i < Tile::kRowsOfLane; ++i) row[i] = rows.numbers.clamped(numbers[i]);
      if (Config::kKGrouped) read_numbers(k_block + 1);
      mbarrier_wait(&shared.empty[stage], state.phase ^ 1);
      if (elect_one()) load_other<Config>(shared, maps, tile, stage, k_block);
      __syncwarp();

      const int first_byte =
          piece + (!Config::kKGrouped ? k_block * kSwizzleBytes
                                      : (Tile::kIsA ? tile.row : tile.col) * item);
      const int row_bytes =
          (!Config::kKGrouped ? shape.K : (Tile::kIsA ? shape.rows : shape.cols)) * item;
      const bool in_row = first_byte < row_bytes;
      const uint8_t* source = rows.source + (in_row ? first_byte : 0);
      // Of the rows lane_row, lane_row + kRowsAtOnce ..., so many are copied; others are zeros.
      const int copied = !in_row            ? 0
                         : Config::kKGrouped ? end - first_row(k_block) + lane - lane_row
                                             : Tile::kRows;
      const uint32_t to =
          smem_address(Tile::kIsA ? shared.stages[stage].a : shared.stages[stage].b) + line;
#pragma unroll
      for (int first = 0; first < Tile::kCopies; first += batch) {
        int from[batch];
#pragma unroll
        for (int i = 0; i < batch; ++i) {
          const int r = (first + i) * Tile::kRowsAtOnce;
          from[i] = __shfl_sync(0xffffffff, row[r / 32], r % 32 + lane_row);
        }
#pragma unroll
        for (int i = 0; i < batch; ++i) {
          const int r = (first + i) * Tile::kRowsAtOnce;
          const int chunk = (lane % 8) ^ (lane_row % 8) ^ (r % 8);
          cp_async_16(to + r * kSwizzleBytes + chunk * 16,
                      row_address(source, from[i], rows.row_bytes), r < copied);
        }
      }
      if constexpr (Config::kScale128x128) {  // to where TMA puts those of consecutive rows
        float* scales = &shared.scales[stage].rows[tile.row % kRowScaleAlignment + lane];
        const float* source_scales = rows.scales + k_block * rows.scale_stride;
#pragma unroll
        for (int i = 0; i < Tile::kRowsOfLane; ++i)
          cp_async_4(smem_address(scales + 32 * i), source_scales + row[i]);
      }
      cp_async_commit();
      if (pending >= 0) {
        cp_async_wait<1>();
        fence_proxy_async();
        arrive(pending);
      }
      pending = stage;
    }
  }
}

}  // namespace grouped_linear::cuda::sm90
