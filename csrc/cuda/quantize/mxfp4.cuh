// SPDX-License-Identifier: Apache-2.0
// MXFP4 weights from and to bf16, fp16 and float32.
//
// Bytes an element of bf16: 2 and 0.53, read and written. A weight is quantized once and
// dequantized by users, so nothing here is tuned: a thread has 8 elements, four threads a block.
#pragma once

#include "cuda/common/elements.cuh"
#include "cuda/common/fp8.cuh"
#include "cuda/common/groups.cuh"
#include "cuda/common/pdl.cuh"
#include "layout.h"
#include "mxfp4_math.h"

namespace grouped_linear::cuda {

constexpr int kMxfp4Threads = 256;
constexpr int kMxfp4Elements = 8;  // of a thread
constexpr int kThreadsOfBlock = kMxBlock / kMxfp4Elements;
static_assert(kThreadsOfBlock == 4 && kMxfp4Threads % 32 == 0);

// w: dense, `threads` times 8 elements, a multiple of whole blocks.
template <typename Element>
__global__ void __launch_bounds__(kMxfp4Threads)
    quantize_mxfp4_kernel(const Element* w, int64_t threads, uint32_t* q, uint8_t* scale) {
  grid_dependency_wait();
  constexpr int kWords = kMxfp4Elements * sizeof(Element) / 4, kVectors = kWords / 4;
  const int64_t stride = static_cast<int64_t>(gridDim.x) * kMxfp4Threads;
  const int lane = threadIdx.x % 32;
  // Whole warps go on, so that all lanes shuffle: the last one's last lanes have zeros.
  for (int64_t first = int64_t{blockIdx.x} * kMxfp4Threads + threadIdx.x - lane; first < threads;
       first += stride) {
    const int64_t i = first + lane;
    const bool inside = i < threads;
    uint32_t words[kWords] = {};
#pragma unroll
    for (int v = 0; v < kVectors && inside; ++v) {
      const uint4 read = reinterpret_cast<const uint4*>(w)[i * kVectors + v];
      words[4 * v] = read.x, words[4 * v + 1] = read.y;
      words[4 * v + 2] = read.z, words[4 * v + 3] = read.w;
    }
    float x[kMxfp4Elements];
    uint32_t amax = 0;  // magnitudes as integers: a NaN is the largest
#pragma unroll
    for (int e = 0; e < kMxfp4Elements; ++e) {
      constexpr int kOfWord = Word<Element>::kElements;
      x[e] = Format<Element>::to_float(Word<Element>::bits(words[e / kOfWord], e % kOfWord));
      amax = max(amax, __float_as_uint(x[e]) & 0x7fffffffu);
    }
    // The threads of a block are neighbours.
    amax = max(amax, __shfl_xor_sync(kFullWarp, amax, 1));
    amax = max(amax, __shfl_xor_sync(kFullWarp, amax, 2));
    const uint32_t of_block = mxfp4::scale_of(__uint_as_float(amax));
    uint32_t codes = 0;
#pragma unroll
    for (int e = 0; e < kMxfp4Elements; e += 2)
      codes |= mxfp4::encode_pair(x[e], x[e + 1], of_block) << (4 * e);
    if (inside) q[i] = codes;
    if (inside && i % kThreadsOfBlock == 0)
      scale[i / kThreadsOfBlock] = static_cast<uint8_t>(of_block);
  }
}

template <typename Output>
__global__ void __launch_bounds__(kMxfp4Threads)
    dequantize_mxfp4_kernel(const uint32_t* q, const uint8_t* scale, int64_t threads, Output* w) {
  grid_dependency_wait();
  constexpr int kWords = kMxfp4Elements * sizeof(Output) / 4, kVectors = kWords / 4;
  const int64_t stride = static_cast<int64_t>(gridDim.x) * kMxfp4Threads;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kMxfp4Threads + threadIdx.x; i < threads;
       i += stride) {
    const uint32_t codes = q[i], of_block = scale[i / kThreadsOfBlock];
    uint32_t words[kWords];
#pragma unroll
    for (int e = 0; e < kMxfp4Elements; e += 2) {
      const uint32_t low = dequantized_bits<Output>(mxfp4::decode(codes >> (4 * e) & 15, of_block));
      const uint32_t high =
          dequantized_bits<Output>(mxfp4::decode(codes >> (4 * e + 4) & 15, of_block));
      if constexpr (sizeof(Output) == 4)
        words[e] = low, words[e + 1] = high;
      else
        words[e / 2] = low | high << 16;
    }
#pragma unroll
    for (int v = 0; v < kVectors; ++v)
      reinterpret_cast<uint4*>(w)[i * kVectors + v] =
          make_uint4(words[4 * v], words[4 * v + 1], words[4 * v + 2], words[4 * v + 3]);
  }
}

}  // namespace grouped_linear::cuda
