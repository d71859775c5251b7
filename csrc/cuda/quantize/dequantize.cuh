// SPDX-License-Identifier: Apache-2.0
// Dequantizes e4m3 with block scales to bf16, fp16 or float32. Rows from the last group's end on
// are zero.
//
// Bytes an element of bf16: 1 read, 2 written. For tests and for users; no layer runs it.
#pragma once

#include "cuda/common/fp8.cuh"
#include "cuda/common/pdl.cuh"
#include "cuda/common/tile_locations.cuh"

namespace grouped_linear::cuda {

constexpr int kDequantizeThreads = 256;
constexpr int kScaleBlock = kBlock;  // rows or columns that share a scale
// Group ends are int32, and the padding of a group's last block must not overflow.
constexpr int64_t kMaxRows = 0x7fffffff - kScaleBlock;

// 16 bytes of e4m3.
struct E4m3x16 {
  uint32_t words[4];

  __device__ __forceinline__ void load(const uint8_t* bytes, bool vectorised) {
    if (vectorised) {
      const uint4 v = *reinterpret_cast<const uint4*>(bytes);
      words[0] = v.x, words[1] = v.y, words[2] = v.z, words[3] = v.w;
    } else {
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        words[w] = 0;
#pragma unroll
        for (int i = 0; i < 4; ++i) words[w] |= uint32_t{bytes[4 * w + i]} << 8 * i;
      }
    }
  }

  // Elements 2 i and 2 i + 1.
  __device__ __forceinline__ float2 pair(int i) const {
    return from_e4m3x2(words[i / 2] >> 16 * (i % 2));
  }
};

// q [T, K] with scale [ceil(K / 128), >= T] -> x [T, K], dense. A warp dequantizes a row.
template <typename Output>
__global__ void __launch_bounds__(kDequantizeThreads)
    group_dequantize_kernel(const uint8_t* q, int64_t q_stride, bool vectorised, const float* scale,
                            int64_t scale_stride, const int32_t* offs, int E, int64_t T, int K,
                            Output* x) {
  grid_dependency_wait();
  constexpr int kWarps = kDequantizeThreads / 32;
  constexpr int kVectors = sizeof(Output);  // of 16 bytes, in 16 elements of x
  const int end = last_row_end(offs, E, min(T, kMaxRows));
  for (int64_t t = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32; t < T;
       t += static_cast<int64_t>(gridDim.x) * kWarps) {
    for (int k = threadIdx.x % 32 * 16; k < K; k += 32 * 16) {
      uint4 out[kVectors] = {};
      if (t < end) {
        E4m3x16 from;
        from.load(q + t * q_stride + k, vectorised);
        const float s = scale[k / kScaleBlock * scale_stride + t];
        uint32_t words[4 * kVectors];
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          const float2 two = from.pair(i);
          const uint32_t low = dequantized_bits<Output>(__fmul_rn(two.x, s));
          const uint32_t high = dequantized_bits<Output>(__fmul_rn(two.y, s));
          if constexpr (sizeof(Output) == 4)
            words[2 * i] = low, words[2 * i + 1] = high;
          else
            words[i] = low | high << 16;
        }
#pragma unroll
        for (int v = 0; v < kVectors; ++v)
          out[v] = make_uint4(words[4 * v], words[4 * v + 1], words[4 * v + 2], words[4 * v + 3]);
      }
      uint4* to = reinterpret_cast<uint4*>(x + t * K + k);
#pragma unroll
      for (int v = 0; v < kVectors; ++v) to[v] = out[v];
    }
  }
}

// q_t [blocks, K, 128] with scale_t [blocks, K] -> x [T, K], dense. A thread transposes 16
// rows of two neighbouring columns, so that a warp writes 64 neighbours of a row.
template <typename Output>
__global__ void __launch_bounds__(kDequantizeThreads)
    group_dequantize_t_kernel(const uint8_t* q_t, bool vectorised, const float* scale_t,
                              int64_t scale_stride, const int32_t* offs, int E, int64_t T, int K,
                              Output* x) {
  grid_dependency_wait();
  constexpr int kColumnPairs = kScaleBlock / 2;
  __shared__ GroupTable table;
  load_groups<kDequantizeThreads>(table, offs, E, static_cast<int>(min(T, kMaxRows)),
                                  TilesOf{kScaleBlock});
  const int blocks = table.tile_end[E - 1], col_blocks = (K + kScaleBlock - 1) / kScaleBlock;

  const int64_t tiles = static_cast<int64_t>(blocks) * col_blocks;
  for (int64_t tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    const int64_t block = tile / col_blocks;
    const TileLocation at = locate_tile<kScaleBlock>(table, E, static_cast<int>(block));
    const int k =
        static_cast<int>(tile % col_blocks) * kScaleBlock + threadIdx.x % kColumnPairs * 2;
    if (k >= K) continue;
    const float* scales = scale_t + block * scale_stride;
    const float s0 = scales[k], s1 = scales[k + 1];
    for (int r = threadIdx.x / kColumnPairs * 16; r < at.rows;
         r += kDequantizeThreads / kColumnPairs * 16) {
      E4m3x16 first, second;
      first.load(q_t + (block * K + k) * kScaleBlock + r, vectorised);
      second.load(q_t + (block * K + k + 1) * kScaleBlock + r, vectorised);
      Output* to = x + static_cast<int64_t>(at.row_begin + r) * K + k;
#pragma unroll
      for (int i = 0; i < 16; ++i) {
        const float2 a = first.pair(i / 2), b = second.pair(i / 2);
        const uint32_t low = dequantized_bits<Output>(__fmul_rn(i % 2 == 0 ? a.x : a.y, s0));
        const uint32_t high = dequantized_bits<Output>(__fmul_rn(i % 2 == 0 ? b.x : b.y, s1));
        if (r + i < at.rows) {
          if constexpr (sizeof(Output) == 4)
            *reinterpret_cast<uint2*>(to + static_cast<int64_t>(i) * K) = make_uint2(low, high);
          else
            *reinterpret_cast<uint32_t*>(to + static_cast<int64_t>(i) * K) = low | high << 16;
        }
      }
    }
  }

  const int64_t end = table.row_end[E - 1];
  uint4* zeros = reinterpret_cast<uint4*>(x + end * K);
  const int64_t vectors = (T - end) * K / (16 / static_cast<int64_t>(sizeof(Output)));
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kDequantizeThreads + threadIdx.x; i < vectors;
       i += static_cast<int64_t>(gridDim.x) * kDequantizeThreads)
    zeros[i] = make_uint4(0, 0, 0, 0);
}

}  // namespace grouped_linear::cuda
