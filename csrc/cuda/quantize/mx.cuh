// MXFP8 in 128 x 128 tiles: blocks of 32 features of a row (four patches side by side) and of 32
// rows of a feature (four patches above each other, which two warps hold).
//
// Bytes an element of bf16: 2 read; 1 + 1/32 written for each layout of group_quantize_mx, 2 for
// each of group_round_mx: 4.06 or 6 for both; 32768 x 7168 at the 4.27 TB/s of a copy: 223 us and
// 330 us.
#pragma once

#include "cuda/common/pdl.cuh"
#include "cuda/quantize/group_quantize.cuh"
#include "cuda/quantize/tile_sums.cuh"

namespace grouped_linear::cuda {

constexpr int kMxPatches = 32 / kPatch;  // patches along a block

// Where the results go; null for what is not asked for.
struct MxOutputs {
  uint8_t* q;            // [T, K]
  uint8_t* scale;        // [T, ceil(K / 32)]
  uint8_t* q_t;          // [blocks, K, 128]
  uint8_t* scale_t;      // [blocks, K, 4]
  uint16_t* rowwise;     // [T, K] bf16
  uint16_t* columnwise;  // [T, K] bf16
  float* block_sums;     // [blocks, K], see GroupQuantized
};

// See cpu/mx.cpp: the smallest power of two that brings amax to at most 448, with a bias of 127,
// inside [2^-124, 2^119].
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

// Two e4m3 numbers times their scales as bf16, exactly; NaN in the CPU's encoding.
__device__ __forceinline__ uint32_t dequantize_pair(uint32_t bytes, float low, float high) {
  const float2 two = __half22float2(
      __nv_cvt_fp8x2_to_halfraw2(static_cast<__nv_fp8x2_storage_t>(bytes & 0xffff), __NV_E4M3));
  const auto bf16 = [](float v) -> uint32_t {
    return v != v ? 0x7fc0 : __bfloat16_as_ushort(__float2bfloat16_rn(v));
  };
  return bf16(__fmul_rn(two.x, low)) | bf16(__fmul_rn(two.y, high)) << 16;
}

// Element (i, c) of a patch; i and c are constants of unrolled loops.
template <typename Element>
__device__ __forceinline__ float mx_value(const Patch<Element>& patch, int i, int c) {
  constexpr int per_word = Word<Element>::kElements;
  const uint32_t word = patch.words[i][c / per_word];
  if constexpr (per_word == 1)
    return Format<Element>::to_float(word);
  else
    return Format<Element>::to_float(c % 2 == 0 ? word & 0xffff : word >> 16);
}

// Blocks a multiprocessor.
template <typename Element>
constexpr int kMxOccupancy = sizeof(Element) == 2 ? 3 : 2;

// The table of a weight: `group_rows` rows of every expert. Ends with a barrier.
__device__ __forceinline__ void load_experts(GroupTable& table, int E, int group_rows) {
  for (int e = threadIdx.x; e < E; e += kTileThreads) {
    table.row_end[e] = (e + 1) * group_rows;
    table.tile_end[e] = (e + 1) * ((group_rows + kTile - 1) / kTile);
  }
  __syncthreads();
}

// rounded: rowwise and columnwise are asked for, else q and q_t with their scales. offs: null for a
// weight of E times T rows. Where refresh is given and false, not a byte changes.
template <typename Element, bool rounded>
__global__ void __launch_bounds__(kTileThreads, kMxOccupancy<Element>)
    group_mx_kernel(const Element* x, int64_t x_stride, bool vectorised, const int32_t* offs, int E,
                    int T, int K, const bool* refresh, MxOutputs out) {
  grid_dependency_wait();
  if (refresh && !*refresh) return;
  using Bits = typename Format<Element>::Bits;
  constexpr int kWords = Patch<Element>::kWords;
  __shared__ GroupTable table;
  alignas(16) __shared__ Bits warp_amax[kTileWarps][kTile];
  __shared__ TileSums sums;
  extern __shared__ uint4 mx_shared[];  // where q_t is asked for
  TurnedTile* turned = reinterpret_cast<TurnedTile*>(mx_shared);

  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int patch_row = Patch<Element>::row() * kPatch;
  const int patch_col = Patch<Element>::column() * kPatch;
  const int row_scales = (K + 31) / 32;
  const bool rowwise = rounded ? out.rowwise != nullptr : out.q != nullptr;
  const bool columnwise = rounded ? out.columnwise != nullptr : out.q_t != nullptr;

  if (offs)
    load_groups<kTileThreads>(table, offs, E, T, TilesOf{kTile});
  else
    load_experts(table, E, T);
  const int col_blocks = (K + kTile - 1) / kTile;
  const int64_t count = static_cast<int64_t>(table.tile_end[E - 1]) * col_blocks;
  for (int64_t t = blockIdx.x; t < count; t += gridDim.x) {
    const int block = static_cast<int>(t / col_blocks);
    const int e = table.group_of_tile(block, E);
    const int row_begin = table.row_begin(e) + (block - table.tile_begin(e)) * kTile;
    const int rows = min(kTile, table.row_end[e] - row_begin);
    const int col = static_cast<int>(t % col_blocks) * kTile, cols = min(kTile, K - col);
    const int64_t column = static_cast<int64_t>(block) * K + col;  // of q_t and of block_sums
    const bool inside = patch_col < cols;

    Patch<Element> patch;
    patch.load(x + row_begin * x_stride + col, x_stride, rows, cols, vectorised);
    if (out.block_sums) {
      sums.put(patch);
      __syncthreads();
      if (static_cast<int>(threadIdx.x) < cols)
        out.block_sums[column + threadIdx.x] = sums.column(threadIdx.x);
    }
    uint32_t row_amax[kPatch], col_amax[kWords];
    patch.find_amax(row_amax, col_amax);  // and what is not finite becomes NaN

    if (rowwise) {
#pragma unroll
      for (int i = 0; i < kPatch; ++i) {
        uint32_t amax = row_amax[i];
#pragma unroll
        for (int distance = 1; distance < kMxPatches; distance *= 2)
          amax = max(amax, __shfl_xor_sync(kFullWarp, amax, distance));
        const uint32_t exponent = mx_exponent(__float_as_uint(Format<Element>::to_float(amax)));
        const uint2 bytes = patch.quantize_row(i, mx_factor(exponent));
        if (patch_row + i >= rows || !inside) continue;
        const int64_t row = row_begin + patch_row + i;
        if constexpr (rounded) {
          const float s = mx_scale(exponent);
          *reinterpret_cast<uint4*>(out.rowwise + row * K + col + patch_col) =
              make_uint4(dequantize_pair(bytes.x, s, s), dequantize_pair(bytes.x >> 16, s, s),
                         dequantize_pair(bytes.y, s, s), dequantize_pair(bytes.y >> 16, s, s));
        } else {
          *reinterpret_cast<uint2*>(out.q + row * K + col + patch_col) = bytes;
          if (lane % kMxPatches == 0)
            out.scale[row * row_scales + (col + patch_col) / 32] = static_cast<uint8_t>(exponent);
        }
      }
    }

    if (columnwise) {
#pragma unroll
      for (int w = 0; w < kWords; ++w)
        col_amax[w] =
            Word<Element>::max(col_amax[w], __shfl_xor_sync(kFullWarp, col_amax[w], kPatches));
      if (lane < kPatches) {
        uint4* amax = reinterpret_cast<uint4*>(&warp_amax[warp][patch_col]);
#pragma unroll
        for (int v = 0; v < kWords / 4; ++v)
          amax[v] = make_uint4(col_amax[4 * v], col_amax[4 * v + 1], col_amax[4 * v + 2],
                               col_amax[4 * v + 3]);
      }
      __syncthreads();  // warp_amax is complete, the sums have been used
      uint32_t exponent[kPatch];
#pragma unroll
      for (int c = 0; c < kPatch; ++c) {
        const uint32_t amax = max(uint32_t{warp_amax[warp & ~1][patch_col + c]},
                                  uint32_t{warp_amax[warp | 1][patch_col + c]});
        exponent[c] = mx_exponent(__float_as_uint(Format<Element>::to_float(amax)));
      }
      if constexpr (rounded) {
#pragma unroll
        for (int i = 0; i < kPatch; ++i) {
          if (patch_row + i >= rows || !inside) continue;
          uint32_t words[kPatch / 2];
#pragma unroll
          for (int c = 0; c < kPatch; c += 4) {
            float p[4];
#pragma unroll
            for (int j = 0; j < 4; ++j)
              p[j] = __fmul_rn(mx_value(patch, i, c + j), mx_factor(exponent[c + j]));
            const uint32_t bytes = to_e4m3x4(p[0], p[1], p[2], p[3]);
            words[c / 2] = dequantize_pair(bytes, mx_scale(exponent[c]), mx_scale(exponent[c + 1]));
            words[c / 2 + 1] =
                dequantize_pair(bytes >> 16, mx_scale(exponent[c + 2]), mx_scale(exponent[c + 3]));
          }
          const int64_t row = row_begin + patch_row + i;
          *reinterpret_cast<uint4*>(out.columnwise + row * K + col + patch_col) =
              make_uint4(words[0], words[1], words[2], words[3]);
        }
      } else {
        const int part = patch_row / 32;
#pragma unroll
        for (int c = 0; c < kPatch; ++c) {
          turned->put(c, patch.quantize_column(c, mx_factor(exponent[c])));
          if (patch_row % 32 == 0 && inside)
            out.scale_t[(column + patch_col + c) * 4 + part] = static_cast<uint8_t>(exponent[c]);
        }
        __syncthreads();
        turned->write(out.q_t + column * kTile, kTile, kTile, cols);
      }
    }
    // The next tile is stored where this one is still being read.
    if (columnwise || out.block_sums) __syncthreads();
  }
}

}  // namespace grouped_linear::cuda
