// What the parts of a grouped product share: its configuration, its shared memory, and which tile of
// the output a block works on next.
#pragma once

#include "cuda/common/groups.cuh"
#include "cuda/gemm/sm90/ptx.cuh"
#include "cuda/gemm/sm90/tiles.h"

namespace grouped_linear::cuda {

constexpr int kTileM = 128;
constexpr int kLineBytes = 128;  // one line of the 128-byte swizzle
constexpr int kMathWarps = 8, kMathGroups = kMathWarps / 4;
constexpr int kThreads = 128 + 32 * kMathWarps;
constexpr int kCluster = 2;
constexpr int kScaleRows = kTileM + 4;  // of a tile that starts anywhere, from an aligned row on
constexpr int kBandPairs = 8;   // pairs of row tiles that share an operand while it is in L2
constexpr int kFewSteps = 16;   // of a sum by depth whose results cost much beside its products
constexpr int kStoreRows = 64;  // a warpgroup's part of an output tile
constexpr int kZeroBytes = 4096;
// Tiles that are known at a time: one is sent to memory, one is staged for that, and every stage may
// hold a step of another.
constexpr int kTileRing = 8;
// Numbers of tiles that are handed out: what reads them in the other block of a cluster may be two rings of
// stages behind, and some tiles.
constexpr int kNumberRing = 16;

constexpr float kOwn = 0;  // in place of a square's scale: its columns have scales of their own

enum class Output : int { kBFloat16, kHalf, kFloat };

// How a tile's values reach `out`.
struct Epilogue {
  void* out;
  Output dtype;
  bool copied;                     // by the copy engine: out is aligned to 16 bytes
  const void* bias;                // [E, cols] of out's dtype, or null (by rows)
  int64_t bias_stride;             // elements between groups
  const float *scale_a, *scale_b;  // [E], of groups, where FP8 operands have such
  bool accumulate;                 // add to out (by depth)
  const bool* overwrite;           // with accumulate: where it points to true, write instead
};

struct GemmShape {
  int T, E;
  int rows, cols;  // of an output matrix: (T, N) by rows, (N, K) by depth
  int depth;       // K, by rows
};

// A number to divide by, found out on the host: with it a division is a product, and not 25 instructions
// on the way to the next tile.
struct Divisor {
  uint32_t divisor = 1, inverse = ~uint32_t{0};

  Divisor() = default;
  explicit Divisor(int number) : divisor(number), inverse(~uint32_t{0} / divisor) {}

  // The quotient of a number from 0 to 2^31 - 1, whose rest stays in it.
  __device__ __forceinline__ int take(int& number) const {
    const uint32_t n = number;
    uint32_t quotient = __umulhi(n, inverse), rest = n - quotient * divisor;  // or one less
    if (rest >= divisor) {
      ++quotient;
      rest -= divisor;
    }
    number = static_cast<int>(rest);
    return static_cast<int>(quotient);
  }
};

// How tiles of one width are counted, see tile_of.
struct TileCounts {
  int cols;
  Divisor matrix;                 // by depth: a matrix' clusters
  Divisor band[2];                // clusters of a band, and of one with a single pair
  Divisor col_pairs;              // clusters of a row of tiles
  Divisor pairs[kBandPairs + 1];  // of row tiles in a band
};

// b's scales of squares, by their strides: between groups, and between blocks of 128 of b's rows (the
// output's columns) and of the depth.
struct SquareScale {
  const float* scale;
  int64_t group_stride, row_stride, depth_stride;
};

struct TensorMaps {
  CUtensorMap a, b, scale_a, scale_b, out;
  CUtensorMap narrow_b;  // b in pieces of kNarrowCols, by rows
};

// Coordinates in a tensor map of rows that ends where it is told to, for groups that end anywhere.
//
// The map's dimensions are columns, rows (2^30 of them), rows again, and one whose stride is 2^34
// bytes less a row's. The coordinate 2^30 of the last moves an address by 2^64, which is nothing,
// and 2^30 rows back. Row r of those before `limit` is then at (2^30 - (limit - r), limit, 2^30):
// from `limit` on rows lie outside of the map, are not stored, and are loaded as zeros. Triton
// arranges its "ragged" tensor maps like this.
struct RaggedRows {
  static constexpr int kOrigin = 1 << 30;
  int c1, c2;
  __device__ RaggedRows(int row, int limit) : c1(kOrigin - (limit - row)), c2(limit) {}
};

// What shares a scale in FP8 operands: a group, or 128 of the depth of one row, in a always, in b too
// (kLines, by depth) or there of 128 rows (kSquares, by rows).
enum class Scaling { kNone, kGroups, kLines, kSquares };

template <typename A_, typename B_, int kTileN_, int kStages_, Scaling kScaling, bool kByDepth_,
          int kAMajor_ = 0, int kBMajor_ = 0>
struct GemmConfig {
  using Wide = GemmConfig;
  using A = A_;
  using B = B_;
  static constexpr int kTileN = kTileN_, kStages = kStages_;
  static constexpr bool kByDepth = kByDepth_, kFp8 = sizeof(A) == 1;
  static constexpr bool kGroups = kScaling == Scaling::kGroups;
  static constexpr bool kLines = kScaling == Scaling::kLines;
  static constexpr bool kSquares = kScaling == Scaling::kSquares;
  static constexpr bool kBlocks = kLines || kSquares;
  static_assert(!kBlocks || kLines == kByDepth);
  static constexpr int kAMajor = kAMajor_, kBMajor = kBMajor_;
  static constexpr int kTileK = kLineBytes / sizeof(A);  // 64 in BF16, 128 in FP8
  static constexpr int kMmaK = 32 / sizeof(A);
  static constexpr int kABytes = kTileM * kLineBytes, kBBytes = kTileN * kLineBytes;
  static constexpr int kBPieces = 2;  // that b's tile is copied in, one a block where it is shared
  static constexpr bool kNarrow = false;
  static constexpr int kRowScales = kByDepth ? kTileM : kScaleRows;  // of a stage
  // Rows of results that are sent together. A 16-bit product by depth, which is bound by writing where groups
  // are small, sends a warp's, all columns at once: what lies near is written at the same time.
  static constexpr int kStagedRows = kByDepth && !kFp8 ? 16 : kStoreRows;

  // Which of a thread's sums belongs to its product i. Products lie in pairs of registers, an even one and
  // the next. Where a sum comes to lie so too, FFMA waits for three operands from one register bank; there
  // it is kept in the other half of its pair (H200, 2026-11: 6% of an FP8 product where half of them wait).
  // Which these are is ptxas's choice: tests/test_machine_code.py looks.
  static __device__ constexpr int sum_of(int i) {
    return kSquares || (kLines && (i < 60 || i / 4 % 2 == 0)) ? i ^ 1 : i;
  }
};

// The same product in narrow tiles, which never share b.
template <typename Config>
struct NarrowOf : Config {
  using Wide = Config;
  static constexpr int kTileN = kNarrowCols, kBBytes = kTileN * kLineBytes;
  static constexpr int kStages = Config::kFp8 ? Config::kStages : 6;
  static constexpr int kBPieces = 1;
  static constexpr bool kNarrow = true;
};

// One output tile of this block, and the steps along its depth.
struct alignas(16) Tile {
  int group;
  int row, row_limit;     // first row in the output matrix, and the first not to be stored
  int col;                // first column; past the last in a block that has nothing to do
  int steps;              // -1: there are no more tiles
  int begin, depth_rows;  // by depth: the first row (16-bit) or block (FP8), so many rows
  // Bit 0: whether b's tile is shared with the other block of the cluster, else a's. A tile that is cut
  // takes the sums of other parts from `take_count` places (bits 16 to 23), from place `takes` (8 to 15)
  // on, or leaves its own in place `leaves` (24 to 31). There are as many places as clusters, 72 at
  // most on a GPU of the Hopper family. See gemm_schedule.cuh.
  uint32_t bits;

  __device__ static uint32_t bits_of_part(int takes, int count, int leaves) {
    return takes << 8 | count << 16 | leaves << 24;
  }
  __device__ bool shares_b() const { return bits & 1; }
  __device__ bool is_cut() const { return bits > 1; }
  __device__ int takes() const { return bits >> 8 & 255; }
  __device__ int take_count() const { return bits >> 16 & 255; }
  __device__ int leaves() const { return bits >> 24; }
};
static_assert(sizeof(Tile) == 32);

// The work of a cluster by depth: whole tiles, one of every round, then parts of tiles that are cut.
struct Schedule {
  int whole;          // so many tiles, of all clusters
  int parts;          // of this cluster
  int tile, stride;   // after the whole ones: the first that it has a part of, the way to the next
  int first, steps;   // of each part
  int number, mains;  // which of a tile's main parts it has, -1 as a helper, and how many there are
  bool has_helpers;
  int handed_out;  // so many tiles after the whole ones go to whoever is free
};

// How far the copies of zeros have come: what is to be zero begins `begin` bytes into out, and what comes `at`
// bytes after that is next. By depth this is in the matrix of `group`, after so many groups with rows.
struct ZeroingState {
  int64_t begin, at;
  int group, next_taken;
  bool left;
};

// What a block's warps tell one another, in the same place whatever the tiles: barriers stand before the
// sizes are known, and with them which tiles it will be.
struct GemmControl {
  static constexpr int kMostStages = 6;
  uint64_t full[kMostStages], empty[kMostStages];
  uint64_t scaled[kMostStages];  // with lines: the columns' scales are there
  // Of a warpgroup's staging buffers: results are in them, or there is room for some.
  uint64_t staged[kMathGroups], ready[kMathGroups];
  // By depth: the schedule is there; a tile's loads have begun; the number of a tile is there.
  uint64_t scheduled, begun, numbered[kNumberRing];
  int numbers[kNumberRing];
  Tile tiles[kTileRing];
  GroupTable groups;  // tile_end counts clusters by rows, blocks of 128 rows by depth
  int rank;           // of this block in its cluster
  int taken_count;    // by depth: so many groups take tiles, and the table has those alone
  int taken_rows;     // by depth: of each of them, or 0 where they differ
  Schedule schedule;
  ZeroingState zeroing;
  alignas(128) uint8_t zeros[kZeroBytes];

  // Which groups they are, in half of the zeros' room.
  static constexpr int kFewerZeros = kZeroBytes - sizeof(uint16_t[kMaxGroups]);
  __device__ uint16_t* taken() { return reinterpret_cast<uint16_t*>(zeros + kFewerZeros); }
};

template <typename Config>
struct TileBuffers {
  struct Stage {
    alignas(1024) uint8_t a[Config::kABytes];
    alignas(1024) uint8_t b[Config::kBBytes];
  };
  struct Scales {
    alignas(128) float rows[Config::kRowScales];
    alignas(128) float columns[Config::kLines ? Config::kTileN : 1];
    float2
        squares;  // of the tile's first and last columns, see produce_square_scales; or, in x, kOwn
  };
  struct NoScales {};

  Stage stages[Config::kStages];
  alignas(1024) uint8_t store[kMathGroups][kStoreRows / Config::kStagedRows][Config::kTileN / 64]
                             [Config::kStagedRows * kLineBytes];
  std::conditional_t<Config::kBlocks, Scales, NoScales> scales[Config::kStages];
};

template <size_t bytes>
struct Unused {
  uint8_t room[bytes];
};
template <>
struct Unused<0> {};

// GemmControl comes after what wide tiles take: ptxas spills registers where it comes first.
template <typename Config>
struct GemmShared
    : TileBuffers<Config>,
      Unused<sizeof(TileBuffers<typename Config::Wide>) - sizeof(TileBuffers<Config>)>,
      GemmControl {
  static_assert(Config::kStages <= kMostStages && kTileRing >= Config::kStages + 2 &&
                (!Config::kByDepth || kNumberRing >= 2 * Config::kStages + 6));
};

__host__ __device__ __forceinline__ int row_tiles(int rows) { return (rows + kTileM - 1) / kTileM; }

template <typename Config>
__host__ __device__ __forceinline__ int col_tiles(const GemmShape& shape) {
  return (shape.cols + Config::kTileN - 1) / Config::kTileN;
}

// Pairs of row tiles that share b's tile, of `rows` row tiles.
template <typename Config>
__host__ __device__ __forceinline__ int row_pairs(int rows) {
  return Config::kNarrow ? 0 : rows / 2;
}

// How many clusters a matrix of rows x cols tiles takes: pairs of rows, then pairs of columns.
template <typename Config>
__host__ __device__ __forceinline__ int cluster_tiles(int rows, int cols) {
  const int pairs = row_pairs<Config>(rows);
  return pairs * cols + (rows - 2 * pairs) * ((cols + 1) / 2);
}

template <typename Config>
TileCounts tile_counts(const GemmShape& shape) {
  TileCounts counts{};
  counts.cols = col_tiles<Config>(shape);
  if (Config::kByDepth)
    counts.matrix = Divisor(cluster_tiles<Config>(row_tiles(shape.rows), counts.cols));
  counts.band[0] = Divisor(kBandPairs * counts.cols);
  counts.band[1] = Divisor(counts.cols);
  counts.col_pairs = Divisor((counts.cols + 1) / 2);
  for (int pairs = 1; pairs <= kBandPairs; ++pairs) counts.pairs[pairs] = Divisor(pairs);
  return counts;
}

// This block's tile of the cluster's next two. Row tiles run fastest, in bands, so that blocks that
// run together share both operands in L2. By depth, of sums of few steps, they run slowest: what writes so
// much goes through the memory in order.
template <typename Config>
__device__ __forceinline__ Tile tile_of(int number, const GroupTable& groups, const uint16_t* taken,
                                        const TileCounts& counts, const GemmShape& shape) {
  const int rank = static_cast<int>(sm90::cluster_rank());
  Tile tile{};
  int rows, rest;  // of the matrix; number in it
  if constexpr (Config::kByDepth) {
    rows = row_tiles(shape.rows);
    rest = number;
    const int e = counts.matrix.take(rest);
    tile.group = taken[e];
    tile.row_limit = shape.rows;
    tile.depth_rows = groups.row_end[e] - groups.row_begin(e);
    const int first_block = groups.tile_begin(e);
    const int last_block = min(groups.tile_end[e], shape.T / kTileM);
    tile.begin = Config::kFp8 ? first_block : groups.row_begin(e);
    tile.steps = Config::kFp8 ? max(last_block - first_block, 0)
                              : (tile.depth_rows + Config::kTileK - 1) / Config::kTileK;
  } else {
    tile.group = groups.group_of_tile(number, shape.E);
    rest = number - groups.tile_begin(tile.group);
    tile.row = groups.row_begin(tile.group);
    tile.row_limit = groups.row_end[tile.group];
    rows = row_tiles(tile.row_limit - tile.row);
    tile.steps = (shape.depth + Config::kTileK - 1) / Config::kTileK;
  }
  const int pairs = row_pairs<Config>(rows);
  if (rest < pairs * counts.cols) {
    const bool single = Config::kByDepth && tile.steps <= kFewSteps;
    const int band_pairs = single ? 1 : kBandPairs, band = counts.band[single].take(rest);
    const int col = counts.pairs[min(band_pairs, pairs - band * band_pairs)].take(rest);
    tile.row += (2 * (band * band_pairs + rest) + rank) * kTileM;
    tile.col = col * Config::kTileN;
    tile.bits = 1;
  } else {
    rest -= pairs * counts.cols;
    tile.row += (2 * pairs + counts.col_pairs.take(rest)) * kTileM;
    tile.col = (2 * rest + rank) * Config::kTileN;
  }
  return tile;
}

// Where in the ring of stages a warp is.
template <int stages>
struct RingPosition {
  int stage = 0;
  uint32_t parity = 0;
  __device__ void advance() {
    if (++stage == stages) {
      stage = 0;
      parity ^= 1;
    }
  }
};

}  // namespace grouped_linear::cuda
