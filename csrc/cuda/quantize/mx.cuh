// SPDX-License-Identifier: Apache-2.0
// MXFP8: a scale (e8m0) for each 32 features of a row, or for each 32 rows of a feature.
//
// In a 128 x 128 tile, a rowwise block is four fragments side by side. A columnwise block is four
// fragments one below the other, which two warps hold.
//
// Bytes an element of bf16: 2 read; 1 + 1/32 written for each layout of group_quantize_mx, 2 for
// each of group_round_mx: 4.06 or 6 for both. 32768 x 7168 at the 4.27 TB/s of a copy: 223 us and
// 330 us.
#pragma once

#include "cuda/common/pdl.cuh"
#include "cuda/common/tile_locations.cuh"
#include "cuda/common/transposed_tile.cuh"
#include "cuda/quantize/bias_grad.cuh"

namespace grouped_linear::cuda {

constexpr int kFragmentsPerMxBlock = 32 / kFragmentSize;

// Outputs that are not requested have null pointers.
struct MxOutputs {
  uint8_t* q;                // [T, K]
  uint8_t* scale;            // [T, ceil(K / 32)]
  uint8_t* q_t;              // [row blocks, K, 128]
  uint8_t* scale_t;          // [row blocks, K, 4]
  uint16_t* rowwise;         // [T, K] bf16
  uint16_t* columnwise;      // [T, K] bf16
  float* partial_bias_grad;  // [row blocks, K], see bias_grad.cuh
};

// The exponent, with a bias of 127, of the smallest power of two by which amax comes to at most
// 448, within [2^-124, 2^119]. See cpu/mx.cpp.
__device__ __forceinline__ uint32_t mx_exponent(uint32_t amax_bits) {
  const int exponent = static_cast<int>((amax_bits + 0x1fffff) >> 23) - 8;
  return static_cast<uint32_t>(min(max(exponent, 127 - 124), 127 + 119));
}
__device__ __forceinline__ float mx_scale(uint32_t exponent) {
  return __uint_as_float(exponent << 23);
}
__device__ __forceinline__ float mx_factor(uint32_t exponent) {
  return __uint_as_float((254 - exponent) << 23);
}

// Two e4m3 numbers times their scales, as bf16 and exactly.
__device__ __forceinline__ uint32_t dequantize_pair(uint32_t bytes, float low, float high) {
  const float2 two = from_e4m3x2(bytes);
  return dequantized_bits<__nv_bfloat16>(__fmul_rn(two.x, low)) |
         dequantized_bits<__nv_bfloat16>(__fmul_rn(two.y, high)) << 16;
}

// Thread blocks that an SM must hold at once.
template <typename Element>
constexpr int kMxOccupancy = sizeof(Element) == 2 ? 3 : 2;

// Where the calling thread's fragment of a tile is.
struct MxFragment {
  TileLocation at;
  int col, cols, K;                // of the tile; of the matrix
  int64_t column;                  // the tile's first in columnwise results
  int fragment_row, fragment_col;  // in the tile

  __device__ __forceinline__ bool inside(int i) const {
    return fragment_row + i < at.rows && fragment_col < cols;
  }
  // Its element of row i.
  __device__ __forceinline__ int64_t element(int i) const {
    return static_cast<int64_t>(at.row_begin + fragment_row + i) * K + col + fragment_col;
  }
};

// row_amax: of the fragment.
template <bool rounded, typename Element>
__device__ __forceinline__ void store_mx_rows(const Fragment<Element>& fragment,
                                              const uint32_t (&row_amax)[kFragmentSize],
                                              const MxFragment& to, const MxOutputs& out) {
#pragma unroll
  for (int i = 0; i < kFragmentSize; ++i) {
    uint32_t amax = row_amax[i];
#pragma unroll
    for (int distance = 1; distance < kFragmentsPerMxBlock; distance *= 2)
      amax = max(amax, __shfl_xor_sync(kFullWarp, amax, distance));
    const uint32_t exponent = mx_exponent(__float_as_uint(Format<Element>::to_float(amax)));
    const uint2 bytes = fragment.quantize_row(i, mx_factor(exponent));
    if (!to.inside(i)) continue;
    if constexpr (rounded) {
      const float s = mx_scale(exponent);
      *reinterpret_cast<uint4*>(out.rowwise + to.element(i)) =
          make_uint4(dequantize_pair(bytes.x, s, s), dequantize_pair(bytes.x >> 16, s, s),
                     dequantize_pair(bytes.y, s, s), dequantize_pair(bytes.y >> 16, s, s));
    } else {
      *reinterpret_cast<uint2*>(out.q + to.element(i)) = bytes;
      if (threadIdx.x % kFragmentsPerMxBlock == 0) {
        const int64_t row = to.at.row_begin + to.fragment_row + i;
        out.scale[row * ((to.K + 31) / 32) + (to.col + to.fragment_col) / 32] =
            static_cast<uint8_t>(exponent);
      }
    }
  }
}

// exponent: of the scales of the fragment's columns.
template <typename Element>
__device__ __forceinline__ void store_mx_rounded_columns(const Fragment<Element>& fragment,
                                                         const uint32_t (&exponent)[kFragmentSize],
                                                         const MxFragment& to,
                                                         const MxOutputs& out) {
#pragma unroll
  for (int i = 0; i < kFragmentSize; ++i) {
    if (!to.inside(i)) continue;
    uint32_t words[kFragmentSize / 2];
#pragma unroll
    for (int c = 0; c < kFragmentSize; c += 4) {
      float p[4];
#pragma unroll
      for (int j = 0; j < 4; ++j)
        p[j] = __fmul_rn(fragment.element(fragment.words[i], c + j), mx_factor(exponent[c + j]));
      const uint32_t bytes = to_fp8x4(p[0], p[1], p[2], p[3]);
      words[c / 2] = dequantize_pair(bytes, mx_scale(exponent[c]), mx_scale(exponent[c + 1]));
      words[c / 2 + 1] =
          dequantize_pair(bytes >> 16, mx_scale(exponent[c + 2]), mx_scale(exponent[c + 3]));
    }
    *reinterpret_cast<uint4*>(out.columnwise + to.element(i)) =
        make_uint4(words[0], words[1], words[2], words[3]);
  }
}
template <typename Element>
__device__ __forceinline__ void store_mx_columns(const Fragment<Element>& fragment,
                                                 const uint32_t (&exponent)[kFragmentSize],
                                                 TransposedTile& transposed, const MxFragment& to,
                                                 const MxOutputs& out) {
  const int part = to.fragment_row / 32;
#pragma unroll
  for (int c = 0; c < kFragmentSize; ++c) {
    transposed.put(c, fragment.quantize_column(c, mx_factor(exponent[c])));
    if (to.fragment_row % 32 == 0 && to.fragment_col < to.cols)
      out.scale_t[(to.column + to.fragment_col + c) * 4 + part] = static_cast<uint8_t>(exponent[c]);
  }
  __syncthreads();
  transposed.write(out.q_t + to.column * kTileSide, kTileSide, kTileSide, to.cols);
}

// Writes rowwise and columnwise where `rounded` is true, else q and q_t with their scales. Changes
// nothing where refresh is given and false.
template <typename Element, bool rounded>
__global__ void __launch_bounds__(kTileThreads, kMxOccupancy<Element>)
    group_mx_kernel(const Element* x, int64_t x_stride, bool vectorised, GroupedMatrix groups,
                    const bool* refresh, MxOutputs out) {
  grid_dependency_wait();
  if (refresh && !*refresh) return;
  __shared__ GroupTable table;
  __shared__ ColumnAmax<Element> column_amax;
  __shared__ TileColumnSums sums;
  extern __shared__ uint4 mx_shared[];  // a TransposedTile where q_t is asked for
  TransposedTile& transposed = *reinterpret_cast<TransposedTile*>(mx_shared);

  const int fragment_row = Fragment<Element>::row() * kFragmentSize;
  const int fragment_col = Fragment<Element>::column() * kFragmentSize;
  const bool rowwise = rounded ? out.rowwise != nullptr : out.q != nullptr;
  const bool columnwise = rounded ? out.columnwise != nullptr : out.q_t != nullptr;

  groups.for_each_tile<kTileSide, kTileThreads>(
      table, [&](const TileLocation& at, int block, int col, int cols) {
        const int64_t column = static_cast<int64_t>(block) * groups.K + col;
        const MxFragment to{at, col, cols, groups.K, column, fragment_row, fragment_col};
        Fragment<Element> fragment;
        fragment.load(x + at.row_begin * x_stride + col, x_stride, at.rows, cols, vectorised);
        if (out.partial_bias_grad) {
          sums.put(fragment);
          __syncthreads();
          if (static_cast<int>(threadIdx.x) < cols)
            out.partial_bias_grad[column + threadIdx.x] = sums.column(threadIdx.x);
        }
        uint32_t row_amax[kFragmentSize];
        FragmentRow<Element> col_amax;
        fragment.find_amax(row_amax, col_amax);
        if (rowwise) store_mx_rows<rounded>(fragment, row_amax, to, out);
        if (columnwise) {
          column_amax.put(col_amax);
          __syncthreads();  // column_amax is complete, sums have been read
          uint32_t exponent[kFragmentSize];
#pragma unroll
          for (int c = 0; c < kFragmentSize; ++c) {
            const uint32_t amax = column_amax.of_two_warps(to.fragment_col + c);
            exponent[c] = mx_exponent(__float_as_uint(Format<Element>::to_float(amax)));
          }
          if constexpr (rounded)
            store_mx_rounded_columns(fragment, exponent, to, out);
          else
            store_mx_columns(fragment, exponent, transposed, to, out);
        }
        // The next tile writes shared memory that this one reads.
        if (columnwise || out.partial_bias_grad) __syncthreads();
      });
}

}  // namespace grouped_linear::cuda
