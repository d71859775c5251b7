// SPDX-License-Identifier: Apache-2.0
// Current and delayed scaling: one scale a group, of activations [T, K] in groups or weights [E, N,
// K].
//
// Bytes an element of bf16: 2 read, 1 written for q and 1 for q_t: 3 or 4 where the scale is known
// before (delayed scaling). A scale from the data themselves (current scaling) costs one more read,
// 5 or 6: the amax must be complete before the first element is quantized. Delayed scaling launches
// that pass, too, for groups without a scale, and it ends at once where there are none.
//
// The grid is a few waves of what the GPU holds at once, and thread blocks step through 128 x 128
// tiles, as in block.cuh. One scale serves both layouts, so q_t has the bytes of q, transposed.
#pragma once

#include "cuda/common/pdl.cuh"
#include "cuda/common/tile_locations.cuh"
#include "cuda/common/transposed_tile.cuh"
#include "cuda/quantize/bias_grad.cuh"

namespace grouped_linear::cuda {

// Raises a group's amax to the largest of a warp's values. Magnitudes of floats are ordered as
// integers, so the order of the warps does not matter. Most warps find a larger amax there already.
__device__ __forceinline__ void update_amax(uint32_t* group_amax, uint32_t float_bits) {
  float_bits = __reduce_max_sync(kFullWarp, float_bits);
  if (threadIdx.x % 32 == 0 && float_bits > *static_cast<volatile uint32_t*>(group_amax))
    atomicMax(group_amax, float_bits);
}

// amax [E], zero before: the largest finite magnitude of each group, as the bits of a float32.
// Reads nothing where refresh is given and false, and where scale_in is given only the groups whose
// scale is 0.
template <typename Element>
__global__ void __launch_bounds__(kTileThreads, kTileOccupancy<Element>)
    group_amax_kernel(const Element* x, int64_t x_stride, bool vectorised, GroupedMatrix groups,
                      const bool* refresh, const float* scale_in, uint32_t* amax) {
  grid_dependency_wait();
  if (refresh && !*refresh) return;
  if (scale_in) {
    bool any = false;
    for (int e = threadIdx.x; e < groups.E; e += kTileThreads) any |= scale_in[e] == 0;
    if (!__syncthreads_or(any)) return;
  }
  __shared__ GroupTable table;
  groups.for_each_tile<kTileSide, kTileThreads>(
      table, [&](const TileLocation& at, int, int col, int cols) {
        if (scale_in && scale_in[at.group] != 0) return;
        Fragment<Element> fragment;
        fragment.load(x + at.row_begin * x_stride + col, x_stride, at.rows, cols, vectorised);
        const uint32_t largest = fragment.template amax<true>();
        update_amax(&amax[at.group], __float_as_uint(Format<Element>::to_float(largest)));
      });
}

// A group's factor and scale: of scale_in, or from the amax where scale_in is null or 0 for it.
struct GroupScale {
  const uint32_t* amax;
  ScaleRule rule;
  float* scale_out;       // [E], written
  const float* scale_in;  // [E]

  __device__ __forceinline__ BlockScale of_amax(int e, float fp8_max) const {
    return block_scale(__uint_as_float(amax[e]), rule, fp8_max);
  }
  __device__ __forceinline__ bool is_given(int e) const { return scale_in && scale_in[e] != 0; }
  __device__ __forceinline__ float scale(int e, float fp8_max) const {
    return is_given(e) ? scale_in[e] : of_amax(e, fp8_max).scale;
  }
  __device__ __forceinline__ float factor(int e, float fp8_max) const {
    return is_given(e) ? __fdiv_rn(1.0f, scale_in[e]) : of_amax(e, fp8_max).factor;
  }
};

// Outputs that are not requested have null pointers.
struct PerGroupOutputs {
  uint8_t* q;                // as x
  uint8_t* q_t;              // [row blocks, K, 128], or [E, K, N] of a weight
  float* partial_bias_grad;  // [row blocks, K], see bias_grad.cuh
  uint32_t* amax;  // [E], raised to the largest magnitudes, or infinity for what is not finite
};

// FP8 of row i of a fragment, the first element in the lowest byte. Finite numbers saturate.
// has_nonfinite: some element of the fragment is not finite; cvt.satfinite would turn an infinity
// into the largest number.
template <typename Element, bool e5m2>
__device__ __forceinline__ uint2 quantize_row(const Fragment<Element>& fragment, int i,
                                              float factor, bool has_nonfinite) {
  constexpr auto format = e5m2 ? __NV_E5M2 : __NV_E4M3;
  const FragmentRow<Element>& row = fragment.words[i];
  float p[kFragmentSize];
#pragma unroll
  for (int c = 0; c < kFragmentSize; ++c)
    p[c] = __fmul_rn(Fragment<Element>::element(row, c), factor);
  uint2 quantized = to_fp8x8<format>(p);
  if (has_nonfinite) {
    constexpr uint32_t magnitude_bits = sizeof(Element) == 2 ? 0x7fff : 0x7fffffff;
#pragma unroll
    for (int c = 0; c < kFragmentSize; ++c) {
      const uint32_t bits = Fragment<Element>::bits(row, c), magnitude = bits & magnitude_bits;
      if (magnitude < Format<Element>::kInfinity) continue;
      const uint32_t sign =
          (bits > magnitude_bits ? 0x80 : 0) ^ (__float_as_uint(factor) >> 24 & 0x80);
      const bool infinity = e5m2 && magnitude == Format<Element>::kInfinity;
      const uint32_t byte = infinity ? 0x7c | sign : 0x7f;
      uint32_t& word = c < 4 ? quantized.x : quantized.y;
      word = (word & ~(0xffu << 8 * (c % 4))) | byte << 8 * (c % 4);
    }
  }
  return quantized;
}

// Changes nothing where refresh is given and false.
template <typename Element, bool e5m2>
__global__ void __launch_bounds__(kTileThreads, kTileOccupancy<Element>)
    quantize_per_group_kernel(const Element* x, int64_t x_stride, bool vectorised,
                              GroupedMatrix groups, GroupScale scale, const bool* refresh,
                              PerGroupOutputs out) {
  grid_dependency_wait();
  if (refresh && !*refresh) return;
  constexpr float fp8_max = e5m2 ? 57344.0f : 448.0f;
  __shared__ GroupTable table;
  __shared__ TileColumnSums sums;
  extern __shared__ uint4 per_group_shared[];  // a TransposedTile where q_t is asked for
  TransposedTile& transposed = *reinterpret_cast<TransposedTile*>(per_group_shared);

  const int K = groups.K;
  if (blockIdx.x == 0)
    for (int e = threadIdx.x; e < groups.E; e += kTileThreads)
      scale.scale_out[e] = scale.scale(e, fp8_max);

  groups.for_each_tile<kTileSide, kTileThreads>(table, [&](const TileLocation& at, int block,
                                                           int col, int cols) {
    Fragment<Element> fragment;
    fragment.load(x + at.row_begin * x_stride + col, x_stride, at.rows, cols, vectorised);
    const uint32_t largest = fragment.template amax<false>();
    const bool has_nonfinite = largest >= Format<Element>::kInfinity;
    if (out.amax) {
      const uint32_t bits = __float_as_uint(Format<Element>::to_float(largest));
      update_amax(&out.amax[at.group], has_nonfinite ? 0x7f800000 : bits);
    }
    if (out.partial_bias_grad) {
      sums.put(fragment);
      __syncthreads();
      const int c = threadIdx.x;
      if (c < cols)
        out.partial_bias_grad[static_cast<int64_t>(block) * K + col + c] = sums.column(c);
    }

    const float factor = scale.factor(at.group, fp8_max);
    const int fragment_row = Fragment<Element>::row() * kFragmentSize;
    const int fragment_col = Fragment<Element>::column() * kFragmentSize;
    const int64_t first =
        static_cast<int64_t>(at.row_begin + fragment_row) * K + col + fragment_col;
    QuantizedFragment quantized;
#pragma unroll
    for (int i = 0; i < kFragmentSize; ++i) {
      const uint2 bytes = quantize_row<Element, e5m2>(fragment, i, factor, has_nonfinite);
      quantized.set_row(i, bytes);
      if (out.q && fragment_row + i < at.rows && fragment_col < cols)
        *reinterpret_cast<uint2*>(out.q + first + static_cast<int64_t>(i) * K) = bytes;
    }

    if (out.q_t) {
      __syncthreads();  // sums and the tile before have been read
      quantized.put_transposed(transposed);
      __syncthreads();
      if (groups.offs)
        transposed.write(out.q_t + (static_cast<int64_t>(block) * K + col) * kTileSide, kTileSide,
                         kTileSide, cols);
      else
        transposed.write(out.q_t + (static_cast<int64_t>(at.group) * K + col) * groups.group_rows +
                             at.row_in_group,
                         groups.group_rows, at.rows, cols);
    }
    if (out.partial_bias_grad) __syncthreads();  // the next tile writes sums
  });
}

}  // namespace grouped_linear::cuda
