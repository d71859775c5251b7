// SPDX-License-Identifier: Apache-2.0
// The tile shapes of the sm_90 kernels, and what a kernel is compiled for.
//
// The host chooses a kernel by the operands' types and sizes, and the number of groups. No timing
// and no environment variable decides, so equal calls run equal kernels. The device decides
// what depends on the groups' sizes: an M-grouped GEMM takes narrow tiles where the GPU has
// room for all of them at once, or where the output is narrow. The bits of an M-grouped GEMM's
// result depend on neither.
//
// Plain C++: csrc/host.cpp reports the shapes to Python.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "cuda/gemm/kernel_arguments.h"
#include "cuda/gemm/sm90/roles.h"
#include "layout.h"

namespace grouped_linear::cuda::sm90 {

// One block's output tile, and its shared memory pipeline.
struct TileShape {
  int m, n;
  int k;        // elements of a stage along K
  int stages;   // loaded ahead
  int cluster;  // blocks that share an operand
};

constexpr TileShape kTile16Bit{128, 256, 64, 3, 2};
constexpr TileShape kTile16BitDeep{128, 192, 64, 4, 2};     // see gemm_16bit.cu
constexpr TileShape kTile16BitSwapped{192, 128, 64, 4, 2};  // see swapped.cuh
constexpr TileShape kTile16BitKGrouped{128, 256, 32, 6, 2};
constexpr TileShape kTileFp8{128, 192, 128, 4, 2};
constexpr TileShape kTileMxfp4{256, 128, 64, 4, 2};
constexpr TileShape kTileMxfp4FewRows{64, 128, 64, 4, 2};  // of dgrad, see kernel_mxfp4.cuh
constexpr int kNarrowTileN = 64;

constexpr int kTileM = 128;
constexpr int kWgmmaM = 64;  // rows of one wgmma: a warpgroup's part of a tile
constexpr int kMathWarpgroups = kTileM / kWgmmaM, kMathWarps = 4 * kMathWarpgroups;
constexpr int kThreads = 128 + 32 * kMathWarps;  // with the warpgroup that loads and stores
constexpr int kClusterSize = 2;
constexpr int kSwizzleBytes = 128;  // a line of the 128-byte swizzle

// How many lanes of a math warp arrive for it where it has read. compute-sanitizer's racecheck takes
// an arrival for that of one lane alone, so in builds for it all of them arrive (CMake's option
// GROUPED_LINEAR_RACECHECK).
#ifdef GROUPED_LINEAR_RACECHECK
constexpr int kArrivingLanes = 32;
#else
constexpr int kArrivingLanes = 1;
#endif
constexpr bool kEveryLaneArrives = kArrivingLanes > 1;

// The layouts' blocks, 128 like kTileM. GemmConfig asserts what the kernels need of their equality.
constexpr int kScaleBlock = kBlock;   // elements of K, or columns, that share an FP8 scale
constexpr int kPaddedBlock = kBlock;  // rows of a block in the padded columnwise layout

constexpr int kMaxStages = 6, kMaxFp8Stages = 4;
constexpr int kMaxSharedBytes = 227 * 1024;  // of a block on sm_90

// a's row scales are loaded from a multiple of 4 rows on, and a tile may start at any row.
constexpr int kRowScaleAlignment = kScaleRowMultiple;

// Store warps store the tile, or do elementwise arithmetic on it first. Gated: b's
// columns are gate's, then up's. Half of a tile's are gate's, the others the same ones of up.
enum class StoreWork { kStore, kElementwise, kGatedElementwise };

// A member of a struct that has no default: without its initializer the struct does not compile.
template <typename T>
struct Required {
  T value;
  constexpr Required(T given) : value(given) {}  // NOLINT: implicit
  constexpr operator T() const { return value; }
};

// The traits that a kernel is compiled for. GemmConfig derives everything else from it.
struct GemmTraits {
  Required<Grouping> grouping;
  Required<Scaling> scaling;
  Required<Major> a_major, b_major;
  Required<bool> gathers;     // a's rows, by number
  Required<bool> transposed;  // out is stored as [cols, rows]
  Required<StoreWork> store_work;
  Required<int> tile_n, stages;
  int tile_m = kTileM;    // more: swapped operands, see swapped.cuh
  bool narrow = false;    // the same GEMM in narrow tiles, see NarrowOf
  bool low_rank = false;  // a second product joins the sum, see low_rank.cuh
};

// The type of a b in MXFP4, which the math warps decode to T beside a's tiles of so many rows, see
// kernel_mxfp4.cuh.
template <typename T, int rows>
struct Mxfp4;
template <typename B>
struct DecodedOf {
  using Type = B;
  static constexpr int kRows = kTileM;
};
template <typename T, int rows>
struct DecodedOf<Mxfp4<T, rows>> {
  using Type = T;
  static constexpr int kRows = rows;
};

constexpr int smaller(int a, int b) { return a < b ? a : b; }
constexpr int larger(int a, int b) { return a < b ? b : a; }

template <typename A_, typename B_, GemmTraits traits>
struct GemmConfig {
  using A = A_;
  using StoredB = B_;
  using B = typename DecodedOf<StoredB>::Type;  // as wgmma reads it
  static constexpr GemmTraits kTraits = traits;
  static constexpr bool kKGrouped = traits.grouping == Grouping::kK, kFp8 = sizeof(A) == 1;
  // Whether the operands have the padded columnwise layout.
  static constexpr bool kPadded = kKGrouped && kFp8;
  // Whether out may be added to, tiles may be split along K, and there may be a bias.
  static constexpr bool kAdds = kKGrouped, kSplitsK = kKGrouped, kHasBias = !kKGrouped;
  static constexpr bool kScalePerGroup = traits.scaling == Scaling::kScalePerGroup;
  static constexpr bool kScale1x128 = traits.scaling == Scaling::kScale1x128;
  static constexpr bool kScale128x128 = traits.scaling == Scaling::kScale128x128;
  static constexpr bool kBlockScaled = kScale1x128 || kScale128x128;
  static constexpr Major kAMajor = traits.a_major, kBMajor = traits.b_major;
  static constexpr bool kGathersRows = traits.gathers, kTransposed = traits.transposed;
  static constexpr bool kElementwise = traits.store_work != StoreWork::kStore;
  static constexpr bool kGated = traits.store_work == StoreWork::kGatedElementwise;

  // Narrow tiles reuse the wide tile's shared memory. Gated, they have whole lines of each half.
  static constexpr bool kNarrow = traits.narrow;
  static constexpr int kWideTileN = traits.tile_n;
  static constexpr int kNarrowCols = kGated ? 2 * kNarrowTileN : kNarrowTileN;
  // Whether math warps decode b: each warpgroup 64 columns of it, for all rows of a's tile.
  static constexpr bool kDecodesB = !std::is_same_v<StoredB, B>;
  // Whether b is wgmma's first operand: each warpgroup has 64 columns, and all rows of the tile.
  static constexpr bool kSwapped = traits.tile_m != sm90::kTileM;
  static constexpr int kTileM = kSwapped ? traits.tile_m : DecodedOf<StoredB>::kRows;
  static constexpr int kTileN = kNarrow ? kNarrowCols : kWideTileN;
  static constexpr int kPaddedBlock = sm90::kPaddedBlock;
  // Boxes in which TMA loads b's tile: one a block where the cluster shares it.
  static constexpr int kNarrowBBoxes = kGated ? 2 : 1, kBBoxes = kNarrow ? kNarrowBBoxes : 2;
  static constexpr bool kHasNarrow = !kKGrouped && !kSwapped;
  // Whether a cluster along M shares b by multicast. Swapped tiles never lie so. Narrow ones do not
  // share it, and lie along M only where they have all columns: side by side, one of two would have
  // none. In FP8 ptxas would spill for that, and nobody asks for such products.
  static constexpr bool kMulticastB = !kNarrow && !kSwapped, kLoneColumnAlongM = kNarrow && !kFp8;

  // Whether its k-blocks come before the first product's, see low_rank.cuh.
  static constexpr bool kLowRank = traits.low_rank, kLowRankFirst = kLowRank && kBlockScaled;

  static constexpr int kMathWarpgroups = kDecodesB ? kTileN / kWgmmaM : sm90::kMathWarpgroups;
  static constexpr int kThreads = 128 + 128 * kMathWarpgroups;
  // A warpgroup's part of a tile, and a thread's of that.
  static constexpr int kWarpgroupRows = kSwapped ? kTileM : kWgmmaM;
  static constexpr int kWarpgroupCols = kSwapped ? kWgmmaM : kTileN;
  static constexpr int kAccumulators = kWarpgroupRows * kWarpgroupCols / 128;

  // The unit in which the scheduler measures and cuts K: 64 in 16 bits, 128 in FP8.
  static constexpr int kUnitK = kSwizzleBytes / sizeof(A);
  // A k-block, which is a stage. A K-major operand needs a whole line of 128 bytes. Without one,
  // more and shorter stages in the same memory have more bytes on their way. Warps that gather lose
  // more by twice as many stages.
  static constexpr bool kHalfStages = kKGrouped && !kFp8 && !kGathersRows;
  static constexpr int kTileK = kHalfStages ? kUnitK / 2 : kUnitK, kUnitBlocks = kUnitK / kTileK;
  static constexpr int kWgmmaK = 32 / sizeof(A);
  static constexpr int kABytes = kTileM * kTileK * sizeof(A);
  static constexpr int b_bytes(int n) {
    return kDecodesB ? 0 : n * kTileK * static_cast<int>(sizeof(B));
  }
  static constexpr int stage_bytes(int n) { return kABytes + b_bytes(n); }
  static constexpr int kStageBytes = stage_bytes(kTileN), kBBytes = b_bytes(kTileN);

  // b in MXFP4: a packed stage. K-major it has 128 elements along K, a line of 64 bytes for each
  // column, because TMA takes longer for twice as many lines of 32. An MN-major one has a k-block.
  static constexpr int kPackedK = kBMajor == Major::kK ? 128 : kTileK;
  static constexpr int kPackedBytes = kTileN * kPackedK / 2;
  static constexpr int kPackedStages = kBMajor == Major::kK            ? 2
                                       : kTileM == kTileMxfp4FewRows.m ? 8
                                                                       : 4;
  // Its scales are bfloat16: K-major a pair of them for each column and k-block, MN-major 64 for each
  // 32 columns.
  static constexpr int kScaleBytes = kBMajor == Major::kK ? 8 * kTileN : kTileN / 32 * 128;

  // Rows of one epilogue buffer. A 16-bit K-grouped GEMM is bound by writing where groups are
  // small. There each warp's 16 rows are stored by themselves, all columns at once, so that
  // neighbouring bytes are written at the same time.
  static constexpr int kEpilogueRows = kKGrouped && !kFp8 && !kTransposed ? 16 : kWarpgroupRows;
  static constexpr int epilogue_bytes(int n) { return kTileM * (n / 64) * kSwizzleBytes; }
  static constexpr int kEpilogueBuffers = kWarpgroupCols / 64;  // of 128 bytes a row

  // FP8 keeps the number of stages in narrow tiles: its main loop is unrolled over them.
  static constexpr int kRoom =
      traits.stages * stage_bytes(kWideTileN) + epilogue_bytes(kWideTileN) - epilogue_bytes(kTileN);
  static constexpr int kStages =
      kNarrow && !kFp8 ? smaller(kMaxStages, kRoom / kStageBytes) : int{traits.stages};

  // Where math warps decode b, kernel_mxfp4.cuh says which warp is what.
  static constexpr Roles kRoles = roles_of(kBlockScaled, kGathersRows, kElementwise);
  // The scheduler is so many tiles ahead of the producer. A store warp schedules before it waits
  // for a tile, and the producer is some tiles further on by then; warps that gather need to know
  // the next one too. With more than three FP8 GEMMs that are bound by writing take longer (H100,
  // 2026-11: up to 1.12).
  static constexpr int kTilesAhead = !kRoles.schedules(Role::kStore) && !kDecodesB ? 2
                                     : kGathersRows                                ? 7
                                                                                   : 3;
  // Whether stages are written by cp.async too, which wgmma sees after a fence only.
  static constexpr bool kNeedsProxyFence = kGathersRows;

  // a's scales in a stage. K-grouped tiles start at multiples of kTileM.
  static constexpr int kRowScales = kKGrouped ? kTileM : kTileM + kRowScaleAlignment;
  // b's scales: of 64 columns each, the greatest width that never straddles two scale blocks.
  static constexpr int kColumnParts = kTileN / 64;

  static_assert(kTileN == 64 || kTileN == 128 || kTileN == 192 || kTileN == 256,
                "a tile has 64, 128, 192 or 256 columns: wgmma.cuh has instructions for these");
  static_assert(
      kStages >= 2 && kStages <= kMaxStages,
      "a pipeline has 2 to kMaxStages stages: one is computed on while another is loaded");
  static_assert(!kFp8 || kStages <= kMaxFp8Stages,
                "an FP8 pipeline has at most kMaxFp8Stages stages: its main loop writes them out");
  static_assert(!kFp8 || kTileN <= 192,
                "an FP8 tile has at most 192 columns: a thread holds an accumulator and a partial "
                "accumulator of kTileN / 2 registers each");
  static_assert(
      !kFp8 || kTileK == kScaleBlock,
      "a k-block of FP8 is one scale block: the partial accumulator is promoted once a k-block");
  static_assert(!kPadded || kTileK == kPaddedBlock,
                "a k-block of a K-grouped FP8 GEMM is one block of the padded layout");
  static_assert(
      !kBlockScaled || kScale1x128 == kKGrouped,
      "block scales of b are 1 x 128 in a K-grouped GEMM and 128 x 128 in an M-grouped one");
  static_assert(!kHalfStages || (kAMajor == Major::kMN && kBMajor == Major::kMN),
                "half a line of K per stage needs operands that are dense along M and N");
  static_assert(!kDecodesB || (!kKGrouped && !kElementwise && !kFp8 && !kGathersRows),
                "b in MXFP4 is the weight of an M-grouped GEMM in 16 bits");
  static_assert(
      kBMajor == Major::kK || kDecodesB || kTileN / kBBoxes % 64 == 0,
      "an M/N-major b is loaded in columns of 64: half a tile must be a multiple of that");
  static_assert(!kTransposed || (kKGrouped && !kFp8 && kTileN == 256),
                "what is stored transposed are weight gradients in 16 bits");
  static_assert(!kGathersRows || !kPadded,
                "a K-grouped FP8 GEMM reads the padded layout, which has no rows to gather");
  static_assert(!kElementwise || (!kKGrouped && !kFp8),
                "elementwise arithmetic follows M-grouped GEMMs in 16 bits");
  static_assert(kHasNarrow || !kNarrow, "K-grouped and swapped GEMMs have wide tiles alone");
  static_assert(!kSwapped || (!kKGrouped && !kFp8 && !kGathersRows && !kDecodesB && kTileN == 128),
                "swapped operands are for M-grouped GEMMs in 16 bits, of rows in order");
  static_assert(!kLowRank || (!kKGrouped && !kGathersRows && !kElementwise),
                "a second product follows M-grouped GEMMs of rows in order");
};

constexpr GemmTraits with_narrow(GemmTraits traits, bool narrow) {
  traits.narrow = narrow;
  return traits;
}

constexpr GemmTraits with_low_rank(GemmTraits traits) {
  traits.low_rank = true;
  return traits;
}

// A GEMM with narrow tiles, and the one whose shared memory it takes.
template <typename Config>
using NarrowOf =
    GemmConfig<typename Config::A, typename Config::StoredB, with_narrow(Config::kTraits, true)>;
template <typename Config>
using WideOf =
    GemmConfig<typename Config::A, typename Config::StoredB, with_narrow(Config::kTraits, false)>;

// A GEMM with a second product.
template <typename Config>
using LowRankOf =
    GemmConfig<typename Config::A, typename Config::StoredB, with_low_rank(Config::kTraits)>;

// A stage of the second product has 64 elements of 16 bits along r: as many bytes as a k-block's.
constexpr int kLowRankK = kSwizzleBytes / 2;

}  // namespace grouped_linear::cuda::sm90
