// SPDX-License-Identifier: Apache-2.0
// out = c + a @ b in 16 bits, for a short K: a matrix of which each element is read and written
// once, and a product beside it.
//
// Bytes of T tokens with H features and E experts, as a router's gradient by its input has them:
// 4 T H. 24576 x 1536: 151 MB, 51 us at the 2.95 TB/s of a copy on an H100. Reaches 93 us, where
// torch.addmm, which copies c first, takes 131 (H100, 2026-11): docs/notes/expert_layer.md.
//
// A thread block computes 64 x 128 elements in k-blocks of 64. While it loads operands into shared
// memory, its threads load their elements of c into registers. Three blocks fit on an SM.
#pragma once

#include "cuda/common/pdl.cuh"
#include "cuda/common/shared_memory.cuh"
#include "cuda/gemm/epilogue_math.cuh"
#include "cuda/gemm/sm80/ptx.cuh"

namespace grouped_linear::cuda {

constexpr int kAddmmThreads = 256, kAddmmTileM = 64, kAddmmTileN = 128, kAddmmTileK = 64;

// Rows in shared memory have 16 bytes more than they need: eight of them share no bank.
struct AddmmStage {
  uint16_t a[kAddmmTileM][kAddmmTileK + 8];
  uint16_t b[kAddmmTileK][kAddmmTileN + 8];
};
struct AddmmStorage {
  AddmmStage stages[2];
  float epilogue[kAddmmThreads / 32][8][32 + 8];  // eight rows of a warp's accumulators
};

// a [M, K], b [K, N], c and out [M, N]; rows of all but a begin at multiples of 16 bytes, and those
// of a where a_aligned is true.
struct AddmmShape {
  int64_t M;
  int N, K;
  int64_t a_stride, b_stride, c_stride;
  bool a_aligned;
};

// Starts to load a k-block, with zeros outside of the operands.
template <typename T>
__device__ __forceinline__ void load_addmm_stage(AddmmStage& stage, const T* a, const T* b,
                                                 const AddmmShape& shape, int64_t row, int col,
                                                 int k) {
  constexpr int a_chunks = kAddmmTileK / 8, b_chunks = kAddmmTileN / 8;
  const int rows = static_cast<int>(min(shape.M - row, int64_t{kAddmmTileM}));
  if (shape.a_aligned) {
#pragma unroll
    for (int i = threadIdx.x; i < kAddmmTileM * a_chunks; i += kAddmmThreads) {
      const int r = i / a_chunks, at = i % a_chunks * 8;
      const bool inside = r < rows && k + at < shape.K;
      cp_async_16(smem_address(&stage.a[r][at]),
                  inside ? a + (row + r) * shape.a_stride + k + at : a, inside);
    }
  } else {
    for (int i = threadIdx.x; i < kAddmmTileM * kAddmmTileK; i += kAddmmThreads) {
      const int r = i / kAddmmTileK, at = i % kAddmmTileK;
      stage.a[r][at] =
          r < rows && k + at < shape.K
              ? reinterpret_cast<const uint16_t*>(a)[(row + r) * shape.a_stride + k + at]
              : 0;
    }
  }
#pragma unroll
  for (int i = threadIdx.x; i < kAddmmTileK * b_chunks; i += kAddmmThreads) {
    const int r = i / b_chunks, at = i % b_chunks * 8;
    const bool inside = k + r < shape.K && col + at < shape.N;
    cp_async_16(smem_address(&stage.b[r][at]),
                inside ? b + int64_t{k + r} * shape.b_stride + col + at : b, inside);
  }
  cp_async_commit();
}

template <typename T>
__global__ void __launch_bounds__(kAddmmThreads)
    addmm_kernel(const T* a, const T* b, const T* c, AddmmShape shape, T* out) {
  extern __shared__ __align__(16) uint8_t shared[];
  AddmmStorage& storage = *reinterpret_cast<AddmmStorage*>(shared);
  grid_dependency_wait();
  const int tiles = (shape.N + kAddmmTileN - 1) / kAddmmTileN;
  const int64_t row = int64_t{blockIdx.x / static_cast<unsigned>(tiles)} * kAddmmTileM;
  const int col = static_cast<int>(blockIdx.x % static_cast<unsigned>(tiles)) * kAddmmTileN;
  const int k_blocks = (shape.K + kAddmmTileK - 1) / kAddmmTileK;
  load_addmm_stage(storage.stages[0], a, b, shape, row, col, 0);

  // A warp has 32 x 32 elements. Of each eight rows a thread has one 16th of a row's 64 bytes.
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int warp_row = warp / 4 * 32, warp_col = warp % 4 * 32;
  const int own_col = col + warp_col + lane % 4 * 8;
  const auto own_row = [&](int i) { return row + warp_row + 8 * i + lane / 4; };
  uint4 added[4];
#pragma unroll
  for (int i = 0; i < 4; ++i)
    added[i] = own_row(i) < shape.M && own_col < shape.N
                   ? *reinterpret_cast<const uint4*>(c + own_row(i) * shape.c_stride + own_col)
                   : make_uint4(0, 0, 0, 0);

  float accum[2][4][4] = {};
#pragma unroll 1
  for (int k_block = 0; k_block < k_blocks; ++k_block) {
    const AddmmStage& stage = storage.stages[k_block % 2];
    if (k_block + 1 < k_blocks) {
      load_addmm_stage(storage.stages[(k_block + 1) % 2], a, b, shape, row, col,
                       (k_block + 1) * kAddmmTileK);
      cp_async_wait<1>();
    } else {
      cp_async_wait();
    }
    __syncthreads();
#pragma unroll
    for (int k = 0; k < kAddmmTileK; k += 16) {
      uint32_t of_a[2][4], of_b[2][4];
#pragma unroll
      for (int i = 0; i < 2; ++i)
        ldmatrix_x4(of_a[i],
                    smem_address(&stage.a[warp_row + 16 * i + lane % 16][k + lane / 16 * 8]));
#pragma unroll
      for (int j = 0; j < 2; ++j)
        ldmatrix_x4<true>(of_b[j],
                          smem_address(&stage.b[k + lane % 16][warp_col + 16 * j + lane / 16 * 8]));
#pragma unroll
      for (int i = 0; i < 2; ++i)
#pragma unroll
        for (int j = 0; j < 4; ++j)
          sm80::mma_16bit<T>(accum[i][j], of_a[i], of_b[j / 2][j % 2 * 2],
                             of_b[j / 2][j % 2 * 2 + 1], accum[i][j]);
    }
    __syncthreads();  // the stage is free
  }

  auto& rows = storage.epilogue[warp];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    __syncwarp();
#pragma unroll
    for (int j = 0; j < 4; ++j)
      *reinterpret_cast<float2*>(&rows[lane / 4][8 * j + 2 * (lane % 4)]) =
          make_float2(accum[i / 2][j][i % 2 * 2], accum[i / 2][j][i % 2 * 2 + 1]);
    __syncwarp();
    if (own_row(i) >= shape.M || own_col >= shape.N) continue;
    alignas(16) T result[8];
    *reinterpret_cast<uint4*>(result) = added[i];
    const float* product = &rows[lane / 4][lane % 4 * 8];
#pragma unroll
    for (int v = 0; v < 8; ++v)
      result[v] = from_float<T>(__fadd_rn(product[v], static_cast<float>(result[v])));
    *reinterpret_cast<uint4*>(out + own_row(i) * shape.N + own_col) =
        *reinterpret_cast<const uint4*>(result);
  }
}

}  // namespace grouped_linear::cuda
