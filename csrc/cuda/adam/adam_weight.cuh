// SPDX-License-Identifier: Apache-2.0
// A step of Adam over a master weight and its FP8 numbers: one pass reads the weight, the gradient
// and the moments, and writes the weight, q, q_t and the moments. A thread block has a tile of
// 128 x 128 numbers, which share a scale, and holds their new values in registers until it knows
// their amax.
//
// Bytes an element in bf16: 2 + 6 read, 2 + 1 + 1 + 4 written: 16. Torch's fused AdamW over a bf16
// parameter: 14.
// 8 x 4096 x 7168 at 2.8 TB/s: 1.1 ms.
#pragma once

#include "adam_math.h"
#include "cuda/common/pdl.cuh"
#include "cuda/quantize/weight.cuh"

namespace grouped_linear::cuda {

// Scalars on the device; null for those that were not given.
struct AdamScalars {
  const float *step, *lr, *grad_scale, *found_inf;
};

template <typename Element>
struct AdamTensors : WeightOutputs {
  Element* master;                                        // [E, N, K]
  Element *grad, *exp_avg, *exp_avg_sq, *max_exp_avg_sq;  // [E, N, K]; the last may be null
};

// A row of a thread's fragment.
template <typename Element>
struct AdamRow {
  FragmentRow<Element> weight, grad, exp_avg, exp_avg_sq, max_exp_avg_sq;

  template <bool amsgrad>
  __device__ __forceinline__ void load(const AdamTensors<Element>& t, int64_t i) {
    using Tile = Fragment<Element>;
    Tile::load_row(t.master + i, true, weight);
    Tile::load_row(t.grad + i, true, grad);
    Tile::load_row(t.exp_avg + i, true, exp_avg);
    Tile::load_row(t.exp_avg_sq + i, true, exp_avg_sq);
    if constexpr (amsgrad) Tile::load_row(t.max_exp_avg_sq + i, true, max_exp_avg_sq);
  }

  // Updates the row, stores its moments and master, and puts its new weights into w.
  template <bool amsgrad>
  __device__ __forceinline__ void update(const AdamTensors<Element>& t, int64_t i,
                                         const AdamStep& step, bool scaled, float grad_scale,
                                         FragmentRow<Element>& w) {
    using Tile = Fragment<Element>;
    float g[kFragmentSize], m[kFragmentSize], v[kFragmentSize], max_v[kFragmentSize];
    float values[kFragmentSize];
#pragma unroll
    for (int c = 0; c < kFragmentSize; ++c) {
      g[c] = Tile::element(grad, c);
      if (scaled) g[c] = step.unscaled(g[c], grad_scale);
      m[c] = Tile::element(exp_avg, c);
      v[c] = Tile::element(exp_avg_sq, c);
      if constexpr (amsgrad) max_v[c] = Tile::element(max_exp_avg_sq, c);
    }
    if (scaled) store(g, t.grad + i);
#pragma unroll
    for (int pair = 0; pair < kFragmentSize / 2; ++pair) {
      const int c = 2 * pair;
      const float2 old = make_float2(Tile::element(weight, c), Tile::element(weight, c + 1));
      values[c] = step.update(old.x, g[c], m[c], v[c], amsgrad ? max_v + c : nullptr);
      values[c + 1] =
          step.update(old.y, g[c + 1], m[c + 1], v[c + 1], amsgrad ? max_v + c + 1 : nullptr);
    }
    pack(values, w);
    Tile::store_row(w, t.master + i);
    store(m, t.exp_avg + i);
    store(v, t.exp_avg_sq + i);
    if constexpr (amsgrad) store(max_v, t.max_exp_avg_sq + i);
  }

  static __device__ __forceinline__ void pack(const float (&values)[kFragmentSize],
                                              FragmentRow<Element>& row) {
    constexpr int per_word = Word<Element>::kElements;
#pragma unroll
    for (int word = 0; word < Fragment<Element>::kWords; ++word)
      row[word] = Word<Element>::from_floats(values[word * per_word],
                                             values[word * per_word + per_word - 1]);
  }
  static __device__ __forceinline__ void store(const float (&values)[kFragmentSize], Element* to) {
    FragmentRow<Element> row;
    pack(values, row);
    Fragment<Element>::store_row(row, to);
  }
};

// Thread blocks on an SM: two hold 128 registers a thread each, which float32 exceeds, and float16
// with everything else (nvcc 13.0).
template <typename Element, bool amsgrad, Mxfp4 kBlocks>
constexpr int kAdamOccupancy =
    std::is_same_v<Element, float> ||
            (std::is_same_v<Element, __half> && amsgrad && kBlocks == Mxfp4::kRows)
        ? 1
        : kTileOccupancy<float>;

// Every tensor is aligned to 16 bytes. Changes nothing where found_inf is given and not zero.
template <typename Element, bool amsgrad, Mxfp4 kBlocks>
__global__ void __launch_bounds__(kTileThreads, kAdamOccupancy<Element, amsgrad, kBlocks>)
    adam_weight_kernel(AdamTensors<Element> t, AdamScalars scalars, AdamOptions options,
                       ScaleRule rule) {
  grid_dependency_wait();
  if (scalars.found_inf && *scalars.found_inf != 0) return;
  __shared__ TransposedTile transposed;

  const TileOfWeight at(blockIdx.x, t.N, t.K);
  const int64_t first = at.first;
  const int valid = at.valid_rows(), K = t.K;

  // The next row is loaded while one is computed, where there are registers for it.
  constexpr bool kAhead =
      (sizeof(Element) == 2 && !amsgrad) || kAdamOccupancy<Element, amsgrad, kBlocks> == 1;
  AdamRow<Element> next;
  if (kAhead && 0 < valid) next.template load<amsgrad>(t, first);
  const bool scaled = scalars.grad_scale;
  const AdamStep step(options, scalars.lr ? *scalars.lr : options.lr, *scalars.step);
  const float grad_scale = scaled ? *scalars.grad_scale : 1;
  Fragment<Element> w;
  WeightTile<Element, kBlocks> tile;
#pragma unroll
  for (int i = 0; i < kFragmentSize; ++i) {
    AdamRow<Element> current = next;
    const int load = kAhead ? i + 1 : i;
    if (load < kFragmentSize && load < valid)
      (kAhead ? next : current).template load<amsgrad>(t, first + static_cast<int64_t>(load) * K);
#pragma unroll
    for (int c = 0; c < Fragment<Element>::kWords; ++c) w.words[i][c] = 0;
    if (i < valid)
      current.template update<amsgrad>(t, first + static_cast<int64_t>(i) * K, step, scaled,
                                       grad_scale, w.words[i]);
    tile.add_row(w, i);
  }

  tile.finish(w, rule);
  if (threadIdx.x == 0) t.scale[blockIdx.x] = tile.scale();
  QuantizedFragment quantized;
#pragma unroll
  for (int i = 0; i < kFragmentSize; ++i) {
    const uint2 bytes = tile.quantize_row(w, i);
    quantized.set_row(i, bytes);
    if (i < valid) *reinterpret_cast<uint2*>(t.q + first + static_cast<int64_t>(i) * K) = bytes;
  }
  if (t.q_t) at.store_transposed(quantized, transposed, t.q_t);
}

}  // namespace grouped_linear::cuda
