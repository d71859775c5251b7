// One pass over x [T, K]: a 128 x 128 tile is read once and gives its rowwise and columnwise data,
// both scales, and its share of the bias gradient.
//
// Bytes an element of bf16: 2 read, 1 + 4/128 written for each layout, so 3.03 rowwise and 4.06 for
// both; 32768 x 7168 at the 4.27 TB/s of a copy: 167 us and 223 us. The bias gradient adds 4/128.
//
// The number of tiles is known on the device alone, so the grid is as many blocks as the GPU holds
// at once, and each works through every gridDim.x-th tile. Neighbouring blocks take neighbouring
// columns of the same rows. Four blocks an SM (two in float32): while one waits for its loads, the
// others compute and store.
#pragma once

#include "block_scale.cuh"
#include "groups.cuh"

namespace grouped_linear::cuda {

// Where the results go; null for what is not asked for.
struct GroupQuantized {
  uint8_t* q;            // [T, K]
  float* scale;          // [ceil(K / 128), scale_stride]
  int64_t scale_stride;  // T rounded up
  uint8_t* q_t;          // [blocks, K, 128]
  float* scale_t;        // [blocks, K]
  float* block_sums;     // [blocks, K]: every block's columns, added from the first row to the last
};

// Bytes of dynamic shared memory: the tile as it was read (for the sums), then the turned tile.
template <typename Element>
constexpr int group_quantize_shared_bytes(bool columnwise, bool sums) {
  const int turned = columnwise ? sizeof(TurnedTile) : 0;
  const int tile = sums ? kTile * kTile * static_cast<int>(sizeof(Element)) : 0;
  return turned > tile ? turned : tile;
}

// A fixed order, the CPU's: from the first row to the last, starting from +0. Rows past the block's
// end are zero and change nothing, for a sum that starts from +0 is never -0.
template <typename Element>
__device__ __forceinline__ float column_sum(const Element* tile, int c) {
  using Bits = typename Format<Element>::Bits;
  const Bits* column = reinterpret_cast<const Bits*>(tile) + c;
  float sum = 0;
#pragma unroll 16
  for (int r = 0; r < kTile; ++r)
    sum = __fadd_rn(sum, Format<Element>::to_float(column[r * kTile]));
  return sum;
}

template <typename Element>
__global__ void __launch_bounds__(kTileThreads, kTileOccupancy<Element>)
    group_quantize_kernel(const Element* x, int64_t x_stride, bool vectorised, const int32_t* offs,
                          int E, int T, int K, ScaleRule rule, GroupQuantized out) {
  using Bits = typename Format<Element>::Bits;
  __shared__ GroupTable table;
  alignas(16) __shared__ Bits warp_amax[kTileWarps][kTile];
  alignas(16) __shared__ float col_factor[kTile];
  extern __shared__ uint4 group_quantize_shared[];
  Element* tile_read = reinterpret_cast<Element*>(group_quantize_shared);
  TurnedTile* turned = reinterpret_cast<TurnedTile*>(group_quantize_shared);

  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int patch_row = threadIdx.x / kPatches, patch_col = threadIdx.x % kPatches;
  const int half_warp = lane & kPatches;           // the first lane of this thread's row of patches
  const bool columns = out.q_t || out.block_sums;  // rowwise alone, no warp waits for another

  load_groups<kTileThreads>(table, offs, E, T, TilesOf{kTile});
  const int blocks = table.tile_end[E - 1];
  const int col_blocks = (K + kTile - 1) / kTile;
  const int block_step = gridDim.x / col_blocks, col_step = gridDim.x % col_blocks;

  int block = blockIdx.x / col_blocks, col_block = blockIdx.x % col_blocks;
  while (block < blocks) {
    const int e = table.group_of_tile(block, E);
    const int row_begin = table.row_begin(e) + (block - table.tile_begin(e)) * kTile;
    const int rows = min(kTile, table.row_end[e] - row_begin);
    const int col = col_block * kTile, cols = min(kTile, K - col);

    Patch<Element> patch;
    patch.load(x + row_begin * x_stride + col, x_stride, rows, cols, vectorised);
    if (out.block_sums) patch.store(tile_read);

    uint32_t row_amax[kPatch], col_amax[Patch<Element>::kWords];
    patch.find_amax(row_amax, col_amax);

    if (out.q_t) {
#pragma unroll
      for (int w = 0; w < Patch<Element>::kWords; ++w)
        col_amax[w] =
            Word<Element>::max(col_amax[w], __shfl_xor_sync(kFullWarp, col_amax[w], kPatches));
      if (lane < kPatches) {
        uint4* amax = reinterpret_cast<uint4*>(&warp_amax[warp][patch_col * kPatch]);
#pragma unroll
        for (int v = 0; v < Patch<Element>::kWords / 4; ++v)
          amax[v] = make_uint4(col_amax[4 * v], col_amax[4 * v + 1], col_amax[4 * v + 2],
                               col_amax[4 * v + 3]);
      }
    }
    if (columns) __syncthreads();  // tile_read and warp_amax are complete

    // The first half of the block works out the columns' scales, the other half their sums.
    if (threadIdx.x < kTile) {
      const int c = threadIdx.x;
      if (out.q_t) {
        uint32_t amax = 0;
#pragma unroll
        for (int w = 0; w < kTileWarps; ++w) amax = max(amax, uint32_t{warp_amax[w][c]});
        const BlockScale column = block_scale(Format<Element>::to_float(amax), rule);
        col_factor[c] = column.factor;
        if (c < cols) out.scale_t[static_cast<int64_t>(block) * K + col + c] = column.scale;
      }
    } else if (out.block_sums) {
      const int c = threadIdx.x - kTile;
      const float sum = column_sum(tile_read, c);
      if (c < cols) out.block_sums[static_cast<int64_t>(block) * K + col + c] = sum;
    }

    if (out.q) {
      const uint32_t amax = row_amax_of_half_warp(row_amax);
      const BlockScale row = block_scale(Format<Element>::to_float(amax), rule);
      const int first_row = patch_row * kPatch;
      if (patch_col < kPatch && first_row + patch_col < rows)
        out.scale[col_block * out.scale_stride + row_begin + first_row + patch_col] = row.scale;
      uint8_t* q =
          out.q + static_cast<int64_t>(row_begin + first_row) * K + col + patch_col * kPatch;
#pragma unroll
      for (int i = 0; i < kPatch; ++i) {
        const float factor = __shfl_sync(kFullWarp, row.factor, half_warp + i);
        const uint2 bytes = patch.quantize_row(i, factor);
        if (first_row + i < rows && patch_col * kPatch < cols)
          *reinterpret_cast<uint2*>(q + static_cast<int64_t>(i) * K) = bytes;
      }
    }
    if (columns) __syncthreads();  // col_factor is complete, tile_read has been used

    if (out.q_t) {
      const float4* factor = reinterpret_cast<const float4*>(&col_factor[patch_col * kPatch]);
      const float4 low = factor[0], high = factor[1];
      turned->put(0, patch.quantize_column(0, low.x));
      turned->put(1, patch.quantize_column(1, low.y));
      turned->put(2, patch.quantize_column(2, low.z));
      turned->put(3, patch.quantize_column(3, low.w));
      turned->put(4, patch.quantize_column(4, high.x));
      turned->put(5, patch.quantize_column(5, high.y));
      turned->put(6, patch.quantize_column(6, high.z));
      turned->put(7, patch.quantize_column(7, high.w));
      __syncthreads();
      turned->write(out.q_t + (static_cast<int64_t>(block) * K + col) * kTile, kTile, kTile, cols);
      // The next tile is stored where this one is still being read. Without sums the next writes to
      // shared memory are warp_amax, long used, and after a barrier col_factor and the turned tile.
      if (out.block_sums) __syncthreads();
    }

    block += block_step;
    col_block += col_step;
    if (col_block >= col_blocks) {
      col_block -= col_blocks;
      ++block;
    }
  }
}

constexpr int kSumThreads = 256;

// bias_grad [E, K]: the sums of a group's blocks, added from the first block to the last. One
// thread a column, blockIdx.x for 256 of them, blockIdx.y for every gridDim.y-th group.
static __global__ void __launch_bounds__(kSumThreads)
    add_block_sums_kernel(const float* block_sums, const int32_t* offs, int E, int T, int K,
                          float* bias_grad) {
  __shared__ GroupTable table;
  load_groups<kSumThreads>(table, offs, E, T, TilesOf{kTile});
  const int k = blockIdx.x * kSumThreads + threadIdx.x;
  if (k >= K) return;
  for (int e = blockIdx.y; e < E; e += gridDim.y) {
    float sum = 0;
    const int end = table.tile_end[e];
#pragma unroll 8
    for (int block = table.tile_begin(e); block < end; ++block)
      sum = __fadd_rn(sum, block_sums[static_cast<int64_t>(block) * K + k]);
    bias_grad[static_cast<int64_t>(e) * K + k] = sum;
  }
}

}  // namespace grouped_linear::cuda
