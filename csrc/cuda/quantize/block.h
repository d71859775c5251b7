// SPDX-License-Identifier: Apache-2.0
// Block scaling of activations: what its ops share, whatever they read.
#pragma once

#include "cuda/quantize/block.cuh"
#include "cuda/quantize/launch_tiles.h"
#include "ops.h"

namespace grouped_linear::cuda {

// The requested results of [T, K] in E groups.
struct BlockResults : Quantized {
  int64_t T, K, E;

  BlockResults(const Quantized& given, int64_t T, int64_t K, int64_t E)
      : Quantized(given), T(T), K(K), E(E) {}
  BlockResults(const Tensor& like, int64_t T, int64_t K, int64_t E, bool rowwise, bool columnwise,
               bool bias_grad, bool share_scales = false)
      : BlockResults({new_tensor, like, {T, K, E, rowwise, columnwise, bias_grad}, share_scales}, T,
                     K, E) {}

  BlockOutputs outputs() const {
    BlockOutputs out{};
    if (q.numel() > 0) {
      out.q = mutable_data<uint8_t>(q);
      out.scale = mutable_data<float>(scale);
      out.scale_stride = scale.size(1);
    }
    if (q_t.numel() > 0) {
      out.q_t = mutable_data<uint8_t>(q_t);
      out.scale_t = mutable_data<float>(scale_t);
      out.share_scales = share_scales;
    }
    return out;
  }
  // The most tiles that there can be, with so many in a row of tiles.
  int64_t most_tiles(int64_t col_blocks) const {
    const bool by_group = bias_grad.numel() > 0 || q_t.numel() > 0;
    return (by_group ? padded_rows(T, E) / kBlock : ceil_div(T, kBlock)) * col_blocks;
  }
  void zero_bias_grad() {
    if (bias_grad.numel() > 0) torch::stable::zero_(bias_grad);
  }
  void zero() {
    for (Tensor* t : {&q, &scale, &q_t, &scale_t, &bias_grad})
      if (t->numel() > 0) torch::stable::zero_(*t);
  }
};

template <typename Source>
unsigned grid_of(const Launch& launch, int64_t tiles, int64_t E) {
  constexpr Waves waves = Source::kWaves;
  return tile_grid(launch, tiles, Source::kOccupancy,
                   E <= 32 ? waves.few_groups : waves.many_groups);
}

template <typename Element>
Rows<Element> rows_of(const Tensor& x) {
  return {data<Element>(x), x.stride(0), has_aligned_rows(x)};
}

// Passes that gather or compute what they quantize take bfloat16 alone. FP16 and float32 take two
// passes, with the same bits: their fused kernels would be half of this folder's machine code and
// build time.
using FusedElement = __nv_bfloat16;
inline bool has_fused_sources(ScalarType dtype) { return dtype == ScalarType::BFloat16; }

template <typename Source>
constexpr bool kSingleRows = requires { Source::kSingleRows; };

// One pass over a source, and the sum of the partial bias gradients.
template <typename Element, typename Source>
void quantize_tiles(const Launch& launch, const Source& source, const Tensor& offs, ScaleRule rule,
                    const BlockResults& results) {
  if constexpr (kSingleRows<Source>) {
    const bool rowwise_alone = results.q_t.numel() == 0 && results.bias_grad.numel() == 0;
    const int64_t blocks = ceil_div(results.K, kBlock);
    if (rowwise_alone && ceil_div(results.T, kBlock) * blocks < launch.multiprocessors())
      return launch.run(
          quantize_single_rows_kernel<Element, Source>,
          static_cast<unsigned>(ceil_div(results.T * blocks * kFragmentsPerSide, kTileThreads)),
          kTileThreads, 0, source, static_cast<int>(results.T), static_cast<int>(results.K), rule,
          results.outputs());
  }
  const PartialBiasGrad sums(results.bias_grad, padded_rows(results.T, results.E) / kBlock);
  BlockOutputs out = results.outputs();
  out.partial_bias_grad = sums.partial();

  const int64_t tiles = results.most_tiles(ceil_div(results.K / Source::kParts, kBlock));
  const auto rows = static_cast<int>(results.T);
  constexpr int buffer = static_cast<int>(sizeof(typename Source::Buffer));
  static_assert(buffer <= 61 * 1024,
                "a block of every GPU has room for it: see smem_for_one_block");
  launch_over_tiles<group_quantize_kernel<Element, Source>>(
      launch, grid_of<Source>(launch, tiles, results.E), buffer, Source::kOccupancy, source,
      data<int32_t>(offs), static_cast<int>(results.E), rows, static_cast<int>(results.K), rule,
      out);
  sums.sum(launch, data<int32_t>(offs), rows);
}

}  // namespace grouped_linear::cuda
