// SPDX-License-Identifier: Apache-2.0
// What the launchers of passes over 128 x 128 tiles share: the grid, the operand in groups, and the
// second launch for the bias gradient.
#pragma once

#include <algorithm>
#include <optional>

#include "cuda/common/launch.h"
#include "cuda/common/operands.h"
#include "cuda/common/tile_locations.cuh"
#include "cuda/quantize/bias_grad.cuh"
#include "cuda/quantize/weight.cuh"

namespace grouped_linear::cuda {

// One thread block a tile, but at most `waves` times as many as the GPU holds at once, `occupancy`
// on each multiprocessor.
inline unsigned tile_grid(const Launch& launch, int64_t tiles, int occupancy, int waves) {
  const int64_t most = int64_t{launch.multiprocessors()} * occupancy * waves;
  return static_cast<unsigned>(std::clamp<int64_t>(tiles, 1, most));
}

// Waves of per-group scaling and of MX. Each source of block scaling has its own number.
constexpr int kGroupWaves = 8;

// A thread block's static shared memory: 36 KB, or somewhat more for float32.
constexpr int kStaticTileSmem = 38 * 1024;

// Dynamic shared memory of a thread block that leaves room for so many on an SM of Hopper.
constexpr int kSmemForOneBlock = 100 * 1024, kSmemForTwoBlocks = 72 * 1024;

// The same on this GPU, whose SMs may have less: 100 KiB on 8.6, 8.9 and 12.0.
inline int smem_for_one_block(const Launch& launch) {
  return std::min(kSmemForOneBlock, launch.block_shared_bytes() - kStaticTileSmem);
}
inline int smem_for_two_blocks(const Launch& launch) {
  return std::clamp(launch.sm_shared_bytes() / 2 - kReservedSharedBytes - kStaticTileSmem, 0,
                    kSmemForTwoBlocks);
}

// The GPU would pack a small grid onto the first multiprocessors that the kernel before leaves, up
// to `occupancy` thread blocks on one, and the last of those would end late. Asking for more shared
// memory spreads them over all multiprocessors: [1024, 1024] in 8 groups takes 3.8 us instead of
// 6.4, [2048, 1024] 4.7 instead of 6.1 (a node of a graph, H200, 2026-11).
inline int smem_to_spread(const Launch& launch, unsigned grid, int occupancy) {
  const auto multiprocessors = static_cast<unsigned>(launch.multiprocessors());
  if (grid <= multiprocessors) return smem_for_one_block(launch);
  return grid <= 2 * multiprocessors && occupancy > 2 ? smem_for_two_blocks(launch) : 0;
}

// Launches a pass over tiles whose thread blocks need so many bytes of dynamic shared memory.
template <auto kernel, typename... Arguments>
void launch_over_tiles(const Launch& launch, unsigned grid, int shared_bytes, int occupancy,
                       const Arguments&... arguments) {
  launch.allow_shared_bytes<kernel>(smem_for_one_block(launch));
  launch.run(kernel, grid, kTileThreads,
             std::max(shared_bytes, smem_to_spread(launch, grid, occupancy)), arguments...);
}

// The input, dense in its last dimension: activations x [T, K] in groups, or a weight [E, N, K].
struct GroupedInput {
  GroupedInput(const Tensor& x, const Tensor& offs_in)
      : values(with_dense_rows(x)),
        offs(as_dense(offs_in)),
        row_stride(values.stride(0)),
        row_blocks(padded_rows(x.size(0), offs->size(0)) / kBlock),
        groups{data<int32_t>(*offs), static_cast<int>(offs->size(0)), static_cast<int>(x.size(0)),
               static_cast<int>(x.size(1)), 0} {}
  explicit GroupedInput(const Tensor& weight)
      : values(as_dense(weight)),
        row_stride(weight.size(2)),
        row_blocks(weight.size(0) * ceil_div(weight.size(1), kBlock)),
        groups{nullptr, static_cast<int>(weight.size(0)), 0, static_cast<int>(weight.size(2)),
               static_cast<int>(weight.size(1))} {}

  bool vectorised() const { return is_aligned(values) && row_stride * item_size(values) % 16 == 0; }
  unsigned grid(const Launch& launch, int occupancy) const {
    return tile_grid(launch, row_blocks * ceil_div(groups.K, kBlock), occupancy, kGroupWaves);
  }

  Tensor values;
  std::optional<Tensor> offs;
  int64_t row_stride, row_blocks;  // row_blocks: the most that there can be
  GroupedMatrix groups;
};

// The outputs of a weight [E, N, K], or of E of [N, K].
inline WeightOutputs outputs_of(const QuantizedWeight& w, int64_t N, int64_t K) {
  return {static_cast<int>(N), static_cast<int>(K), mutable_data_or_null<uint8_t>(w.q),
          mutable_data_or_null<uint8_t>(w.q_t), mutable_data<float>(w.scale)};
}

// The partial sums of bias_grad [E, K], which is empty unless requested.
class PartialBiasGrad {
 public:
  PartialBiasGrad(const Tensor& bias_grad, int64_t row_blocks) : bias_grad_(bias_grad) {
    if (bias_grad.numel() > 0)
      partial_ = new_tensor(bias_grad, {row_blocks, bias_grad.size(1)}, ScalarType::Float);
  }

  float* partial() const { return mutable_data_or_null<float>(partial_); }

  // Launches the sum into bias_grad, after the pass that has written the partial sums.
  void sum(const Launch& launch, const int32_t* offs, int T) const {
    if (!partial_) return;
    const int64_t E = bias_grad_.size(0), K = bias_grad_.size(1);
    const int64_t chunks = ceil_div(K, kBiasGradThreads);
    const int64_t blocks_y = std::clamp<int64_t>(8 * launch.multiprocessors() / chunks, 1, E);
    const dim3 grid(static_cast<unsigned>(chunks), static_cast<unsigned>(blocks_y));
    launch.run(sum_partial_bias_grad_kernel, grid, kBiasGradThreads, 0, partial(), offs,
               static_cast<int>(E), T, static_cast<int>(K), mutable_data<float>(bias_grad_));
  }

 private:
  Tensor bias_grad_;
  std::optional<Tensor> partial_;
};

}  // namespace grouped_linear::cuda
