// What the launchers of passes over 128 x 128 tiles share.
#pragma once

#include <algorithm>
#include <limits>

#include "cuda/common/launch.h"
#include "cuda/common/operands.h"
#include "cuda/quantize/group_quantize.cuh"
#include "cuda/quantize/quantize_weight.cuh"

namespace grouped_linear::cuda {

// offs are int32, so no group reaches rows past these; a block past the end must be countable.
inline int countable_rows(int64_t T) {
  return static_cast<int>(std::min<int64_t>(T, std::numeric_limits<int32_t>::max() - kBlock));
}

// Of blocks, for one scale a group and for MX: see tile_grid. Block scaling's sources have their own.
constexpr int kGenerations = 8;

inline WeightQuantized pointers_of(const QuantizedWeight& out) {
  const auto bytes = [](const Tensor& t) { return static_cast<uint8_t*>(t.mutable_data_ptr()); };
  return {static_cast<int>(out.q.size(1)), static_cast<int>(out.q.size(2)), bytes(out.q),
          out.q_t && out.q_t->numel() > 0 ? bytes(*out.q_t) : nullptr,
          out.scale.mutable_data_ptr<float>()};
}

// As many blocks as there can be tiles, and at most some generations of those that the GPU holds at
// once, `occupancy` a multiprocessor.
inline unsigned tile_grid(const Launch& launch, int64_t tiles, int occupancy, int generations) {
  const int64_t most = int64_t{launch.multiprocessors()} * occupancy * generations;
  return static_cast<unsigned>(std::clamp<int64_t>(tiles, 1, most));
}

// Shared memory that leaves a multiprocessor room for so many blocks, beside their 36 KB.
constexpr int kRoomForOne = 100 * 1024, kRoomForTwo = 72 * 1024;

// The GPU would pack few blocks on the first multiprocessors that the kernel before leaves, up to `occupancy`
// on one, and the last of those would end late. What they ask for spreads them over all: [1024, 1024] in 8
// groups takes 3.8 us instead of 6.4, [2048, 1024] 4.7 instead of 6.1 (a node of a graph, H200, 2026-11).
inline int spreading_bytes(const Launch& launch, unsigned grid, int occupancy) {
  const auto multiprocessors = static_cast<unsigned>(launch.multiprocessors());
  if (grid <= multiprocessors) return kRoomForOne;
  return grid <= 2 * multiprocessors && occupancy > 2 ? kRoomForTwo : 0;
}

// A pass over tiles, whose blocks need so many bytes of shared memory.
template <auto kernel, typename... Arguments>
void run_over_tiles(const Launch& launch, unsigned grid, int shared_bytes, int occupancy,
                    const Arguments&... arguments) {
  launch.allow_shared_bytes<kernel>(kRoomForOne);
  launch.run(kernel, grid, kTileThreads,
             std::max(shared_bytes, spreading_bytes(launch, grid, occupancy)), arguments...);
}

// bias_grad [E, K] from the sums of every block's columns.
inline void add_block_sums(const Launch& launch, const float* block_sums, const int32_t* offs,
                           int T, const Tensor& bias_grad) {
  const int64_t E = bias_grad.size(0), K = bias_grad.size(1), chunks = ceil_div(K, kSumThreads);
  const int64_t blocks_y = std::clamp<int64_t>(8 * launch.multiprocessors() / chunks, 1, E);
  const dim3 grid(static_cast<unsigned>(chunks), static_cast<unsigned>(blocks_y));
  launch.run(add_block_sums_kernel, grid, kSumThreads, 0, block_sums, offs, static_cast<int>(E), T,
             static_cast<int>(K), static_cast<float*>(bias_grad.mutable_data_ptr()));
}

}  // namespace grouped_linear::cuda
