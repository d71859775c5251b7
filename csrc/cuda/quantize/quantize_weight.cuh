// w [E, N, K] in 128 x 128 tiles, one scale a tile, q and q_t from one read.
//
// Bytes an element of bf16: 2 read, 1 written for q and 1 for q_t: 4; 8 x 4096 x 7168 at the 4.27
// TB/s of a copy: 220 us. One block a tile, several on an SM at a time.
#pragma once

#include "cuda/common/pdl.cuh"
#include "cuda/quantize/block_scale.cuh"
#include "layout.h"

namespace grouped_linear::cuda {

// Where expert e's dense [N, K] matrix starts: one after the other in a packed weight, or anywhere.
template <typename Element>
struct PackedExperts {
  const Element* first;
  int64_t size;
  __device__ __forceinline__ const Element* expert(int64_t e) const { return first + e * size; }
};

template <typename Element>
struct ListedExperts {
  const Element* first[kMaxGroups];
  __device__ __forceinline__ const Element* expert(int64_t e) const { return first[e]; }
};

// Where the results go. q_t may be null. N and K are multiples of 16.
struct WeightQuantized {
  int N, K;
  uint8_t *q, *q_t;
  float* scale;
};

// Tile `number`, by one block.
template <typename Element, typename Experts>
__device__ __forceinline__ void quantize_weight_tile(const Experts& w, bool vectorised,
                                                     ScaleRule rule, const WeightQuantized& out,
                                                     TurnedTile& turned, unsigned number) {
  __shared__ uint32_t warp_amax[kTileWarps];

  const int N = out.N, K = out.K;
  const int row_blocks = (N + kTile - 1) / kTile, col_blocks = (K + kTile - 1) / kTile;
  const int64_t e = number / (row_blocks * col_blocks);
  const int row = number / col_blocks % row_blocks * kTile;
  const int col = number % col_blocks * kTile;
  const int rows = min(kTile, N - row), cols = min(kTile, K - col);
  const int64_t first = (e * N + row) * K + col;

  Patch<Element> patch;
  patch.load(w.expert(e) + static_cast<int64_t>(row) * K + col, K, rows, cols, vectorised);
  uint32_t row_amax[kPatch], col_amax[Patch<Element>::kWords];
  patch.find_amax(row_amax, col_amax);
  uint32_t amax = 0;
#pragma unroll
  for (int i = 0; i < kPatch; ++i) amax = max(amax, row_amax[i]);
  amax = __reduce_max_sync(kFullWarp, amax);
  if (threadIdx.x % 32 == 0) warp_amax[threadIdx.x / 32] = amax;
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kTileWarps; ++i) amax = max(amax, warp_amax[i]);

  const BlockScale tile = block_scale(Format<Element>::to_float(amax), rule);
  if (threadIdx.x == 0) out.scale[number] = tile.scale;

  const int patch_row = Patch<Element>::row() * kPatch,
            patch_col = Patch<Element>::column() * kPatch;
  uint8_t* q_piece = out.q + first + static_cast<int64_t>(patch_row) * K + patch_col;
  uint32_t left[2][4], right[2][4];  // four columns of four rows each, above and below
#pragma unroll
  for (int i = 0; i < kPatch; ++i) {
    const uint2 bytes = patch.quantize_row(i, tile.factor);
    left[i / 4][i % 4] = bytes.x;
    right[i / 4][i % 4] = bytes.y;
    if (patch_row + i < rows && patch_col < cols)
      *reinterpret_cast<uint2*>(q_piece + static_cast<int64_t>(i) * K) = bytes;
  }

  // One scale for both layouts: the bytes of q_t are those of q.
  if (!out.q_t) return;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    transpose_bytes(left[half]);
    transpose_bytes(right[half]);
  }
#pragma unroll
  for (int c = 0; c < 4; ++c) {
    turned.put(c, make_uint2(left[0][c], left[1][c]));
    turned.put(c + 4, make_uint2(right[0][c], right[1][c]));
  }
  __syncthreads();
  turned.write(out.q_t + (e * K + col) * N + row, N, rows, cols);
}

// Where refresh is given and false, not a byte changes.
template <typename Element, typename Experts>
__global__ void __launch_bounds__(kTileThreads, kTileOccupancy<Element>)
    quantize_weight_kernel(const __grid_constant__ Experts w, bool vectorised, ScaleRule rule,
                           const bool* refresh, WeightQuantized out) {
  grid_dependency_wait();
  if (refresh && !*refresh) return;
  __shared__ TurnedTile turned;
  quantize_weight_tile<Element>(w, vectorised, rule, out, turned, blockIdx.x);
}

}  // namespace grouped_linear::cuda
