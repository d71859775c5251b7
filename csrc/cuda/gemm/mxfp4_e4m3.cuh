// SPDX-License-Identifier: Apache-2.0
// A weight in MXFP4 as e4m3 numbers with a scale for each 128 x 128 block, or their transpose: what
// the FP8 GEMMs read.
//
// Bytes: half a byte an element is read, and a byte written.
#pragma once

#include "cuda/common/pdl.cuh"
#include "mxfp4_math.h"

namespace grouped_linear::cuda {

constexpr int kE4m3Threads = 256;
// Scales so many powers of two below their block's largest one have numbers that are all zero.
constexpr uint32_t kFarBelow = 30, kNanBelow = 31;

// codes [E, N, K / 2] and scale [E, N, K / 32], dense, to q [E, N, K] or its transpose [E, K, N], and
// blocks [E, ceil(N / 128), ceil(K / 128)]. A block of threads has one of the latter.
template <bool transposed>
__global__ void __launch_bounds__(kE4m3Threads)
    mxfp4_to_e4m3_kernel(const uint8_t* codes, const uint8_t* scale, uint8_t* q, float* blocks,
                         int N, int K) {
  __shared__ uint8_t numbers[32][8];  // of codes without a sign, at each distance
  __shared__ uint32_t largest;
  __shared__ alignas(16) uint8_t tile[128][128 + 16];
  if (threadIdx.x == 0) largest = 0;
  numbers[threadIdx.x / 8][threadIdx.x % 8] = static_cast<uint8_t>(mxfp4::to_e4m3(
      threadIdx.x % 8, threadIdx.x / 8, threadIdx.x / 8 == kNanBelow ? mxfp4::kNanScale : 0));
  __syncthreads();
  grid_dependency_wait();
  // A thread has 64 elements of a row.
  const int row = threadIdx.x / 2, first = threadIdx.x % 2 * 64;
  const int n = blockIdx.x * 128 + row, k = blockIdx.y * 128 + first;
  const int64_t at = (int64_t{blockIdx.z} * N + n) * K + k;
  uint32_t scales[2] = {}, most = 0;  // the largest, without those of 32 zeros and NaN's
  uint4 packed[2] = {};
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    if (n >= N || k + 32 * i >= K) break;
    scales[i] = scale[at / 32 + i];
    packed[i] = *reinterpret_cast<const uint4*>(codes + at / 2 + 16 * i);
    if (scales[i] != mxfp4::kNanScale &&
        mxfp4::has_numbers(packed[i].x | packed[i].y | packed[i].z | packed[i].w))
      most = max(most, scales[i]);
  }
  most = __reduce_max_sync(0xffffffff, most);
  if (threadIdx.x % 32 == 0) atomicMax(&largest, most);
  __syncthreads();
  if (threadIdx.x == 0)
    blocks[(int64_t{blockIdx.z} * gridDim.x + blockIdx.x) * gridDim.y + blockIdx.y] =
        mxfp4::e4m3_scale(largest);
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    if (n >= N || k + 32 * i >= K) break;
    // The scale of 32 zeros may be above the largest: the difference wraps, and zeros stay zeros.
    const uint32_t below =
        scales[i] == mxfp4::kNanScale ? kNanBelow : min(largest - scales[i], kFarBelow);
    const uint2 table = *reinterpret_cast<const uint2*>(numbers[below]);
    const uint32_t words[] = {packed[i].x, packed[i].y, packed[i].z, packed[i].w};
    uint32_t bytes[8];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const uint32_t selector = words[j] & 0x77777777;
      const uint32_t shifted = words[j]
                               << 4;  // the signs of even codes, those of odd ones are there
      bytes[2 * j] = __byte_perm(table.x, table.y, selector & 0xffff) |
                     (__byte_perm(shifted, words[j], 0x5140) & 0x80808080);
      bytes[2 * j + 1] = __byte_perm(table.x, table.y, selector >> 16) |
                         (__byte_perm(shifted, words[j], 0x7362) & 0x80808080);
    }
    if constexpr (transposed) {
#pragma unroll
      for (int j = 0; j < 32; ++j)
        tile[first + 32 * i + j][row] = static_cast<uint8_t>(bytes[j / 4] >> j % 4 * 8);
    } else {
      uint4* to = reinterpret_cast<uint4*>(&tile[row][first + 32 * i]);
      to[0] = make_uint4(bytes[0], bytes[1], bytes[2], bytes[3]);
      to[1] = make_uint4(bytes[4], bytes[5], bytes[6], bytes[7]);
    }
  }
  __syncthreads();
  // Lines of q: along K, or along N. Both are multiples of 16.
  const int first_line = (transposed ? blockIdx.y : blockIdx.x) * 128, lines = transposed ? K : N;
  const int first_col = (transposed ? blockIdx.x : blockIdx.y) * 128, cols = transposed ? N : K;
#pragma unroll
  for (int i = threadIdx.x; i < 128 * 8; i += kE4m3Threads) {
    const int line = first_line + i / 8, col = first_col + i % 8 * 16;
    if (line < lines && col < cols)
      *reinterpret_cast<uint4*>(q + (int64_t{blockIdx.z} * lines + line) * cols + col) =
          *reinterpret_cast<const uint4*>(&tile[i / 8][i % 8 * 16]);
  }
}

}  // namespace grouped_linear::cuda
