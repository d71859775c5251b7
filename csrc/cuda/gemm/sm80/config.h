// SPDX-License-Identifier: Apache-2.0
// The tile shapes of the portable kernels, and what a kernel is compiled for.
//
// The host chooses a kernel by the operands' types and strides, and by how many rows a group has on
// average. The bits of a result do not depend on the choice.
#pragma once

#include <cstdint>

#include "cuda/gemm/kernel_arguments.h"
#include "layout.h"

namespace grouped_linear::cuda::sm80 {

// Every GPU of compute capability 8.0 and up allows a block so much shared memory: 8.6, 8.9 and
// 12.0 have the least.
constexpr int kMaxSharedBytes = 99 * 1024;

constexpr int kScaleBlock = kBlock, kPaddedBlock = kBlock;

// How many rows groups have. Few: an M-grouped GEMM whose time is that of reading b, as in decode.
// All warps lie along b's columns, and an SM has two blocks where there is shared memory for them.
enum class GroupRows { kMany, kFew };

template <typename A_, typename B_, Scaling kScaling, Grouping kGrouping, GroupRows kGroupRows,
          Major kAMajor_ = Major::kK, Major kBMajor_ = Major::kK, bool kDecodesB_ = false>
struct GemmConfig {
  using A = A_;
  using B = B_;
  static constexpr bool kKGrouped = kGrouping == Grouping::kK, kFp8 = sizeof(A) == 1;
  // Whether the operands have the padded columnwise layout.
  static constexpr bool kPadded = kKGrouped && kFp8;
  // Whether out may be added to, and there may be a bias.
  static constexpr bool kAdds = kKGrouped, kHasBias = !kKGrouped;
  static constexpr bool kScalePerGroup = kScaling == Scaling::kScalePerGroup;
  static constexpr bool kScale1x128 = kScaling == Scaling::kScale1x128;
  static constexpr bool kBlockScaled = kScale1x128 || kScaling == Scaling::kScale128x128;
  static constexpr Major kAMajor = kAMajor_, kBMajor = kBMajor_;
  // Whether b is a weight in MXFP4, see mxfp4_loader.cuh.
  static constexpr bool kDecodesB = kDecodesB_;

  // A thread's accumulators: 128 registers in 16 bits. In FP8 64, and as many partial ones.
  static constexpr bool kFewRows = kGroupRows == GroupRows::kFew;
  static constexpr int kTileM = kFewRows ? 32 : 128, kTileN = kFewRows || kFp8 ? 128 : 256;
  static constexpr int kWarpM = kFewRows || kFp8 ? 32 : 64, kWarpN = kFewRows ? 32 : 64;
  static constexpr int kWarpsM = kTileM / kWarpM, kWarpsN = kTileN / kWarpN;
  static constexpr int kThreads = 32 * kWarpsM * kWarpsN, kBlocksPerSm = kFewRows ? 2 : 1;

  // A k-block: what tiles count along K. In FP8 it is one scale block, of one or two stages. Stages
  // of whole cache lines read b fastest.
  static constexpr int kStageLine = kFewRows ? 128 : 64;  // bytes along K of a stage
  static constexpr int kStageK = kStageLine / sizeof(A), kTileK = kFp8 ? kScaleBlock : kStageK;
  static constexpr int kStagesPerKBlock = kTileK / kStageK;
  static constexpr int kUnitBlocks = 1;  // see tile_order.cuh
  static constexpr int kStages = kFp8 && !kFewRows ? 4 : 3;
  static constexpr int kABytes = kTileM * kStageLine, kBBytes = kTileN * kStageLine;
  static constexpr int kStageBytes = kABytes + kBBytes;

  // tile_order.cuh
  static constexpr int kPaddedBlock = sm80::kPaddedBlock;
  static constexpr bool kMulticastB = true, kLoneColumnAlongM = false, kSwapped = false;

  static_assert(!kFp8 || (kAMajor == Major::kK && kBMajor == Major::kK),
                "FP8 operands are dense along K: ldmatrix cannot transpose bytes");
  static_assert(!kFp8 || kTileN == kScaleBlock, "an FP8 tile lies in one column of scale blocks");
  static_assert(!kFewRows || !kKGrouped, "a K-grouped GEMM with few rows is bound by its output");
};

}  // namespace grouped_linear::cuda::sm80
