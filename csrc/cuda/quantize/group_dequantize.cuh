// e4m3 with block scales back to bf16, fp16 or float32; rows past the last group's end are zero.
//
// Bytes an element for bf16: 1 read, 2 written. For tests and for users; no layer runs it.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <cstdint>
#include <type_traits>

#include "cuda/common/groups.cuh"
#include "cuda/common/pdl.cuh"

namespace grouped_linear::cuda {

constexpr int kDequantizeThreads = 256;
constexpr int kBlockRows = 128;  // rows and columns that share a scale
// Group ends are int32, and a block past them must be countable.
constexpr int64_t kMostRows = 0x7fffffff - kBlockRows;

// NaN in one encoding, the CPU's.
template <typename Output>
__device__ __forceinline__ uint32_t output_bits(float value) {
  if constexpr (sizeof(Output) == 4)
    return value != value ? 0x7fc00000 : __float_as_uint(value);
  else if constexpr (std::is_same_v<Output, __half>)
    return value != value ? 0x7e00 : __half_as_ushort(__float2half_rn(value));
  else
    return value != value ? 0x7fc0 : __bfloat16_as_ushort(__float2bfloat16_rn(value));
}

// 16 bytes of e4m3.
struct Quantized16 {
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

  // Elements 2 i and 2 i + 1, exactly: e4m3 numbers are fp16 numbers.
  __device__ __forceinline__ float2 pair(int i) const {
    const uint32_t two = words[i / 2] >> 16 * (i % 2) & 0xffff;
    return __half22float2(
        __nv_cvt_fp8x2_to_halfraw2(static_cast<__nv_fp8x2_storage_t>(two), __NV_E4M3));
  }
};

// The end of the last row of any group: the largest of offs, inside [0, T].
__device__ __forceinline__ int last_row_end(const int32_t* offs, int E, int T) {
  __shared__ int end;
  if (threadIdx.x == 0) end = 0;
  __syncthreads();
  int largest = 0;
  for (int e = threadIdx.x; e < E; e += kDequantizeThreads) largest = max(largest, min(offs[e], T));
  atomicMax(&end, largest);
  __syncthreads();
  return end;
}

// q [T, K] with scale [ceil(K / 128), >= T] -> x [T, K], dense. A warp takes a row.
template <typename Output>
__global__ void __launch_bounds__(kDequantizeThreads)
    group_dequantize_kernel(const uint8_t* q, int64_t q_stride, bool vectorised, const float* scale,
                            int64_t scale_stride, const int32_t* offs, int E, int64_t T, int K,
                            Output* x) {
  grid_dependency_wait();
  constexpr int kWarps = kDequantizeThreads / 32;
  constexpr int kVectors = sizeof(Output);  // of 16 bytes, in 16 elements
  const int end = last_row_end(offs, E, static_cast<int>(min(T, kMostRows)));
  for (int64_t t = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32; t < T;
       t += static_cast<int64_t>(gridDim.x) * kWarps) {
    for (int k = threadIdx.x % 32 * 16; k < K; k += 32 * 16) {
      uint4 out[kVectors] = {};
      if (t < end) {
        Quantized16 from;
        from.load(q + t * q_stride + k, vectorised);
        const float s = scale[k / kBlockRows * scale_stride + t];
        uint32_t words[4 * kVectors];
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          const float2 two = from.pair(i);
          const uint32_t low = output_bits<Output>(__fmul_rn(two.x, s));
          const uint32_t high = output_bits<Output>(__fmul_rn(two.y, s));
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

// q_t [blocks, K, 128] with scale_t [blocks, K] -> x [T, K], dense. A thread turns 16
// rows of two neighbouring columns over, so that a warp writes whole stretches of a row.
template <typename Output>
__global__ void __launch_bounds__(kDequantizeThreads)
    group_dequantize_t_kernel(const uint8_t* q_t, bool vectorised, const float* scale_t,
                              int64_t scale_stride, const int32_t* offs, int E, int64_t T, int K,
                              Output* x) {
  grid_dependency_wait();
  constexpr int kPairs = kBlockRows / 2;
  __shared__ GroupTable table;
  load_groups<kDequantizeThreads>(table, offs, E, static_cast<int>(min(T, kMostRows)),
                                  TilesOf{kBlockRows});
  const int blocks = table.tile_end[E - 1], col_blocks = (K + kBlockRows - 1) / kBlockRows;

  const int64_t tiles = static_cast<int64_t>(blocks) * col_blocks;
  for (int64_t tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    const int64_t block = tile / col_blocks;
    const int e = table.group_of_tile(static_cast<int>(block), E);
    const int row_begin =
        table.row_begin(e) + (static_cast<int>(block) - table.tile_begin(e)) * kBlockRows;
    const int rows = min(kBlockRows, table.row_end[e] - row_begin);
    const int k = static_cast<int>(tile % col_blocks) * kBlockRows + threadIdx.x % kPairs * 2;
    if (k >= K) continue;
    const float* scales = scale_t + block * scale_stride;
    const float s0 = scales[k], s1 = scales[k + 1];
    for (int r = threadIdx.x / kPairs * 16; r < rows; r += kDequantizeThreads / kPairs * 16) {
      Quantized16 first, second;
      first.load(q_t + (block * K + k) * kBlockRows + r, vectorised);
      second.load(q_t + (block * K + k + 1) * kBlockRows + r, vectorised);
      Output* to = x + static_cast<int64_t>(row_begin + r) * K + k;
#pragma unroll
      for (int i = 0; i < 16; ++i) {
        const float2 a = first.pair(i / 2), b = second.pair(i / 2);
        const uint32_t low = output_bits<Output>(__fmul_rn(i % 2 == 0 ? a.x : a.y, s0));
        const uint32_t high = output_bits<Output>(__fmul_rn(i % 2 == 0 ? b.x : b.y, s1));
        if (r + i < rows) {
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
