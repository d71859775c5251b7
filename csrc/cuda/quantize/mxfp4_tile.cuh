// SPDX-License-Identifier: Apache-2.0
// A tile of a weight that learns in MXFP4: e4m3 numbers, the bits that mxfp4_e4m3.cuh makes of
// quantize_mxfp4's codes, without the codes.
//
// Some ten instructions an element besides those of a block-scaled tile, in kernels that memory
// bounds.
#pragma once

#include <optional>
#include <type_traits>

#include "cuda/common/transposed_tile.cuh"
#include "mxfp4_math.h"

namespace grouped_linear::cuda {

// Along what 32 numbers of a stored weight share a scale: nothing, its rows, or its columns, where
// it is stored as [E, K, N].
enum class Mxfp4 { kNone, kRows, kColumns };

// Calls run with the blocks along a dimension as std::integral_constant.
template <typename Run>
void for_mxfp4_blocks(std::optional<int64_t> dim, const Run& run) {
  if (!dim)
    run(std::integral_constant<Mxfp4, Mxfp4::kNone>());
  else if (*dim == -1)
    run(std::integral_constant<Mxfp4, Mxfp4::kRows>());
  else
    run(std::integral_constant<Mxfp4, Mxfp4::kColumns>());
}

template <typename Element>
struct Mxfp4Shared {
  uint32_t warp_largest[kTileWarps];
  ColumnAmax<Element> columns;
};

// Eight bytes in two registers.
struct PackedBytes {
  uint32_t words[2] = {};
  // i is a constant of an unrolled loop.
  __device__ __forceinline__ uint32_t get(int i) const { return words[i / 4] >> 8 * (i % 4) & 255; }
  __device__ __forceinline__ void add(int i, uint32_t byte) { words[i / 4] |= byte << 8 * (i % 4); }
};

// How a fragment's rows, or its columns, are rounded, and the tile's factor.
template <typename Element, Mxfp4 kBlocks>
struct Mxfp4Tile {
  static constexpr bool kByRows = kBlocks == Mxfp4::kRows;

  PackedBytes one_fields;  // see mxfp4::one_field
  uint32_t field;          // see mxfp4::factor_field

  // Called by all threads of a tile. Numbers of a block that has one which is not finite become NaN.
  __device__ __forceinline__ Mxfp4Tile(Fragment<Element>& w, Mxfp4Shared<Element>& shared) {
    uint32_t row_amax[kFragmentSize];
    FragmentRow<Element> col_amax;
    w.template find_amax_of<false>(row_amax, col_amax);
    PackedBytes scales;
    uint32_t largest = 0;
    const auto found = [&](int i, uint32_t amax) {
      const uint32_t scale = mxfp4::scale_of(Format<Element>::to_float(amax));
      scales.add(i, scale);
      largest = max(largest, scale == mxfp4::kNanScale ? 0 : scale);
      if (scale == mxfp4::kNanScale) make_nan(w, i);
    };
    if constexpr (kByRows) {  // four neighbours have a block's columns
#pragma unroll
      for (int i = 0; i < kFragmentSize; ++i) {
        const uint32_t amax = max(row_amax[i], __shfl_xor_sync(kFullWarp, row_amax[i], 1));
        found(i, max(amax, __shfl_xor_sync(kFullWarp, amax, 2)));
      }
    } else {  // two warps have a block's rows
      shared.columns.put(col_amax);
      __syncthreads();
      const int warp = threadIdx.x / 32, first = Fragment<Element>::column() * kFragmentSize;
#pragma unroll
      for (int c = 0; c < kFragmentSize; ++c)
        found(c, max(uint32_t{shared.columns.of_warps[warp & ~1][first + c]},
                     uint32_t{shared.columns.of_warps[warp | 1][first + c]}));
    }
    largest = __reduce_max_sync(kFullWarp, largest);
    if (threadIdx.x % 32 == 0) shared.warp_largest[threadIdx.x / 32] = largest;
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kTileWarps; ++i) largest = max(largest, shared.warp_largest[i]);
    field = mxfp4::factor_field(largest);
#pragma unroll
    for (int i = 0; i < kFragmentSize; ++i)
      one_fields.add(i, min(mxfp4::one_field(scales.get(i), field), 255u));
  }

  // Multiplies the tile's numbers to dequantize them.
  __device__ __forceinline__ float scale() const { return __uint_as_float((254 - field) << 23); }

  // e4m3 of row i of the fragment.
  __device__ __forceinline__ uint2 quantize_row(const Fragment<Element>& w, int i) const {
    const float factor = __uint_as_float(field << 23);
    float p[kFragmentSize];
#pragma unroll
    for (int c = 0; c < kFragmentSize; ++c)
      p[c] = mxfp4::round(__fmul_rn(w.element(w.words[i], c), factor),
                          one_fields.get(kByRows ? i : c));
    return to_fp8x8(p);
  }

 private:
  static __device__ __forceinline__ void make_nan(Fragment<Element>& w, int i) {
    constexpr int per_word = Word<Element>::kElements;
#pragma unroll
    for (int r = 0; r < kFragmentSize; ++r)
#pragma unroll
      for (int c = 0; c < kFragmentSize; ++c)
        if ((kByRows ? r : c) == i)
          w.words[r][c / per_word] |= per_word == 1 ? 0x7fffffffu : 0x7fffu << 16 * (c % per_word);
  }
};

}  // namespace grouped_linear::cuda
