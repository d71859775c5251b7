// SPDX-License-Identifier: Apache-2.0
// A tile of a weight that learns in MXFP4: e4m3 numbers, the bits that mxfp4_e4m3.cuh makes of
// quantize_mxfp4's codes, without the codes.
//
// Besides those of a block-scaled tile some five instructions an element in BF16, and ten in FP16
// and float32, in kernels that memory bounds.
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

// mxfp4::round of two bf16 numbers, in half of the instructions: 1.5 * 2^(e + 6) rounds bf16's
// eight bits where float32's 24 take 1.5 * 2^(e + 22). one_fields: a field in each half.
__device__ __forceinline__ uint32_t round_mxfp4_pair(uint32_t pair, uint32_t one_fields) {
  constexpr uint32_t kSigns = 0x80008000, kFields = 0x7f807f80,
                     kAnchor = (6u << 7 | 1u << 6) * 0x10001;
  const auto as_pair = [](uint32_t bits) {
    return *reinterpret_cast<const __nv_bfloat162*>(&bits);
  };
  const auto bits_of = [](__nv_bfloat162 p) { return *reinterpret_cast<const uint32_t*>(&p); };
  const uint32_t one = one_fields << 7;
  const __nv_bfloat162 most = __hmul2_rn(as_pair(one), __float2bfloat162_rn(6));
  const __nv_bfloat162 magnitude = __hmin2_nan(as_pair(pair & ~kSigns), most);
  const __nv_bfloat162 anchor =
      as_pair(__viaddmax_u16x2(bits_of(magnitude) & kFields, kAnchor, one + kAnchor));
  return bits_of(__hsub2_rn(__hadd2_rn(magnitude, anchor), anchor)) | (pair & kSigns);
}

// How a fragment's rows, or its columns, are rounded, and the tile's factor. For each row
// add_row(), then finish(), by all threads of a tile.
template <typename Element, Mxfp4 kBlocks>
class Mxfp4Tile {
  static constexpr bool kByRows = kBlocks == Mxfp4::kRows;
  static constexpr int kWords = Fragment<Element>::kWords;

  uint32_t fields_[kFragmentSize];  // scales of blocks, then mxfp4::one_field
  uint32_t factor_field_;
  FragmentRow<Element> col_amax_ = {};

 public:
  // Row i of the fragment has its numbers. A NaN has the largest magnitude.
  __device__ __forceinline__ void add_row(const Fragment<Element>& w, int i) {
    uint32_t row = 0;
#pragma unroll
    for (int c = 0; c < kWords; ++c) {
      const uint32_t magnitudes = w.words[i][c] & Word<Element>::kMagnitudes;
      row = Word<Element>::max(row, magnitudes);
      if constexpr (!kByRows) col_amax_[c] = Word<Element>::max(col_amax_[c], magnitudes);
    }
    if constexpr (kByRows) {  // four neighbours have a block's columns
      uint32_t amax = Word<Element>::largest(row);
      amax = max(amax, __shfl_xor_sync(kFullWarp, amax, 1));
      amax = max(amax, __shfl_xor_sync(kFullWarp, amax, 2));
      fields_[i] = mxfp4::scale_of(Format<Element>::to_float(amax));
    }
  }

  // Numbers of a block that has one which is not finite become NaN.
  __device__ __forceinline__ void finish(Fragment<Element>& w, ScaleRule) {
    if constexpr (!kByRows) {  // two warps have a block's rows
      __shared__ ColumnAmax<Element> columns;
      columns.put(col_amax_);
      __syncthreads();
      const int first = Fragment<Element>::column() * kFragmentSize;
#pragma unroll
      for (int c = 0; c < kFragmentSize; ++c)
        fields_[c] = mxfp4::scale_of(Format<Element>::to_float(columns.of_two_warps(first + c)));
    }
    uint32_t largest = 0;
#pragma unroll
    for (int i = 0; i < kFragmentSize; ++i) {
      if (fields_[i] == mxfp4::kNanScale) make_nan(w, i), fields_[i] = 0;
      largest = max(largest, fields_[i]);
    }
    factor_field_ = mxfp4::factor_field(max_of_tile(largest));
#pragma unroll
    for (int i = 0; i < kFragmentSize; ++i)
      fields_[i] = mxfp4::one_field(fields_[i], factor_field_);
  }

  // Multiplies the tile's numbers to dequantize them.
  __device__ __forceinline__ float scale() const {
    return __uint_as_float((254 - factor_field_) << 23);
  }

  // e4m3 of row i of the fragment.
  __device__ __forceinline__ uint2 quantize_row(const Fragment<Element>& w, int i) const {
    float p[kFragmentSize];
    const auto of = [&](int c) { return fields_[kByRows ? i : c]; };
    if constexpr (std::is_same_v<Element, __nv_bfloat16>) {
      const __nv_bfloat162 factor = __float2bfloat162_rn(__uint_as_float(factor_field_ << 23));
#pragma unroll
      for (int c = 0; c < kFragmentSize; c += 2) {
        const __nv_bfloat162 scaled =
            __hmul2_rn(*reinterpret_cast<const __nv_bfloat162*>(&w.words[i][c / 2]), factor);
        const uint32_t rounded =
            round_mxfp4_pair(*reinterpret_cast<const uint32_t*>(&scaled), of(c) | of(c + 1) << 16);
        p[c] = __uint_as_float(rounded << 16), p[c + 1] = __uint_as_float(rounded & 0xffff0000);
      }
    } else {
#pragma unroll
      for (int c = 0; c < kFragmentSize; ++c)
        p[c] = mxfp4::round(
            __fmul_rn(w.element(w.words[i], c), __uint_as_float(factor_field_ << 23)), of(c));
    }
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
