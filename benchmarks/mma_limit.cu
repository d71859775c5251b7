// SPDX-License-Identifier: Apache-2.0
// What `mma` itself gives on this GPU: the roof of the portable kernels (csrc/cuda/gemm/sm80).
//
//   nvcc -std=c++20 -O3 -arch=native -Icsrc -o mma_limit benchmarks/mma_limit.cu && ./mma_limit
//
// Register only: every warp multiplies the same fragments of normal numbers again and again, in the
// kernels' warp tiles. With ldmatrix: it reads them from shared memory every time, as the kernels
// do. With copies: it also copies as many bytes from L2 to shared memory as a tile of 128 x 256 (16
// bits) or 128 x 128 (FP8) takes, optionally with a barrier for every 64 bytes of K, and computes
// with other data: the roof of what cp.async feeds. FP8: fragments of FP8 are made what mma takes (fp8_mma.cuh) every
// time.
#include <cstdio>
#include <vector>

#include "cuda/common/shared_memory.cuh"
#include "cuda/gemm/sm80/config.h"
#include "cuda/gemm/sm80/fp8_mma.cuh"

using namespace grouped_linear::cuda;
using namespace grouped_linear::cuda::sm80;

constexpr int kSteps = 2000;

enum class Loads { kNone, kFragments, kCopies, kBarriers };

template <bool fp8, Loads kind, int row_parts, int col_parts, int warps>
__global__ void __launch_bounds__(32 * warps, 1) multiply(const uint4* data, float* out) {
  constexpr bool loads = kind != Loads::kNone;
  constexpr int copies = kind < Loads::kCopies ? 0 : fp8 ? 2 : 3;  // of 16 bytes a thread and step
  __shared__ __align__(1024) uint4 shared[2048], copied[768];
  for (int i = threadIdx.x; i < 2048; i += blockDim.x) shared[i] = data[i];
  __syncthreads();
  const uint32_t base = smem_address(shared) + threadIdx.x / 32 % 4 * 4096 + threadIdx.x % 32 * 16;
  uint32_t a_words[row_parts][4], b_words[col_parts / 2][4];
  const auto read = [&](int step) {
#pragma unroll
    for (int i = 0; i < row_parts; ++i) ldmatrix_x4(a_words[i], base + step + 512 * i);
#pragma unroll
    for (int j = 0; j < col_parts / 2; ++j) ldmatrix_x4(b_words[j], base + step + 512 * (j % 8));
  };
  read(0);
  float accum[row_parts][col_parts][4] = {};
#pragma unroll 1
  for (int step = 0; step < kSteps; ++step) {
    if (loads) read((step & 1) * 16384);
#pragma unroll
    for (int i = 0; i < copies; ++i)  // of 64-byte lines, 2 KiB apart; 16 MiB of data
      sm80::cp_async_16<1>(
          smem_address(copied + threadIdx.x + 256 * i),
          data + 4096 +
              (((step / 2 * 4 + threadIdx.x % 4) & 127) +
               (threadIdx.x / 4 + 64 * (i + 3 * (step % 2)) + blockIdx.x % 20 * 384) * 128),
          1u);
    if (copies > 0 && step % 2 == 1) {
      cp_async_commit();
      cp_async_wait<2>();
      if (kind == Loads::kBarriers) __syncthreads();
    }
    if constexpr (fp8) {
      using T = __nv_fp8_e4m3;
      Fp8FragmentA<T> a[row_parts];
#pragma unroll
      for (int i = 0; i < row_parts; ++i) {
        if (!loads)
          asm volatile(""
                       : "+r"(a_words[i][0]), "+r"(a_words[i][1]), "+r"(a_words[i][2]),
                         "+r"(a_words[i][3]));
        a[i].set(a_words[i]);
      }
#pragma unroll
      for (int j = 0; j < col_parts; j += 2) {
        auto& words = b_words[j / 2];
        if (!loads)
          asm volatile("" : "+r"(words[0]), "+r"(words[1]), "+r"(words[2]), "+r"(words[3]));
        Fp8FragmentB<T> b[2];
        b[0].set(words[0], words[1]);
        b[1].set(words[2], words[3]);
#pragma unroll
        for (int i = 0; i < row_parts; ++i) {
          mma_fp8<T, T>(accum[i][j], a[i], b[0], false);
          mma_fp8<T, T>(accum[i][j + 1], a[i], b[1], false);
        }
      }
    } else {
#pragma unroll
      for (int j = 0; j < col_parts; j += 2)
#pragma unroll
        for (int i = 0; i < row_parts; ++i) {
          const auto& b = b_words[j / 2];
          mma_16bit<__nv_bfloat16>(accum[i][j], a_words[i], b[0], b[1], accum[i][j]);
          mma_16bit<__nv_bfloat16>(accum[i][j + 1], a_words[i], b[2], b[3], accum[i][j + 1]);
        }
    }
  }
  float sum = 0;
  for (auto& row : accum)
    for (auto& part : row)
      for (float value : part) sum += value;
  out[blockIdx.x * blockDim.x + threadIdx.x] = sum;
}

template <bool fp8, Loads kind, int row_parts, int col_parts, int warps>
void measure(const char* what, const uint4* data, float* out, int sms) {
  const auto kernel = multiply<fp8, kind, row_parts, col_parts, warps>;
  cudaEvent_t begin, end;
  cudaEventCreate(&begin);
  cudaEventCreate(&end);
  float best = 1e9, ms = 0;
  for (int i = 0; i < 20; ++i) {
    cudaEventRecord(begin);
    for (int j = 0; j < 5; ++j) kernel<<<sms, 32 * warps>>>(data, out);
    cudaEventRecord(end);
    cudaEventSynchronize(end);
    cudaEventElapsedTime(&ms, begin, end);
    best = ms < best ? ms : best;
  }
  const double flops =
      5.0 * sms * warps * kSteps * row_parts * col_parts * 16 * 8 * (fp8 ? 32 : 16) * 2;
  printf("%-52s best %6.1f  last %6.1f TFLOP/s  %s\n", what, flops / best / 1e9, flops / ms / 1e9,
         cudaGetErrorString(cudaGetLastError()));
}

int main() {
  int sms = 0;
  cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, 0);
  std::vector<uint32_t> host(8192);
  uint32_t state = 1;
  for (uint32_t& word : host) {  // bf16 in [0.5, 2) of either sign; bytes that are no e4m3 NaN
    state = state * 1664525 + 1013904223;
    word = (state & 0x807f807f) | 0x3f003f00 | (state >> 8 & 0x00800080);
    if ((word & 0x7f) == 0x7f) word ^= 1;
    if ((word >> 16 & 0x7f) == 0x7f) word ^= 1 << 16;
  }
  uint4* data;
  float* out;
  cudaMalloc(&data, 32 << 20);
  cudaMemset(data, 0, 32 << 20);
  cudaMalloc(&out, 4 * sms * 256);
  cudaMemcpy(data, host.data(), 32768, cudaMemcpyHostToDevice);
  measure<false, Loads::kNone, 4, 8, 8>("bf16, register only, 8 warps of 64 x 64", data, out, sms);
  measure<false, Loads::kFragments, 4, 8, 8>("bf16, ldmatrix", data, out, sms);
  measure<false, Loads::kCopies, 4, 8, 8>("bf16, ldmatrix and copies", data, out, sms);
  measure<false, Loads::kBarriers, 4, 8, 8>("bf16, ldmatrix, copies and barriers", data, out, sms);
  measure<true, Loads::kNone, 2, 8, 8>("fp8, register only, 8 warps of 32 x 64", data, out, sms);
  measure<true, Loads::kFragments, 2, 8, 8>("fp8, ldmatrix", data, out, sms);
  measure<true, Loads::kCopies, 2, 8, 8>("fp8, ldmatrix and copies", data, out, sms);
  measure<true, Loads::kBarriers, 2, 8, 8>("fp8, ldmatrix, copies and barriers", data, out, sms);
}
