// The tile shapes of the sm_90 kernels, and what a kernel is compiled for.
//
// The host chooses a kernel by the operands' types alone. No size, no timing and no environment
// variable decides, so equal calls run equal kernels. What depends on the groups' sizes is decided
// on the device: an M-grouped GEMM takes narrow tiles where the GPU has room for all of them at
// once. The bits of a result do not depend on it.
//
// Plain C++: csrc/host.cpp reports the shapes to Python.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cuda/gemm/kernel_arguments.h"
#include "layout.h"

namespace grouped_linear::cuda::sm90 {

// One block's output tile, and its shared memory pipeline.
struct TileShape {
  int m, n;
  int k;        // elements of a stage along K: 128 bytes
  int stages;   // loaded ahead
  int cluster;  // blocks that share an operand
};

constexpr TileShape kTile16Bit{128, 256, 64, 3, 2};
constexpr TileShape kTileFp8{128, 192, 128, 4, 2};
constexpr int kNarrowTileN = 64;

constexpr int kTileM = 128;
constexpr int kWgmmaM = 64;  // rows of one wgmma: a warpgroup's part of a tile
constexpr int kMathWarpgroups = kTileM / kWgmmaM, kMathWarps = 4 * kMathWarpgroups;
constexpr int kThreads = 128 + 32 * kMathWarps;  // with the warpgroup that loads and stores
constexpr int kClusterSize = 2;
constexpr int kSwizzleBytes = 128;  // a line of the 128-byte swizzle

// The layouts' blocks, 128 like kTileM. GemmConfig asserts what the kernels need of their equality.
constexpr int kScaleBlock = kBlock;   // elements of K, or columns, that share an FP8 scale
constexpr int kPaddedBlock = kBlock;  // rows of a block in the padded columnwise layout

constexpr int kMaxStages = 6;
constexpr int kMaxSharedBytes = 227 * 1024;  // of a block on sm_90

// a's row scales are loaded from a multiple of 4 rows on, and a tile may start at any row.
constexpr int kRowScaleAlignment = kScaleRowMultiple;

template <typename A_, typename B_, int kTileN_, int kStages_, Scaling kScaling, Grouping kGrouping,
          Major kAMajor_ = Major::kK, Major kBMajor_ = Major::kK>
struct GemmConfig {
  using Wide = GemmConfig;
  using A = A_;
  using B = B_;
  static constexpr bool kKGrouped = kGrouping == Grouping::kK, kFp8 = sizeof(A) == 1;
  static constexpr bool kScalePerGroup = kScaling == Scaling::kScalePerGroup;
  static constexpr bool kScale1x128 = kScaling == Scaling::kScale1x128;
  static constexpr bool kScale128x128 = kScaling == Scaling::kScale128x128;
  static constexpr bool kBlockScaled = kScale1x128 || kScale128x128;
  static constexpr Major kAMajor = kAMajor_, kBMajor = kBMajor_;

  static constexpr int kStages = kStages_;
  static constexpr int kTileM = sm90::kTileM, kTileN = kTileN_, kPaddedBlock = sm90::kPaddedBlock;
  static constexpr int kTileK = kSwizzleBytes / sizeof(A);  // 64 in 16 bits, 128 in FP8
  static constexpr int kWgmmaK = 32 / sizeof(A);
  static constexpr int kABytes = kTileM * kSwizzleBytes, kBBytes = kTileN * kSwizzleBytes;
  static constexpr int kStageBytes = kABytes + kBBytes;
  // TMA loads of b's tile: one a block where the cluster shares it.
  static constexpr int kBPieces = 2;
  static constexpr bool kNarrow = false;
  static constexpr int kNarrowCols = kNarrowTileN, kNarrowPieces = 1;  // the same of narrow tiles
  // Whether b's columns are those of gate, then those of up, see GateUp.
  static constexpr bool kGateUp = false;
  // Whether a tile and the one below it form a pair, whose blocks share b.
  static constexpr bool kSharesB = true;
  // Whether warp 1 has nothing to do but scheduling and zeros. Otherwise a store warp zeroes while
  // it waits.
  static constexpr bool kHasIdleWarp = !kBlockScaled;
  // Whether stages are written by cp.async too, which wgmma sees after a fence only.
  static constexpr bool kNeedsProxyFence = false;

  // a's scales in a stage. K-grouped tiles start at multiples of kTileM.
  static constexpr int kRowScales = kKGrouped ? kTileM : kTileM + kRowScaleAlignment;
  // b's scales: of 64 columns each, the greatest width that never straddles two scale blocks.
  static constexpr int kColumnParts = kTileN / 64;

  // Rows of one epilogue buffer. A 16-bit K-grouped GEMM is bound by writing where groups are
  // small. There each warp's 16 rows are stored by themselves, all columns at once, so that
  // neighbouring bytes are written at the same time.
  static constexpr int kEpilogueRows = kKGrouped && !kFp8 ? 16 : kWgmmaM;
  static constexpr int kEpilogueBuffers = kTileN / 64;  // of 128 bytes a row
  static constexpr int kEpilogueBytes = kTileM * kEpilogueBuffers * kSwizzleBytes;

  static_assert(kTileN == 64 || kTileN == 128 || kTileN == 192 || kTileN == 256,
                "a tile has 64, 128, 192 or 256 columns: wgmma.cuh has instructions for these");
  static_assert(
      kStages >= 2 && kStages <= kMaxStages,
      "a pipeline has 2 to kMaxStages stages: one is computed on while another is loaded");
  static_assert(!kFp8 || kTileN <= 192,
                "an FP8 tile has at most 192 columns: a thread holds an accumulator and a partial "
                "accumulator of kTileN / 2 registers each");
  static_assert(
      !kFp8 || kTileK == kScaleBlock,
      "a k-block of FP8 is one scale block: the partial accumulator is promoted once a k-block");
  static_assert(!kFp8 || !kKGrouped || kTileK == kPaddedBlock,
                "a k-block of a K-grouped FP8 GEMM is one block of the padded layout");
  static_assert(
      !kBlockScaled || kScale1x128 == kKGrouped,
      "block scales of b are 1 x 128 in a K-grouped GEMM and 128 x 128 in an M-grouped one");
  static_assert(
      kBMajor == Major::kK || kTileN / kBPieces % 64 == 0,
      "an M/N-major b is loaded in columns of 64: half a tile must be a multiple of that");
};

constexpr int smaller(int a, int b) { return a < b ? a : b; }
constexpr int larger(int a, int b) { return a < b ? b : a; }

enum class Operand { kA, kB };

// The same GEMM with an operand whose rows warps 0 and 1 gather. Where that is b, each block
// gathers its own tile of it: pairs are neighbouring columns alone.
template <typename Config, Operand operand>
struct Gathering : Config {
  static constexpr bool kSharesB = operand == Operand::kA;
  static constexpr bool kHasIdleWarp = false;
  static constexpr bool kNeedsProxyFence = true;
};

// The same GEMM with an ElementwiseEpilogue, whose store warps write the zeros too.
template <typename Config>
struct WithElementwise : Config {
  static constexpr bool kHasIdleWarp = false;
};

// The same GEMM of gate and up for SwiGLU: half of a tile's columns are gate's, the other half the
// same columns of up. Narrow tiles have whole lines of both.
template <typename Config>
struct GateUp : WithElementwise<Config> {
  static constexpr bool kGateUp = true;
  static constexpr int kNarrowCols = 2 * kNarrowTileN, kNarrowPieces = 2;
};

// The same GEMM in narrow tiles, which never share b. Its stages and buffers reuse the wide tile's
// shared memory.
template <typename Config>
struct NarrowOf : Config {
  using Wide = Config;
  static constexpr int kTileN = Config::kNarrowCols, kBBytes = kTileN * kSwizzleBytes;
  static constexpr int kStageBytes = Config::kABytes + kBBytes;
  static constexpr int kBPieces = Config::kNarrowPieces;
  static constexpr bool kNarrow = true, kSharesB = false;
  static constexpr int kEpilogueBuffers = kTileN / 64;
  static constexpr int kEpilogueBytes = kTileM * kEpilogueBuffers * kSwizzleBytes;
  // FP8 keeps the number of stages: its main loop is unrolled over them.
  static constexpr int kRoom =
      Config::kStages * Config::kStageBytes + Config::kEpilogueBytes - kEpilogueBytes;
  static constexpr int kStages =
      Config::kFp8 ? Config::kStages : smaller(kMaxStages, kRoom / kStageBytes);
};

}  // namespace grouped_linear::cuda::sm90
