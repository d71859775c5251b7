// One pass over what is quantized [T, K]: a 128 x 128 tile is read or computed once and gives its
// rowwise and columnwise data, both scales, and its share of the bias gradient.
//
// Bytes an element of bf16: 2 read, 1 + 4/128 written for each layout, so 3.03 rowwise and 4.06 for
// both; 32768 x 7168 at the 4.27 TB/s of a copy: 167 us and 223 us. The bias gradient adds 4/128.
// SwiGLU reads 4 bytes an element of h, its gradient 3 an element of d_gate_up.
//
// The number of tiles is known on the device alone, so the grid is as many blocks as the GPU holds
// at once, and each works through every gridDim.x-th tile. Neighbouring blocks take neighbouring
// columns of the same rows. Four blocks an SM (two in float32): while one waits for its loads, the
// others compute and store. A block asks the L2 cache for its next tile before it works on one.
#pragma once

#include "block_scale.cuh"
#include "groups.cuh"
#include "overlap.cuh"
#include "swiglu.cuh"

namespace grouped_linear::cuda {

// Where the results go; null for what is not asked for.
struct GroupQuantized {
  uint8_t* q;            // [T, K]
  float* scale;          // [ceil(K / 128), scale_stride]
  int64_t scale_stride;  // T rounded up
  uint8_t* q_t;          // [blocks, K, 128]
  float* scale_t;        // [blocks, K]
  float*
      block_sums;  // [blocks, K]: every block's columns. Rows are added in eights, from the first
                   // to the last, then the eights, each sum starting from +0: the CPU's order.
                   // Rows past the block's end are zero and change nothing: no sum is -0.
};

// A warp's own table of at most 32 groups, one a lane, in registers: no barrier to fill it, one vote
// to look a tile up. More groups take GroupTable.
struct WarpGroups {
  int row_end, tile_end;

  __device__ __forceinline__ void load(const int32_t* offs, int E, int T) {
    const int lane = threadIdx.x % 32;
    row_end = lane < E ? min(max(offs[lane], 0), T) : 0;
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
      const int left = __shfl_up_sync(kFullWarp, row_end, distance);
      if (lane >= distance) row_end = max(row_end, left);
    }
    const int left = __shfl_up_sync(kFullWarp, row_end, 1);
    tile_end = (row_end - (lane == 0 ? 0 : left) + kTile - 1) / kTile;
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
      const int before = __shfl_up_sync(kFullWarp, tile_end, distance);
      if (lane >= distance) tile_end += before;
    }
  }

  // All rows of all groups as one group: what rowwise data alone needs, however many groups.
  __device__ __forceinline__ void load_as_one(const int32_t* offs, int E, int T) {
    int end = 0;
    for (int e = threadIdx.x % 32; e < E; e += 32) end = max(end, min(offs[e], T));
    row_end = __reduce_max_sync(kFullWarp, end);
    tile_end = (row_end + kTile - 1) / kTile;
  }

  __device__ __forceinline__ int tiles() const { return __shfl_sync(kFullWarp, tile_end, 31); }

  // For a tile below tiles(), the same in every lane.
  __device__ __forceinline__ void rows_of_tile(int tile, int& begin, int& rows) const {
    const int e = __popc(__ballot_sync(kFullWarp, tile_end <= tile));
    const int row_left = __shfl_sync(kFullWarp, row_end, e - 1);  // of lane 31 where e is 0
    const int tile_left = __shfl_sync(kFullWarp, tile_end, e - 1);
    begin = e == 0 ? tile * kTile : row_left + (tile - tile_left) * kTile;
    rows = min(kTile, __shfl_sync(kFullWarp, row_end, e) - begin);
  }
};

// --- what a tile is made of ---------------------------------------------------------------------
//
// A source loads the patch of the calling thread from the tile at (row_begin, col), zero past its
// rows and columns. One with two parts loads a patch of each half of the columns, K / 2 apart.
//
// H200, 2026-11: 3 blocks an SM beat 4 by 1% on plain rows. Fetching a block's next tiles into L2
// ahead of time costs 10 to 20%.

// Rows of x [T, K].
template <typename Element>
struct Rows {
  static constexpr int kOccupancy = sizeof(Element) == 2 ? 3 : 2, kParts = 1;
  const Element* x;
  int64_t stride;
  bool vectorised;

  __device__ __forceinline__ void load(Patch<Element> (&patch)[1], int row_begin, int rows, int col,
                                       int cols) const {
    patch[0].load(x + row_begin * stride + col, stride, rows, cols, vectorised);
  }
};

// Rows taken[t] of x [S, K], which has S >= 1 rows. What is out of range is clamped into it.
template <typename Element, typename Index>
struct GatheredRows {
  static constexpr int kOccupancy = sizeof(Element) == 2 ? 3 : 2, kParts = 1;
  const Element* x;
  int64_t stride;
  bool vectorised;
  const Index* taken;
  int64_t S;

  __device__ __forceinline__ void load(Patch<Element> (&patch)[1], int row_begin, int rows, int col,
                                       int cols) const {
    const int first = Patch<Element>::row() * kPatch;
    patch[0].load_rows(
        [&](int i) {
          const int64_t s = taken[row_begin + min(first + i, rows - 1)];
          return x + min(max(s, int64_t{0}), S - 1) * stride + col;
        },
        rows, cols, vectorised);
  }
};

// h [T, K] = silu(gate) * up of gate_up [T, 2 K], rounded to Element; kept where h is not null.
template <typename Element>
struct Swiglu {
  static constexpr int kOccupancy = sizeof(Element) == 2 ? 2 : 1, kParts = 1;
  const Element* gate_up;
  int64_t stride;
  bool vectorised;
  int K;
  Element* h;

  __device__ __forceinline__ void load(Patch<Element> (&patch)[1], int row_begin, int rows, int col,
                                       int cols) const {
    const Element* gate = gate_up + row_begin * stride + col;
    Patch<Element> up;
    patch[0].load(gate, stride, rows, cols, vectorised);
    up.load(gate + K, stride, rows, cols, vectorised);
#pragma unroll
    for (int i = 0; i < kPatch; ++i) swiglu_of_eight<Element>(patch[0].words[i], up.words[i]);
    if (!h) return;
    const int first = Patch<Element>::row() * kPatch, column = Patch<Element>::column() * kPatch;
    const int here = column < cols ? rows - first : 0;
    Element* next = h + static_cast<int64_t>(row_begin + first) * K + col + column;
#pragma unroll
    for (int i = 0; i < kPatch; ++i) {
      Element* to = take_row(next, K);
      if (i < here) Patch<Element>::store_words(patch[0].words[i], to);
    }
  }
};

// d_gate_up [T, 2 K] from dh [T, K] and gate_up [T, 2 K], rounded to Element. `parts`: 2 where
// Element has 16 bits, all rows are aligned and K is a multiple of 128, so that no tile reaches from
// the columns of gate into those of up: then everything is read once. Else 1. A patch is of one half
// in any case, for K is a multiple of 16.
template <typename Element, int parts>
struct SwigluGrad {
  static constexpr int kOccupancy = sizeof(Element) == 2 ? 2 : 1, kParts = parts;
  const Element* dh;
  int64_t dh_stride;
  const Element* gate_up;
  int64_t stride;
  bool vectorised;
  int K;

  __device__ __forceinline__ void load(Patch<Element> (&patch)[parts], int row_begin, int rows,
                                       int col, int cols) const {
    const bool of_gate = parts == 2 || col + Patch<Element>::column() * kPatch < K;
    const int k = of_gate ? col : col - K;  // of the tile's first column, as if all were this half
    const Element* gate = gate_up + row_begin * stride + k;
    const bool in_words = parts == 2 || vectorised;
    constexpr int kRows = kPatch / 2;  // at once; with all, registers spill
    Patch<Element> d, up;
    const auto compute = [&](auto number) {
      constexpr int first = decltype(number)::value * kRows, last = first + kRows;
      d.template load<first, last>(dh + row_begin * dh_stride + k, dh_stride, rows, cols, in_words);
      patch[0].template load<first, last>(gate, stride, rows, cols, in_words);
      up.template load<first, last>(gate + K, stride, of_gate ? rows : 0, cols, in_words);
#pragma unroll
      for (int i = first; i < last; ++i) {
        if constexpr (parts == 2)
          swiglu_grads_of_eight<Element>(d.words[i], patch[0].words[i], up.words[i],
                                         patch[1].words[i]);
        else
          swiglu_grad_of_eight<Element>(of_gate, d.words[i], patch[0].words[i], up.words[i]);
      }
    };
    compute(std::integral_constant<int, 0>());
    compute(std::integral_constant<int, 1>());
  }
};

// --- the pass -----------------------------------------------------------------------------------

template <typename Element, typename Source>
__global__ void __launch_bounds__(kTileThreads, Source::kOccupancy)
    group_quantize_kernel(Source source, const int32_t* offs, int E, int T, int K, ScaleRule rule,
                          GroupQuantized out) {
  start_after_previous();
  using Bits = typename Format<Element>::Bits;
  __shared__ GroupTable table;
  alignas(16) __shared__ Bits warp_amax[kTileWarps][kTile];
  alignas(16) __shared__ float col_factor[kTile];
  alignas(16) __shared__ float patch_sums[kPatches][kTile];
  __shared__ TurnedTile turned;

  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int patch_row = threadIdx.x / kPatches, patch_col = threadIdx.x % kPatches;
  const int half_warp = lane & kPatches;           // the first lane of this thread's row of patches
  const bool columns = out.q_t || out.block_sums;  // rowwise alone, no warp waits for another

  // A row's data do not depend on its group: rowwise alone, small groups share tiles.
  const bool few_groups = E <= 32 || !columns;
  WarpGroups groups;
  if (!columns)
    groups.load_as_one(offs, E, T);
  else if (few_groups)
    groups.load(offs, E, T);
  else
    load_groups<kTileThreads>(table, offs, E, T, TilesOf{kTile});
  const int blocks = few_groups ? groups.tiles() : table.tile_end[E - 1];
  const int part_cols = K / Source::kParts, col_blocks = (part_cols + kTile - 1) / kTile;
  const int block_step = gridDim.x / col_blocks, col_step = gridDim.x % col_blocks;
  const auto rows_of_block = [&](int block, int& begin, int& rows) {
    if (few_groups) return groups.rows_of_tile(block, begin, rows);
    const int e = table.group_of_tile(block, E);
    begin = table.row_begin(e) + (block - table.tile_begin(e)) * kTile;
    rows = min(kTile, table.row_end[e] - begin);
  };

  int block = blockIdx.x / col_blocks, col_block = blockIdx.x % col_blocks;
  const auto advance = [&](int& to_block, int& to_col_block) {
    to_block += block_step;
    to_col_block += col_step;
    if (to_col_block >= col_blocks) {
      to_col_block -= col_blocks;
      ++to_block;
    }
  };
  while (block < blocks) {
    int row_begin, rows;
    rows_of_block(block, row_begin, rows);
    const int first_col = col_block * kTile, cols = min(kTile, part_cols - first_col);

    Patch<Element> patches[Source::kParts];
    source.load(patches, row_begin, rows, first_col, cols);

#pragma unroll
    for (int part = 0; part < Source::kParts; ++part) {
      Patch<Element>& patch = patches[part];
      const int col = part * part_cols + first_col;
      if (out.block_sums) {  // before what is not finite turns into NaN
        float sums[kPatch];
        patch.column_sums(sums);
        float4* piece = reinterpret_cast<float4*>(&patch_sums[patch_row][patch_col * kPatch]);
        piece[0] = make_float4(sums[0], sums[1], sums[2], sums[3]);
        piece[1] = make_float4(sums[4], sums[5], sums[6], sums[7]);
      }

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
      if (columns) __syncthreads();  // patch_sums and warp_amax are complete

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
        float sum = 0;
#pragma unroll
        for (int p = 0; p < kPatches; ++p) sum = __fadd_rn(sum, patch_sums[p][c]);
        if (c < cols) out.block_sums[static_cast<int64_t>(block) * K + col + c] = sum;
      }

      if (out.q) {
        const uint32_t amax = row_amax_of_half_warp(row_amax);
        const BlockScale row = block_scale(Format<Element>::to_float(amax), rule);
        const int first_row = patch_row * kPatch;
        if (patch_col < kPatch && first_row + patch_col < rows)
          out.scale[col / kTile * out.scale_stride + row_begin + first_row + patch_col] = row.scale;
        const int here = patch_col * kPatch < cols ? rows - first_row : 0;
        uint8_t* next =
            out.q + static_cast<int64_t>(row_begin + first_row) * K + col + patch_col * kPatch;
#pragma unroll
        for (int i = 0; i < kPatch; ++i) {
          const float factor = __shfl_sync(kFullWarp, row.factor, half_warp + i);
          const uint2 bytes = patch.quantize_row(i, factor);
          uint2* to = reinterpret_cast<uint2*>(take_row(next, K));
          if (i < here) *to = bytes;
        }
      }
      // col_factor is complete, patch_sums and warp_amax have been used
      if (columns) __syncthreads();

      if (out.q_t) {
        const float4* factor = reinterpret_cast<const float4*>(&col_factor[patch_col * kPatch]);
        const float4 low = factor[0], high = factor[1];
        turned.put(0, patch.quantize_column(0, low.x));
        turned.put(1, patch.quantize_column(1, low.y));
        turned.put(2, patch.quantize_column(2, low.z));
        turned.put(3, patch.quantize_column(3, low.w));
        turned.put(4, patch.quantize_column(4, high.x));
        turned.put(5, patch.quantize_column(5, high.y));
        turned.put(6, patch.quantize_column(6, high.z));
        turned.put(7, patch.quantize_column(7, high.w));
        __syncthreads();
        // The next tile writes col_factor after one more barrier, and the turned tile after two.
        turned.write(out.q_t + (static_cast<int64_t>(block) * K + col) * kTile, kTile, kTile, cols);
      }
    }

    advance(block, col_block);
  }
}

constexpr int kSumThreads = 256;

// bias_grad [E, K]: the sums of a group's blocks, added from the first block to the last. One
// thread a column, blockIdx.x for 256 of them, blockIdx.y for every gridDim.y-th group.
static __global__ void __launch_bounds__(kSumThreads)
    add_block_sums_kernel(const float* block_sums, const int32_t* offs, int E, int T, int K,
                          float* bias_grad) {
  start_after_previous();
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
