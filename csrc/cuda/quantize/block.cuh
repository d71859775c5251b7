// SPDX-License-Identifier: Apache-2.0
// Block scaling: one pass over a source [T, K]. A 128 x 128 tile is read or computed once, and
// gives its rowwise and its columnwise data, the scales of both, and its partial bias gradient.
//
// Bytes an element of bf16: 2 read; 1 + 4/128 written for each layout, so 3.03 rowwise and 4.06 for
// both. 32768 x 7168 at the 4.27 TB/s of a copy: 167 us and 223 us. The bias gradient adds 4/128.
// SwiGLU reads 4 bytes an element of h, its gradient 3 an element of d_gate_up.
//
// Reaches (H200, 2026-11-22) of a copy's speed: rowwise 0.98, both 0.95, SwiGLU 0.90, its gradient
// 0.89. SwiGLU with alpha, beta and a limit 0.77, its gradient 0.75; SwiGLU with gate and up
// interleaved 0.74 (2026-11-24). The gradient was measured before it took the rows' weights;
// without h it now takes 1.00 to 1.05 times as long (H100, 2026-11-25, docs/notes/expert_layer.md).
//
// The number of tiles is known on the device alone. The grid is therefore bounded by what the GPU
// holds at once, times a few waves, and a thread block steps through every gridDim.x-th tile.
#pragma once

#include "cuda/common/pdl.cuh"
#include "cuda/common/tile_locations.cuh"
#include "cuda/common/transposed_tile.cuh"
#include "cuda/quantize/bias_grad.cuh"
#include "cuda/quantize/block_sources.cuh"

namespace grouped_linear::cuda {

// How many fragments a source loads of a tile, and where the results of one go.
template <typename Source>
constexpr int fragments_of = Source::kParts;
template <typename Source>
  requires(Source::kFragments > 0)
constexpr int fragments_of<Source> = Source::kFragments;

template <typename Source>
__device__ __forceinline__ const BlockOutputs& outputs_of(const Source& source,
                                                          const BlockOutputs& outputs,
                                                          bool is_second) {
  if constexpr (fragments_of<Source> > Source::kParts)
    if (is_second) return source.second;
  return outputs;
}

// Quantizes every step-th tile from `first` on, by one thread block.
template <typename Element, typename Source>
__device__ __forceinline__ void quantize_tiles_of_block(const Source& source, const int32_t* offs,
                                                        int E, int T, int all_cols, ScaleRule rule,
                                                        const BlockOutputs& outputs,
                                                        TransposedTile& transposed, unsigned first,
                                                        unsigned step) {
  __shared__ GroupTable table;
  // Gathered rows of many groups: where tile n of this thread block is, at n % kLocated. One thread
  // searches the table, two tiles ahead, while the copies of a tile are on their way. (Sources with
  // more arithmetic a tile take up to 4% longer with it: H100, 2026-11.)
  constexpr int kLocated = 4;
  __shared__ TileLocation located[Source::kDownColumns ? kLocated : 1];
  __shared__ ColumnAmax<Element> column_amax;
  __shared__ uint32_t warp_largest[kTileWarps];
  __shared__ float shared_factor, shared_scale;
  alignas(16) __shared__ float col_factor[kTileSide];
  __shared__ float col_scale[kTileSide];
  __shared__ TileColumnSums sums;
  // At 16 bytes past a multiple of 32, copies take a fifth longer (SwiGLU, H200, 2026-11-22).
  extern __shared__ __align__(128) uint4 prefetch_shared[];
  auto& buffer = *reinterpret_cast<typename Source::Buffer*>(prefetch_shared);

  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int fragment_row = Fragment<Element>::row(), fragment_col = Fragment<Element>::column();
  const int half_warp = lane & kFragmentsPerSide;  // first lane of this thread's row of fragments
  // Without columnwise results no warp waits for another.
  constexpr int kFragments = fragments_of<Source>;
  constexpr bool kHasSecond = kFragments > Source::kParts;
  const bool columnwise = outputs.q_t || outputs.partial_bias_grad || kHasSecond;

  // Rowwise data do not depend on the group: without columnwise results, small groups share tiles.
  const bool few_groups = E <= 32 || !columnwise;
  WarpGroups<kTileSide> groups;
  if (!columnwise)
    groups.load_as_one(offs, E, T);
  else if (few_groups)
    groups.load(offs, E, T);
  else
    load_groups<kTileThreads>(table, offs, E, T, TilesOf{kTileSide});
  const int blocks = few_groups ? groups.tiles() : table.tile_end[E - 1];
  const int part_cols = all_cols / Source::kParts,
            col_blocks = (part_cols + kTileSide - 1) / kTileSide;
  // A line of tiles has the same rows, or where kDownColumns the same columns.
  constexpr bool down = Source::kDownColumns;
  const int per_line = down ? max(blocks, 1) : col_blocks;
  const int lines = down && blocks > 0 ? col_blocks : blocks;
  const int line_step = step / per_line, tile_step = step % per_line;
  const auto line_of = [](TileBounds& at) -> int& { return down ? at.col_block : at.block; };
  const auto tile_of = [](TileBounds& at) -> int& { return down ? at.block : at.col_block; };
  const bool searches_ahead = Source::kDownColumns && !few_groups;
  const auto search = [&](TileBounds at, int n) {
    if (line_of(at) < lines) located[n % kLocated] = locate_tile<kTileSide>(table, E, at.block);
  };
  // Returns whether tile (block, col_block), tile n of this thread block, exists, and if so fills in
  // its bounds.
  const auto locate = [&](TileBounds& at, int n) {
    if (line_of(at) >= lines) return false;
    const TileLocation tile = few_groups       ? groups.locate(at.block)
                              : searches_ahead ? located[n % kLocated]
                                               : locate_tile<kTileSide>(table, E, at.block);
    at.row_begin = tile.row_begin;
    at.rows = tile.rows;
    at.col = at.col_block * kTileSide;
    at.cols = min(kTileSide, part_cols - at.col);
    return true;
  };
  const auto step_on = [&](TileBounds& at) {
    line_of(at) += line_step;
    tile_of(at) += tile_step;
    if (tile_of(at) >= per_line) {
      tile_of(at) -= per_line;
      ++line_of(at);
    }
  };
  const auto locate_next = [&](TileBounds& at, int n) {
    step_on(at);
    return locate(at, n);
  };

  TileBounds at{};
  line_of(at) = first / per_line;
  tile_of(at) = first % per_line;
  if (searches_ahead) {
    TileBounds next = at;
    step_on(next);
    if (threadIdx.x == 0) search(at, 0);
    if (threadIdx.x == 32) search(next, 1);
    __syncthreads();
  }
  int n = 0;
  bool exists = locate(at, n);
  if (exists) source.prefetch(buffer, at);
  for (; exists; exists = locate_next(at, ++n)) {
    if (searches_ahead && threadIdx.x == kTileThreads - 1) {
      TileBounds after_next = at;
      step_on(after_next);
      step_on(after_next);
      search(after_next, n + 2);
    }
    Fragment<Element> fragments[kFragments];
    source.load(fragments, buffer, at);
    if constexpr (!std::is_empty_v<typename Source::Buffer>) {
      // Located here and again at the loop's end: kept until then, it would take registers. The asm
      // hides from the compiler that the two are the same.
      TileBounds next = at;
      if (locate_next(next, n + 1)) source.prefetch(buffer, next);
      asm("" : "+r"(at.block), "+r"(at.col_block));
    }

#pragma unroll
    for (int i = 0; i < kFragments; ++i) {
      // The Second's fragment goes first: registers are scarcest while all fragments are alive.
      const int part = (i + Source::kParts) % kFragments;
      const bool is_second = part == Source::kParts;
      Fragment<Element>& fragment = fragments[part];
      const BlockOutputs& out = outputs_of(source, outputs, is_second);
      const bool rowwise = !is_second && out.q, sums_rows = !is_second && out.partial_bias_grad;
      const bool shares = (is_second || Source::kCanShareScales) && out.share_scales;
      const int K = is_second ? part_cols : all_cols;
      const int block = at.block, row_begin = at.row_begin, rows = at.rows, cols = at.cols;
      const int col = (is_second ? 0 : part * part_cols) + at.col;
      const int64_t column = static_cast<int64_t>(block) * K + col;  // in columnwise results
      if (sums_rows) sums.put(fragment);

      uint32_t row_amax[kFragmentSize];
      FragmentRow<Element> col_amax;
      fragment.find_amax(row_amax, col_amax);
      // Reduced early, the rows' amax take one register instead of eight; sources without a buffer
      // have few registers.
      constexpr bool reduce_early = std::is_empty_v<typename Source::Buffer>;
      uint32_t own_row_amax = 0;
      if constexpr (reduce_early) own_row_amax = row_amax_of_half_warp(row_amax);

      if (out.q_t) {
        if (shares) {
          uint32_t largest = 0;
#pragma unroll
          for (int w = 0; w < Fragment<Element>::kWords; ++w)
            largest = Word<Element>::max(largest, col_amax[w]);
          largest = __reduce_max_sync(kFullWarp, Word<Element>::largest(largest));
          if (lane == 0) warp_largest[warp] = largest;
        }
        column_amax.put(col_amax);
      }
      if (columnwise) __syncthreads();  // sums and column_amax are complete

      // Half of the threads compute the columns' scales, the other half the columns' sums.
      bool can_share = true;
      if (threadIdx.x < kTileSide) {
        const int c = threadIdx.x;
        if (out.q_t) {
          uint32_t bits = 0;
#pragma unroll
          for (int w = 0; w < kTileWarps; ++w)
            bits = max(bits, uint32_t{column_amax.of_warps[w][c]});
          const float amax = Format<Element>::to_float(bits);
          const BlockScale own = block_scale(amax, rule);
          col_factor[c] = own.factor;
          col_scale[c] = own.scale;
          if (shares) {
#pragma unroll
            for (int w = 0; w < kTileWarps; ++w) bits = max(bits, warp_largest[w]);
            const float largest = Format<Element>::to_float(bits);
            can_share = amax == 0 || amax * kShareWithin >= largest;
            if (c == 0) {
              const BlockScale all = block_scale(largest, rule);
              shared_factor = all.factor;
              shared_scale = all.scale;
            }
          }
        }
      } else if (sums_rows) {
        const int c = threadIdx.x - kTileSide;
        const float sum = sums.column(c);
        if (c < cols) out.partial_bias_grad[column + c] = sum;
      }

      if (rowwise) {
        if constexpr (!reduce_early) own_row_amax = row_amax_of_half_warp(row_amax);
        const BlockScale row = block_scale(Format<Element>::to_float(own_row_amax), rule);
        const int first_row = fragment_row * kFragmentSize;
        if (fragment_col < kFragmentSize && first_row + fragment_col < rows)
          out.scale[col / kTileSide * out.scale_stride + row_begin + first_row + fragment_col] =
              row.scale;
        const int valid_rows = fragment_col * kFragmentSize < cols ? rows - first_row : 0;
        uint8_t* next = out.q + static_cast<int64_t>(row_begin + first_row) * K + col +
                        fragment_col * kFragmentSize;
#pragma unroll
        for (int i = 0; i < kFragmentSize; ++i) {
          const float factor = __shfl_sync(kFullWarp, row.factor, half_warp + i);
          const uint2 bytes = fragment.quantize_row(i, factor);
          uint2* to = reinterpret_cast<uint2*>(advance_row(next, K));
          if (i < valid_rows) *to = bytes;
        }
      }
      // col_factor is complete; sums and column_amax have been read.
      if (shares)
        can_share = __syncthreads_and(can_share);
      else if (columnwise)
        __syncthreads();

      if (out.q_t) {
        const float4* factor =
            reinterpret_cast<const float4*>(&col_factor[fragment_col * kFragmentSize]);
        float4 low = factor[0], high = factor[1];
        const bool shared = shares && can_share;
        if (shared) {
          const float f = shared_factor;
          low = high = make_float4(f, f, f, f);
        }
        if (threadIdx.x < cols)
          out.scale_t[column + threadIdx.x] = shared ? shared_scale : col_scale[threadIdx.x];
        transposed.put(0, fragment.quantize_column(0, low.x));
        transposed.put(1, fragment.quantize_column(1, low.y));
        transposed.put(2, fragment.quantize_column(2, low.z));
        transposed.put(3, fragment.quantize_column(3, low.w));
        transposed.put(4, fragment.quantize_column(4, high.x));
        transposed.put(5, fragment.quantize_column(5, high.y));
        transposed.put(6, fragment.quantize_column(6, high.z));
        transposed.put(7, fragment.quantize_column(7, high.w));
        __syncthreads();
        // No barrier after: the next tile writes col_factor one barrier later, `transposed` two
        // later.
        transposed.write(out.q_t + column * kTileSide, kTileSide, kTileSide, cols);
      }
    }
  }
}

// The same rowwise alone, where tiles would leave most of the GPU idle: half a warp has 128 columns of
// a row. Rows past the last group are quantized like others, for their results hold anything.
//
// SwiGLU of a single tile of rows took 14 us by tiles, and this takes 3 (H200, 2026-11).
template <typename Element, typename Source>
__global__ void __launch_bounds__(kTileThreads)
    quantize_single_rows_kernel(Source source, int T, int K, ScaleRule rule, BlockOutputs out) {
  grid_dependency_wait();
  const int col_blocks = (K + kTileSide - 1) / kTileSide;
  const int number = static_cast<int>(blockIdx.x * kTileThreads + threadIdx.x) / kFragmentsPerSide;
  const int row = number / col_blocks, block = number % col_blocks;
  const int col = block * kTileSide + Fragment<Element>::column() * kFragmentSize;
  Fragment<Element> fragment;  // of one row
  fragment.template clear<0, kFragmentSize>();
  if (row < T && col < K) source.load_row(row, col, fragment.words[0]);
  uint32_t amax[kFragmentSize];
  FragmentRow<Element> of_columns;
  fragment.find_amax(amax, of_columns);
#pragma unroll
  for (int distance = 1; distance < kFragmentsPerSide; distance *= 2)
    amax[0] = max(amax[0], __shfl_xor_sync(kFullWarp, amax[0], distance));
  if (row >= T) return;
  const BlockScale scale = block_scale(Format<Element>::to_float(amax[0]), rule);
  if (Fragment<Element>::column() == 0) out.scale[block * out.scale_stride + row] = scale.scale;
  if (col < K)
    *reinterpret_cast<uint2*>(out.q + static_cast<int64_t>(row) * K + col) =
        fragment.quantize_row(0, scale.factor);
}

// Thread blocks whose registers an SM must have room for. The largest prefetch buffers leave room
// for one block where an SM has less shared memory than Hopper's or B200's.
template <typename Source>
constexpr int resident_blocks() {
#if defined(__CUDA_ARCH__) && (__CUDA_ARCH__ < 900 || __CUDA_ARCH__ >= 1200)
  if (sizeof(typename Source::Buffer) > 40 * 1024) return 1;
#endif
  return Source::kOccupancy;
}

template <typename Element, typename Source>
__global__ void __launch_bounds__(kTileThreads, resident_blocks<Source>())
    group_quantize_kernel(Source source, const int32_t* offs, int E, int T, int K, ScaleRule rule,
                          BlockOutputs out) {
  grid_dependency_wait();
  __shared__ TransposedTile transposed;
  quantize_tiles_of_block<Element>(source, offs, E, T, K, rule, out, transposed, blockIdx.x,
                                   gridDim.x);
}

}  // namespace grouped_linear::cuda
