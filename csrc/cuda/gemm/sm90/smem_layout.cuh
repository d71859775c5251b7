// SPDX-License-Identifier: Apache-2.0
// A block's shared memory: the pipeline of operand stages, the epilogue's buffers, and what the
// block's warps tell one another.
#pragma once

#include <cstdint>
#include <type_traits>

#include "cuda/common/groups.cuh"
#include "cuda/gemm/sm90/codegen.cuh"
#include "cuda/gemm/sm90/config.h"
#include "cuda/gemm/tile_order.cuh"

namespace grouped_linear::cuda::sm90 {

constexpr int kRowNumberBlocks = 4;  // see GatheredTile::kAsked
constexpr int kTileSlots = 16;       // of the ring of tiles, see scheduler.cuh
constexpr int kZeroBytes = 3968;     // the source of zero_fill.cuh's copies

// In place of the first columns' scale: some columns have a scale of their own. Where the scale is
// zero, the columns' own scales are used as well, to the same result.
constexpr float kPerColumnScale = 0;

// A position in the pipeline of stages: the stage, and the parity of its mbarriers' phase.
template <int stages>
struct PipelineState {
  int stage = 0;
  uint32_t phase = 0;
  __device__ void advance() {
    if (++stage == stages) {
      stage = 0;
      phase ^= 1;
    }
  }
};

// The work of a cluster: whole tiles in turn with the other clusters, then slices
// of tiles that are split along K, or tiles for which it draws tickets. See scheduler.cuh.
struct Schedule {
  int whole_tiles, next_tile;        // of all clusters; this one's next
  int slices;                        // of this cluster
  int first_tile, tile_stride;       // after the whole ones: the tiles of this cluster's slices
  int slice_begin, slice_units;      // of each of these slices, in units of kUnitK
  int slice_index, slices_per_tile;  // of the equal slices; -1: this cluster has leading slices
  bool has_leading_slice;
  int dynamic_tiles;  // after the whole ones, for the cluster that comes first
  int published;      // tiles of this cluster, the end among them
  bool ended;
};

// The progress of zero_fill.cuh: a range starts `range` bytes into out, and `at` bytes of the range
// are zeroed. K-grouped, the range is the matrix of `group`, and `next_active` groups with rows
// come before.
struct ZeroFillState {
  int64_t range, at;
  int group, next_active;
  bool remaining;
};

// mbarriers and small state. The address does not depend on the tile's width: the mbarriers are
// initialised before the kernel knows the groups' sizes, and with them the width.
struct Control {
  // The pipeline's: a stage's operands are there, or its readers are done. Scale1x128: its column
  // scales are there.
  uint64_t full[kMaxStages], empty[kMaxStages];
  uint64_t scales_full[kMaxStages];
  // A warpgroup's epilogue buffers are full, or empty.
  uint64_t epilogue_full[kMathWarpgroups], epilogue_empty[kMathWarpgroups];
  // The ring's of tiles: the scheduler has published one, the producer has begun with it.
  uint64_t tile_full[kTileSlots], tile_empty[kTileSlots];
  WorkTile tiles[kTileSlots];
  GroupTable
      groups;  // tile_end counts clusters (M-grouped) or blocks of the padded layout (K-grouped)
  int rank;    // of this block in its cluster
  int active_groups;  // K-grouped: the table has only groups that take tiles, so many
  int rows_of_each;   // K-grouped: the rows of each of them, or 0 where they differ
  Schedule schedule;
  ZeroFillState zero_fill;
  alignas(128) uint8_t zeros[kZeroBytes];

  // K-grouped: the active groups' indices take the end of `zeros`.
  static constexpr int kKGroupedZeroBytes = kZeroBytes - sizeof(uint16_t[kMaxGroups]);
  static_assert(kMaxGroups <= 1 << 16, "active groups' indices have 16 bits");
  static_assert(kKGroupedZeroBytes > 0, "the active groups' indices leave room for zeros");
  __device__ uint16_t* active() { return reinterpret_cast<uint16_t*>(zeros + kKGroupedZeroBytes); }
};

template <typename Config, bool decodes_b = Config::kDecodesB>
struct TileBuffers {
  struct Stage {
    alignas(1024) uint8_t a[Config::kABytes];
    alignas(1024) uint8_t b[Config::kBBytes];
  };
  static_assert(sizeof(Stage) == Config::kStageBytes,
                "an operand is a multiple of 1024 bytes, the atom of the 128-byte swizzle");
  struct Scales {
    alignas(128) float rows[Config::kRowScales];
    alignas(128) float columns[Config::kScale1x128 ? Config::kTileN : 1];
    float2 blocks;  // of the tile's first and last columns; x may be kPerColumnScale
  };
  struct NoScales {};

  Stage stages[Config::kStages];
  // A warpgroup's, and in it its warps' where they store by themselves.
  alignas(1024) uint8_t epilogue[kMathWarpgroups][Config::kWarpgroupRows / Config::kEpilogueRows]
                                [Config::kEpilogueBuffers][Config::kEpilogueRows * kSwizzleBytes];
  std::conditional_t<Config::kBlockScaled, Scales, NoScales> scales[Config::kStages];
  // The numbers of the rows that a K-grouped GEMM gathers.
  int64_t row_numbers[Config::kKGrouped && Config::kGathersRows ? kRowNumberBlocks : 1]
                     [Config::kKGrouped && Config::kGathersRows ? Config::kTileK : 1];
};

// Where math warps decode b, see kernel_mxfp4.cuh: the stages are a's, and packed tiles of b have a
// ring of their own.
template <typename Config>
struct TileBuffers<Config, true> {
  struct Stage {
    alignas(1024) uint8_t a[Config::kABytes];
  };
  Stage stages[Config::kStages];
  // A warpgroup's: a line of 64 columns for each row.
  alignas(1024) uint8_t epilogue[Config::kMathWarpgroups][Config::kTileM * kSwizzleBytes];
  alignas(1024) uint8_t codes[Config::kPackedStages][Config::kPackedBytes];
  alignas(128) uint8_t scales[Config::kPackedStages][Config::kScaleBytes];
  uint64_t packed_full[Config::kPackedStages], packed_empty[Config::kPackedStages];
};

template <size_t bytes>
struct Padding {
  uint8_t room[bytes];
};
template <>
struct Padding<0> {};

// Control comes after the wide tiles' buffers: ptxas (nvcc 13.0) spills registers where it comes
// first.
template <typename Config>
struct SharedStorage : TileBuffers<Config>,
                       Padding<sizeof(TileBuffers<WideOf<Config>>) - sizeof(TileBuffers<Config>)>,
                       Control {
  static_assert(sizeof(TileBuffers<Config>) <= sizeof(TileBuffers<WideOf<Config>>),
                "narrow tiles reuse the wide tiles' shared memory");
  // The scheduler writes tile n + kTilesAhead when its producer has begun with tile n. By then all
  // loads of tile n - 1 are issued, so in both blocks the math warps have released tile n - 1 -
  // kStages, and the store warps have stored the second one before that.
  static_assert(kTileSlots >= Config::kTilesAhead + Config::kStages + 3,
                "a tile's slot is reused only after every role of both blocks is done with it");
};

// Shared memory of a launch.
template <typename Config>
constexpr int shared_bytes() {
  static_assert(
      sizeof(SharedStorage<Config>) <= kMaxSharedBytes,
      "stages and epilogue buffers must fit into 227 KiB: take fewer stages or a narrower tile");
  return sizeof(SharedStorage<Config>);
}

// By a math warp: hands a stage back to the producers of both blocks, which may have loaded parts of
// it. first_empty: of empty[0] in the block of rank lane % kClusterSize.
__device__ __forceinline__ void release_stage(uint32_t first_empty, int stage, int lane) {
  __syncwarp();  // the whole warp has read the stage's scales
  const int offset = stage * static_cast<int>(sizeof(uint64_t));
  if constexpr (kEveryLaneArrives)
    mbarrier_arrive_remote(__shfl_xor_sync(kFullWarp, first_empty, 1) + offset);
  else if (lane >= kClusterSize)
    return;
  mbarrier_arrive_remote(first_empty + offset);
}

// The pipeline as a math warp sees it.
template <typename Config>
class ConsumerPipeline {
 public:
  __device__ ConsumerPipeline(SharedStorage<Config>& shared, int lane)
      : first_empty_(mapa(&shared.empty[0], lane % kClusterSize)),
        first_full_(kept_smem_address(shared.full) + (Config::kScale1x128 ? divergent_zero() : 0)),
        lane_(lane) {}

  __device__ __forceinline__ void release(int stage) const {
    release_stage(first_empty_, stage, lane_);
  }

  __device__ __forceinline__ uint32_t full(int stage) const {
    return first_full_ + stage * sizeof(uint64_t);
  }

  PipelineState<Config::kStages> state;

 private:
  uint32_t first_empty_, first_full_;
  int lane_;
};

// A math thread's place in its block.
struct MathThread {
  int warpgroup, warp, lane;  // warp: of all math warps
};

}  // namespace grouped_linear::cuda::sm90
