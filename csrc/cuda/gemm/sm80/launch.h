// SPDX-License-Identifier: Apache-2.0
// What the launchers of the portable kernels share.
#pragma once

#include <algorithm>

#include "cuda/gemm/sm80/gemm.h"
#include "cuda/gemm/sm80/kernel.cuh"

namespace grouped_linear::cuda::sm80 {

// group, stride: the dimensions that OperandView's strides are of; group -1: none.
inline OperandView view_of(const Tensor& t, int64_t group, int64_t stride) {
  return {static_cast<const char*>(t.const_data_ptr()),
          group < 0 ? 0 : t.stride(group) * item_size(t), t.stride(stride) * item_size(t)};
}

// On average: sizes are on the device. From 40 rows on, the tiles for few are no faster.
inline bool has_few_rows(const GroupedGemm& gemm) {
  return gemm.shape.T <= 32 * int64_t{gemm.shape.E};
}

// At most so many numbers of tiles (tile_order.cuh), whatever the groups' sizes.
template <typename Config>
int64_t most_tiles(const GemmShape& shape, const TileCounts& counts) {
  if (Config::kKGrouped) return 2 * int64_t{shape.E} * counts.matrix.divisor;
  const int64_t row_tiles = shape.T / Config::kTileM + std::min(shape.E, shape.T);
  return row_tiles * (counts.col_tiles + 1);
}

template <typename Config>
void launch_gemm(const Launch& launch, const OperandsOf<Config>& operands, const GroupedGemm& gemm,
                 const EpilogueArguments& epilogue) {
  const GemmShape& shape = gemm.shape;
  constexpr int bytes = shared_bytes<Config>();
  const TileCounts counts = tile_counts<Config>(shape);
  const int64_t most = most_tiles<Config>(shape, counts);
  check(most <= std::numeric_limits<int32_t>::max(), launch.op(),
        ": the output has too many tiles for CUDA");
  const int blocks_per_sm = std::clamp(launch.sm_shared_bytes() / (bytes + kReservedSharedBytes), 1,
                                       Config::kBlocksPerSm);
  const int64_t blocks = std::min<int64_t>(most, launch.multiprocessors() * blocks_per_sm);
  std::optional<Tensor> room;
  if (most > 2 * blocks) room = new_tensor(gemm.offs, {kTicketBytes}, ScalarType::Byte);

  constexpr auto kernel = grouped_gemm_kernel<Config>;
  launch.allow_shared_bytes<kernel>(bytes);
  launch.run(kernel, static_cast<unsigned>(blocks), Config::kThreads, bytes, operands,
             gemm.offs.const_data_ptr<int32_t>(), epilogue,
             room ? StampedTickets::in(room->data_ptr()) : StampedTickets{}, counts, shape);
}

}  // namespace grouped_linear::cuda::sm80
