// The producer of a GEMM that gathers rows: two warps that copy the rows of one operand, while TMA
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

// A dense matrix whose rows an operand gathers.
struct GatheredRows {
  RowNumbers numbers;
  const uint8_t* source;
  uint32_t row_pieces;  // from row to row, in pieces of 16 bytes
  const float* scales;  // FP8: of row r and scale block j, scales[j * scale_stride + r]
  int64_t scale_stride;
};

// How two warps copy the gathered rows of a stage: each takes one half of them, 32 pieces of 16
// bytes an instruction.
template <typename Config, Operand operand>
struct GatheredTile {
  static constexpr bool kIsA = operand == Operand::kA;
  static_assert(kIsA || Config::kKGrouped, "b's rows are gathered in a K-grouped GEMM alone");
  static_assert(!Config::kKGrouped || !Config::kFp8,
                "a K-grouped FP8 GEMM reads the padded layout, which has no rows to gather");
  static_assert(kIsA || !Config::kSharesB, "every block gathers all of its own tile");

  // M-grouped: a tile's rows, of 128 bytes a stage. K-grouped: a k-block's rows, of all columns.
  static constexpr int kRows = Config::kKGrouped ? Config::kTileK : Config::kTileM;
  static constexpr int kRowsOfWarp = kRows / 2;
  static constexpr int kLanesOfRow = !Config::kKGrouped ? 8 : (kIsA ? kTileM : Config::kTileN) / 8;
  static constexpr int kRowsAtOnce = 32 / kLanesOfRow;
  static constexpr int kCopies = kRowsOfWarp / kRowsAtOnce;
  static constexpr int kRowsOfLane = kRowsOfWarp / 32;  // whose numbers a lane knows
};

// Gathers a (M-grouped, and 16-bit K-grouped) or b (16-bit K-grouped). A K-grouped GEMM's rows past
// the end of a group are zeros.
//
// A stage is full when the copies of every lane have arrived, which the mbarrier is told without a
// lane that waits for them. wgmma reads through the async proxy, so the math warps fence first.
//
// Warp 0 walks over the tiles and loads the other operand. Warp 1 loads b's block scales, and
// schedules a K-grouped GEMM's tiles.
template <Operand operand>
struct GatherProducer {
  using Arguments = GatheredRows;
  static constexpr int kThreads = 64;
  static constexpr int kArrivals = 1 + kThreads;  // of the lane that uses TMA, and of every lane
  static constexpr int kRegisters = 72;

  template <typename Config>
  static __device__ void prefetch(const TensorMaps& maps) {
    TmaProducer::prefetch<Config>(maps);
  }

  template <typename Config>
  static __device__ void run(SharedStorage<Config>& shared, const TensorMaps& maps,
                             const Arguments& rows, const Scale128x128View& scale_b,
                             const SplitKWorkspace& workspace, const TileCounts& counts,
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
                                             const Arguments& rows, const Scale128x128View& scale_b,
                                             const SplitKWorkspace& workspace,
                                             const TileCounts& counts, const GemmShape& shape) {
  using Tile = GatheredTile<Config, operand>;
  constexpr int item = sizeof(typename Config::A);
  const int lane = threadIdx.x % 32, lane_row = lane / Tile::kLanesOfRow;
  const bool is_second = threadIdx.x >= 32;
  const int warp_row = is_second ? Tile::kRowsOfWarp : 0;
  // Where a lane's pieces start in a source row, and in the stage: lines of 128 bytes, columns of
  // 64 elements one after another. Their places in a line repeat after eight rows.
  const int piece = lane % Tile::kLanesOfRow * 16;
  const int line =
      (lane % Tile::kLanesOfRow / 8 * Tile::kRows + warp_row + lane_row) * kSwizzleBytes;
  const auto place_of = [&](int r) { return ((lane % 8) ^ (lane_row % 8) ^ (r % 8)) * 16; };

  PipelineState<Config::kStages> state;
  AtomicScheduler<Config> dynamic(shared, workspace.tile_counter);
  if (Config::kKGrouped && is_second && lane == 0) dynamic.begin(counts);
  TileScheduler<Config> scheduler(shared, counts, shape);
  BlockScales<Config> scales;
  for (int number = 0;; ++number) {
    WorkTile& slot = shared.tiles[number % kTileSlots];
    if (threadIdx.x == 0) {
      const WorkTile next = scheduler.next();
      mbarrier_wait(&shared.empty[state.stage], state.phase ^ 1);
      slot = next;
    }
    __syncwarp();  // the barrier is for whole warps, and thread 0 comes later
    named_barrier_sync<1, kThreads>();
    const WorkTile& tile = slot;
    bool publishes = false;
    if (Config::kKGrouped && is_second && lane == 0) {
      publishes = dynamic.more() && tile.k_blocks >= 0;
      if (publishes) dynamic.draw();
    }
    const auto publish = [&] {
      if (Config::kKGrouped && publishes) dynamic.publish();
      publishes = false;
    };

    // The numbers of a lane's rows, K-grouped in one k-block. They are read long before their first
    // use, which is where a lane waits for them.
    int64_t numbers[Tile::kRowsOfLane];
    const int end = Config::kKGrouped ? tile.k_begin + tile.k_count : shape.T;
    const auto first_row = [&](int k_block) {
      return warp_row + (Config::kKGrouped ? tile.k_begin + k_block * Tile::kRows : tile.row);
    };
    const auto read_numbers = [&](int k_block) {
#pragma unroll
      for (int i = 0; i < Tile::kRowsOfLane; ++i)
        numbers[i] = rows.numbers.raw(min(first_row(k_block) + lane + 32 * i, end - 1));
    };
    if (tile.k_blocks > 0) read_numbers(0);
    if (tile.k_blocks <= 0) {
      publish();
      uint64_t* full = &shared.full[state.stage];
      if (lane == 0 && (!is_second || Config::kScale128x128)) mbarrier_arrive(full);
      mbarrier_arrive(full);
      if (tile.k_blocks < 0) return;
      state.advance();
      continue;
    }
    if (Config::kScale128x128 && is_second) scales.begin(scale_b, tile, shape);

    // M-grouped: of the rows that this lane copies in every k-block.
    uint32_t offsets[Config::kKGrouped ? 1 : Tile::kCopies];  // in pieces of 16 bytes
    int row[Tile::kRowsOfLane] = {};
    const auto row_of_copy = [&](int i) {
      const int r = i * Tile::kRowsAtOnce;
      return __shfl_sync(0xffffffff, row[r / 32], r % 32 + lane_row);
    };
    const auto clamp_numbers = [&] {
#pragma unroll
      for (int i = 0; i < Tile::kRowsOfLane; ++i) row[i] = rows.numbers.clamped(numbers[i]);
    };
    if constexpr (!Config::kKGrouped) {
      clamp_numbers();
#pragma unroll
      for (int i = 0; i < Tile::kCopies; ++i) offsets[i] = row_of_copy(i) * rows.row_pieces;
    }

#pragma unroll 1
    for (int k_block = 0; k_block < tile.k_blocks; ++k_block, state.advance()) {
      const int stage = state.stage;
      if constexpr (Config::kKGrouped) {
        clamp_numbers();
        read_numbers(k_block + 1);
      }
      mbarrier_wait(&shared.empty[stage], state.phase ^ 1);
      if (!is_second && elect_one()) load_other<Config>(shared, maps, tile, stage, k_block);
      if constexpr (Config::kScale128x128) {
        if (is_second) {
          const float2 of_block = scales.next(scale_b, k_block, tile.k_blocks);
          if (lane == 0) {
            shared.scales[stage].blocks = of_block;
            mbarrier_arrive(&shared.full[stage]);
          }
        }
      }
      __syncwarp();

      const int first_byte =
          piece + (!Config::kKGrouped ? k_block * kSwizzleBytes
                                      : (Tile::kIsA ? tile.row : tile.col) * item);
      const int row_bytes =
          (!Config::kKGrouped ? shape.K : (Tile::kIsA ? shape.rows : shape.cols)) * item;
      const bool in_row = first_byte < row_bytes;
      const uint8_t* source = rows.source + (in_row ? first_byte : 0);
      const uint32_t to =
          smem_address(Tile::kIsA ? shared.stages[stage].a : shared.stages[stage].b) + line;
      // K-grouped: of the rows lane_row, lane_row + kRowsAtOnce ..., so many are copied; others are
      // zeros.
      const int copied = in_row ? end - first_row(k_block) - lane_row : 0;
#pragma unroll
      for (int i = 0; i < Tile::kCopies; ++i) {
        const int r = i * Tile::kRowsAtOnce;
        const uint32_t offset = Config::kKGrouped ? row_of_copy(i) * rows.row_pieces : offsets[i];
        cp_async_16(to + r * kSwizzleBytes + place_of(r), source + uint64_t{offset} * 16,
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
      publish();
    }
  }
}

}  // namespace grouped_linear::cuda::sm90
