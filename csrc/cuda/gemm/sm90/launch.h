// SPDX-License-Identifier: Apache-2.0
// What the launchers of the sm_90 kernels share: operands that TMA can read, tensor maps, the
// workspace.
#pragma once

#include <algorithm>
#include <limits>

#include "cuda/common/tensor_map.h"
#include "cuda/gemm/sm90/gemm.h"
#include "cuda/gemm/sm90/kernel.cuh"

namespace grouped_linear::cuda::sm90 {

// TMA reads what 16-byte loads read.
inline Tensor tma_readable(const Tensor& t, int64_t inner) { return vector_readable(t, inner); }

// Dimensions of size 1 may have any stride; TMA wants a multiple of 16 bytes.
inline int64_t map_stride(const Tensor& t, int64_t d, int64_t dense) {
  return t.size(d) > 1 ? t.stride(d) : dense;
}

// A tensor without elements is never read, but its map must have an aligned address: any one.
inline const void* map_address(const Tensor& t, const void* any) {
  if (t.numel() > 0) return t.data_ptr();
  return reinterpret_cast<const void*>(reinterpret_cast<uintptr_t>(any) & ~uintptr_t{15});
}

// A matrix in boxes of box_rows rows and 128 bytes, with ends that the kernel chooses: see
// RaggedRows.
inline CUtensorMap ragged_map(const char* op, const void* first, ScalarType dtype, int64_t item,
                              int64_t cols, int64_t stride, uint32_t box_rows) {
  constexpr int64_t origin = RaggedRows::kOrigin, most = std::numeric_limits<int32_t>::max();
  return tensor_map(op, first, dtype, item, {cols, origin, most, most},
                    {stride, stride, (int64_t{1} << 34) / item - stride},
                    {static_cast<uint32_t>(kSwizzleBytes / item), box_rows, 1, 1}, true);
}

// out seen as one matrix, all groups' below one another, in boxes of kEpilogueRows rows and one
// line of 128 bytes (coordinates: column, RaggedRows) or all of a subtile's lines (0, row, line,
// the rest of RaggedRows).
template <typename Config>
CUtensorMap out_map(const char* op, const EpilogueArguments& epilogue, int cols) {
  const int64_t item = epilogue.type == OutputType::kFloat ? 4 : 2;
  const ScalarType dtype = epilogue.type == OutputType::kFloat      ? ScalarType::Float
                           : epilogue.type == OutputType::kBFloat16 ? ScalarType::BFloat16
                                                                    : ScalarType::Half;
  const int64_t line = kSwizzleBytes / item, origin = RaggedRows::kOrigin;
  constexpr int64_t most = std::numeric_limits<int32_t>::max();
  if (!stores_whole_rows<Config>(epilogue, cols))
    return ragged_map(op, epilogue.out, dtype, item, cols, cols, Config::kEpilogueRows);
  return tensor_map(
      op, epilogue.out, dtype, item, {line, origin, cols / line, most, most},
      {cols, line, cols, (int64_t{1} << 34) / item - cols},
      {static_cast<uint32_t>(line), Config::kEpilogueRows, Config::kEpilogueBuffers, 1, 1}, true);
}

// Room for the tile counter, where the GEMM may draw tickets, and for split-K slots, where a
// K-grouped one may be worth splitting.
template <typename Config>
std::optional<Tensor> scheduler_room(const Tensor& like, const GemmShape& shape, int clusters) {
  constexpr int64_t counter_bytes = kCounterWords * int64_t{sizeof(uint64_t)};
  if constexpr (Config::kKGrouped) {
    constexpr int64_t slot_bytes =
        kFlagsPerSlot * sizeof(uint64_t) + kAccumulatorsPerSlot<Config> * sizeof(float);
    if (shape.T < 2 * kMinLeadingUnits * Config::kUnitK) return {};
    return new_tensor(like, {counter_bytes + clusters * slot_bytes}, ScalarType::Byte);
  } else {
    const int64_t most_tiles =
        (shape.T / (2 * kTileM) + shape.E) * int64_t{col_tiles<Config>(shape)};
    if (!kDrawsTickets<Config> || shape.K < kTicketsMinK<Config> ||
        most_tiles <= kTicketRounds<Config> * clusters)
      return {};
    return new_tensor(like, {counter_bytes}, ScalarType::Byte);
  }
}

// A GatherProducer's input: rows of the source, and their scales in FP8.
inline GatheredRows gathered_rows(const char* op, const std::optional<Tensor>& rows,
                                  const Tensor& source) {
  const int64_t pieces = map_stride(source, 0, source.size(1)) * item_size(source) / 16;
  check(source.size(0) * pieces <= std::numeric_limits<uint32_t>::max(), op,
        ": the tensor whose rows are gathered takes more than 64 GiB, too much for CUDA");
  return {row_numbers(rows, source), static_cast<const uint8_t*>(source.const_data_ptr()),
          static_cast<uint32_t>(pieces), nullptr, 0};
}

// maps: of the operands and their scales. The map of out is made here.
template <typename Config, typename Epilogue = LinearEpilogue>
void launch_gemm(const Launch& launch, TensorMaps maps, const GroupedGemm& gemm,
                 const Scale128x128View& scale_b, const typename Epilogue::Arguments& epilogue,
                 const typename ProducerOf<Config>::Arguments& producer = {}) {
  constexpr TileShape tile = Config::kFp8                         ? kTileFp8
                             : Config::kHalfStages                ? kTile16BitKGrouped
                             : Config::kSwapped                   ? kTile16BitSwapped
                             : Config::kTileN == kTile16BitDeep.n ? kTile16BitDeep
                                                                  : kTile16Bit;
  static_assert(tile.m == Config::kTileM && tile.n == Config::kTileN && tile.k == Config::kTileK &&
                    tile.stages == Config::kStages && tile.cluster == kClusterSize,
                "config.h tells Python the tile that is launched");
  const GemmShape& shape = gemm.shape;
  const char* op = launch.op();
  // A group's matrix of out.
  const int out_rows = Config::kTransposed ? shape.cols : shape.rows;
  const int out_cols = Config::kTransposed ? shape.rows : shape.cols;
  if (Config::kKGrouped) row_count(op, int64_t{out_rows} * shape.E);
  // A group may have all rows, and RaggedRows counts those of a group from 2^30 down.
  if (!Config::kPadded)
    check(shape.T <= RaggedRows::kOrigin, op, ": at most ", RaggedRows::kOrigin,
          " rows are supported on CUDA, got ", shape.T);
  maps.out = epilogue.aligned ? out_map<Config>(op, epilogue, out_cols) : maps.a;

  const int clusters = std::min(launch.multiprocessors() / kClusterSize, kMaxClusters);
  const std::optional<Tensor> room = scheduler_room<Config>(gemm.offs, shape, clusters);
  SplitKWorkspace workspace{};
  if (room) {
    workspace.tickets = StampedTickets::in(room->data_ptr());
    if (Config::kSplitsK) {
      workspace.flags = static_cast<uint64_t*>(room->data_ptr()) + kCounterWords;
      workspace.accumulators = reinterpret_cast<float*>(workspace.flags + clusters * kFlagsPerSlot);
    }
  }

  constexpr auto kernel = grouped_gemm_kernel<Config, Epilogue>;
  launch.allow_shared_bytes<kernel>(shared_bytes<Config>());
  launch.run(kernel, clusters * kClusterSize, kThreads, shared_bytes<Config>(), maps,
             gemm.offs.const_data_ptr<int32_t>(), producer, scale_b, epilogue, workspace,
             tile_counts<Config>(shape), narrow_tile_counts<Config>(shape), shape);
}

}  // namespace grouped_linear::cuda::sm90
