// SPDX-License-Identifier: Apache-2.0
// Which output tile a number stands for. It is tied to no architecture: a Config gives the tile's
// shape.
//
// Numbers count pairs of neighbouring tiles (one pair a cluster on sm_90). As long as a group has
// two more row tiles, a pair lies one below the other and shares b's tile. The tiles of a last odd
// row lie beside one another and share a's tile. So do all tiles of a Config without kMulticastB,
// but for a single column of them with Config::kLoneColumnAlongM.
#pragma once

#include <cstdint>

#include "cuda/common/groups.cuh"
#include "cuda/gemm/kernel_arguments.h"

namespace grouped_linear::cuda {

constexpr int kBandPairs = 8;  // pairs of row tiles that share an operand while it is in L2
// At most so many units of K (Config::kUnitBlocks k-blocks each), writing an output tile of a
// K-grouped GEMM costs much beside computing it.
constexpr int kShortK = 16;

// Division by a number that the host knows: a multiplication instead of 25 instructions on the way
// to the next tile.
struct Divisor {
  uint32_t divisor = 1, inverse = ~uint32_t{0};

  Divisor() = default;
  explicit Divisor(int number) : divisor(number), inverse(~uint32_t{0} / divisor) {}

  // Returns number / divisor and leaves number % divisor in it, for numbers from 0 to 2^31 - 1.
  __device__ __forceinline__ int divide(int& number) const {
    const uint32_t n = number;
    uint32_t quotient = __umulhi(n, inverse), remainder = n - quotient * divisor;  // or one less
    if (remainder >= divisor) {
      ++quotient;
      remainder -= divisor;
    }
    number = static_cast<int>(remainder);
    return static_cast<int>(quotient);
  }
};

// The divisors for tiles of one width, see tile_of.
struct TileCounts {
  int col_tiles;
  Divisor matrix;                 // K-grouped: pairs of an output matrix
  Divisor band[2];                // pairs of a band of row tiles, and of a band of a single pair
  Divisor col_pairs;              // pairs of a row of tiles
  Divisor pairs[kBandPairs + 1];  // pairs of row tiles in a band
};

// One output tile of a block, and its k-blocks.
struct alignas(16) WorkTile {
  int group;
  int row, row_end;      // first row in the output matrix, and the first that is not stored
  int col;               // first column; past the last in a block that has nothing to do
  int k_blocks;          // -1: there are no more tiles
  int k_begin, k_count;  // K-grouped: the first row (16-bit) or padded block (FP8), and the rows
  // Bit 0: the cluster lies along M, one tile below the other (else side by side). A split-K slice
  // adds the partial sums of `source_count` workspace slots (bits 16 to 23) from slot `source_slot`
  // (8 to 15) on, or writes its sums to slot `destination_slot` (24 to 31). See split_k.cuh.
  uint32_t bits;

  static constexpr int kMaxSlots = 255;
  __device__ static uint32_t split_k_bits(int source, int count, int destination) {
    return source << 8 | count << 16 | destination << 24;
  }
  __device__ bool cluster_along_m() const { return bits & 1; }
  __device__ bool is_split_k() const { return bits > 1; }
  __device__ int source_slot() const { return bits >> 8 & kMaxSlots; }
  __device__ int source_count() const { return bits >> 16 & kMaxSlots; }
  __device__ int destination_slot() const { return bits >> 24; }
};
static_assert(sizeof(WorkTile) == 32,
              "a tile is copied to shared memory in two stores of 16 bytes");

// Swapped tiles (Config::kSwapped) count rows in units of 16: the tile's, or its group's.
constexpr int kSwappedUnit = 16;
__device__ __forceinline__ int swapped_units(const WorkTile& tile) {
  return (tile.row_end - tile.row + kSwappedUnit - 1) / kSwappedUnit;
}

template <typename Config>
__host__ __device__ __forceinline__ int row_tiles(int rows) {
  return (rows + Config::kTileM - 1) / Config::kTileM;
}

template <typename Config>
__host__ __device__ __forceinline__ int col_tiles(const GemmShape& shape) {
  return (shape.cols + Config::kTileN - 1) / Config::kTileN;
}

// Pairs of tiles one below the other, of `rows` row tiles in each of `cols` columns.
template <typename Config>
__host__ __device__ __forceinline__ int row_pairs(int rows, int cols) {
  return Config::kMulticastB || (Config::kLoneColumnAlongM && cols == 1) ? rows / 2 : 0;
}

// Pairs in a matrix of rows x cols tiles: pairs of rows, then pairs of columns in a last odd row.
template <typename Config>
__host__ __device__ __forceinline__ int tile_pairs(int rows, int cols) {
  const int pairs = row_pairs<Config>(rows, cols);
  return pairs * cols + (rows - 2 * pairs) * ((cols + 1) / 2);
}

// tile_end counts pairs of tiles (M-grouped) or blocks of the padded layout (K-grouped). By all
// threads of the block; ends with a barrier.
template <typename Config>
__device__ void build_group_table(GroupTable& groups, const int32_t* offs, const GemmShape& shape) {
  if constexpr (Config::kKGrouped) {
    load_groups<Config::kThreads>(groups, offs, shape.E, shape.T, TilesOf{Config::kPaddedBlock});
  } else {
    const int cols = col_tiles<Config>(shape);
    load_groups<Config::kThreads>(groups, offs, shape.E, shape.T, [cols](int rows) {
      return tile_pairs<Config>(row_tiles<Config>(rows), cols);
    });
  }
}

template <typename Config>
TileCounts tile_counts(const GemmShape& shape) {
  TileCounts counts{};
  counts.col_tiles = col_tiles<Config>(shape);
  if (Config::kKGrouped)
    counts.matrix = Divisor(tile_pairs<Config>(row_tiles<Config>(shape.rows), counts.col_tiles));
  counts.band[0] = Divisor(kBandPairs * counts.col_tiles);
  counts.band[1] = Divisor(counts.col_tiles);
  counts.col_pairs = Divisor((counts.col_tiles + 1) / 2);
  for (int pairs = 1; pairs <= kBandPairs; ++pairs) counts.pairs[pairs] = Divisor(pairs);
  return counts;
}

// Tile `rank` (0 or 1) of pair `number`. Row tiles run fastest, in bands, so that blocks that run
// together share both operands in L2. In a K-grouped GEMM with a short K they run slowest: what
// writes so much then goes through memory in order. active[e]: the group that the table
// has at e, K-grouped.
template <typename Config, typename Active>
__device__ __forceinline__ WorkTile tile_of(int number, int rank, const GroupTable& groups,
                                            const Active& active, const TileCounts& counts,
                                            const GemmShape& shape) {
  WorkTile tile{};
  int rows, rest;  // row tiles of the matrix; the pair's number in it
  if constexpr (Config::kKGrouped) {
    rows = row_tiles<Config>(shape.rows);
    rest = number;
    const int e = counts.matrix.divide(rest);
    tile.group = active[e];
    tile.row_end = shape.rows;
    tile.k_count = groups.row_end[e] - groups.row_begin(e);
    const int first_block = groups.tile_begin(e);
    const int last_block = min(groups.tile_end[e], shape.T / Config::kPaddedBlock);
    tile.k_begin = Config::kPadded ? first_block : groups.row_begin(e);
    tile.k_blocks = Config::kPadded ? max(last_block - first_block, 0)
                                    : (tile.k_count + Config::kTileK - 1) / Config::kTileK;
  } else {
    tile.group = groups.group_of_tile(number, shape.E);
    rest = number - groups.tile_begin(tile.group);
    tile.row = groups.row_begin(tile.group);
    tile.row_end = groups.row_end[tile.group];
    rows = row_tiles<Config>(tile.row_end - tile.row);
    tile.k_blocks = (shape.K + Config::kTileK - 1) / Config::kTileK;
  }
  if constexpr (Config::kSwapped) {
    // A group's units are shared out evenly among its row tiles.
    const int first = 2 * kBandPairs * counts.band[0].divide(rest);
    const int of_band = min(2 * kBandPairs, rows - first), row = first + rest % of_band;
    const int units = swapped_units(tile), each = units / rows, more = units % rows;
    tile.row += kSwappedUnit * (row * each + min(row, more));
    tile.row_end = min(tile.row_end, tile.row + kSwappedUnit * (each + (row < more)));
    tile.col = (2 * (rest / of_band) + rank) * Config::kTileN;
    return tile;
  }
  const int pairs = row_pairs<Config>(rows, counts.col_tiles);
  if (rest < pairs * counts.col_tiles) {
    const bool single = Config::kKGrouped && tile.k_blocks <= kShortK * Config::kUnitBlocks;
    const int band_pairs = single ? 1 : kBandPairs, band = counts.band[single].divide(rest);
    const int col = counts.pairs[min(band_pairs, pairs - band * band_pairs)].divide(rest);
    tile.row += (2 * (band * band_pairs + rest) + rank) * Config::kTileM;
    tile.col = col * Config::kTileN;
    tile.bits = 1;
  } else {
    rest -= pairs * counts.col_tiles;
    tile.row += (2 * pairs + counts.col_pairs.divide(rest)) * Config::kTileM;
    tile.col = (2 * rest + rank) * Config::kTileN;
  }
  return tile;
}

}  // namespace grouped_linear::cuda
