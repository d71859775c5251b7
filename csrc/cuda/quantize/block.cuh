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

// The tiles of a thread block: every step-th one from `first` on. A line of tiles has the same rows,
// or where kDownColumns the same columns.
template <typename Source>
class TileWalk {
  static constexpr bool kDown = Source::kDownColumns;
  static constexpr int kLocated = 4;

 public:
  // Rowwise data do not depend on the group: without columnwise results, small groups share tiles.
  __device__ __forceinline__ TileWalk(GroupTable& table, const int32_t* offs, int E, int T,
                                      int part_cols, bool columnwise, unsigned step)
      : table_(table), E_(E), part_cols_(part_cols), few_groups_(E <= 32 || !columnwise) {
    // Gathered rows of many groups: where tile n of this thread block is, at n % kLocated. One
    // thread searches the table, two tiles ahead, while the copies of a tile are on their way.
    // (Sources with more arithmetic a tile take up to 4% longer with it: H100, 2026-11.)
    __shared__ TileLocation located[kDown ? kLocated : 1];
    located_ = located;
    if (!columnwise)
      groups_.load_as_one(offs, E, T);
    else if (few_groups_)
      groups_.load(offs, E, T);
    else
      load_groups<kTileThreads>(table, offs, E, T, TilesOf{kTileSide});
    const int blocks = few_groups_ ? groups_.tiles() : table.tile_end[E - 1];
    const int col_blocks = (part_cols + kTileSide - 1) / kTileSide;
    per_line_ = kDown ? max(blocks, 1) : col_blocks;
    lines_ = kDown && blocks > 0 ? col_blocks : blocks;
    line_step_ = step / per_line_, tile_step_ = step % per_line_;
  }

  __device__ __forceinline__ TileBounds start(unsigned first) const {
    TileBounds at{};
    line_of(at) = first / per_line_;
    tile_of(at) = first % per_line_;
    if (searches_ahead()) {
      TileBounds next = at;
      step_on(next);
      if (threadIdx.x == 0) search(at, 0);
      if (threadIdx.x == 32) search(next, 1);
      __syncthreads();
    }
    return at;
  }
  // Returns whether tile (block, col_block), tile n of this thread block, exists, and if so fills
  // in its bounds.
  __device__ __forceinline__ bool locate(TileBounds& at, int n) const {
    if (line_of(at) >= lines_) return false;
    const TileLocation tile = few_groups_        ? groups_.locate(at.block)
                              : searches_ahead() ? located_[n % kLocated]
                                                 : locate_tile<kTileSide>(table_, E_, at.block);
    at.row_begin = tile.row_begin;
    at.rows = tile.rows;
    at.col = at.col_block * kTileSide;
    at.cols = min(kTileSide, part_cols_ - at.col);
    return true;
  }
  __device__ __forceinline__ bool locate_next(TileBounds& at, int n) const {
    step_on(at);
    return locate(at, n);
  }
  // Called at tile n.
  __device__ __forceinline__ void search_ahead(TileBounds at, int n) const {
    if (!searches_ahead() || threadIdx.x != kTileThreads - 1) return;
    step_on(at);
    step_on(at);
    search(at, n + 2);
  }

 private:
  static __device__ __forceinline__ int& line_of(TileBounds& at) {
    return kDown ? at.col_block : at.block;
  }
  static __device__ __forceinline__ int& tile_of(TileBounds& at) {
    return kDown ? at.block : at.col_block;
  }
  __device__ __forceinline__ bool searches_ahead() const { return kDown && !few_groups_; }
  __device__ __forceinline__ void search(TileBounds at, int n) const {
    if (line_of(at) < lines_) located_[n % kLocated] = locate_tile<kTileSide>(table_, E_, at.block);
  }
  __device__ __forceinline__ void step_on(TileBounds& at) const {
    line_of(at) += line_step_;
    tile_of(at) += tile_step_;
    if (tile_of(at) >= per_line_) {
      tile_of(at) -= per_line_;
      ++line_of(at);
    }
  }

  const GroupTable& table_;
  TileLocation* located_;
  WarpGroups<kTileSide> groups_;
  int E_, part_cols_, per_line_, lines_, line_step_, tile_step_;
  bool few_groups_;
};

// Which results a fragment of each thread has, and where they are in those of all columns.
struct FragmentOutputs {
  const BlockOutputs& of;
  bool rowwise, sums_rows, shares;
  int K, col;
  int64_t column;  // in columnwise results
};

// Quantizes a fragment of each thread of a block. columnwise: there are results that need what
// other warps have. Otherwise no warp waits for another.
template <typename Element>
class FragmentQuantizer {
 public:
  struct Shared {
    ColumnAmax<Element> column_amax;
    uint32_t warp_largest[kTileWarps];
    float shared_factor, shared_scale;  // where columns share a scale
    alignas(16) float col_factor[kTileSide];
    float col_scale[kTileSide];
    TileColumnSums sums;
  };

  __device__ __forceinline__ FragmentQuantizer(Shared& shared, TransposedTile& transposed,
                                               ScaleRule rule, bool columnwise)
      : shared_(shared), transposed_(transposed), rule_(rule), columnwise_(columnwise) {}

  // reduce_early: the rows' amax take one register instead of eight.
  template <bool reduce_early>
  __device__ __forceinline__ void quantize(Fragment<Element>& fragment, const FragmentOutputs& to,
                                           const TileBounds& at) {
    if (to.sums_rows) shared_.sums.put(fragment);
    uint32_t row_amax[kFragmentSize];
    FragmentRow<Element> col_amax;
    fragment.find_amax(row_amax, col_amax);
    uint32_t own_row_amax = 0;
    if constexpr (reduce_early) own_row_amax = row_amax_of_half_warp(row_amax);
    if (to.of.q_t) {
      if (to.shares) put_largest(col_amax);
      shared_.column_amax.put(col_amax);
    }
    if (columnwise_) __syncthreads();  // sums and column_amax are complete

    // Half of the threads compute the columns' scales, the other half the columns' sums.
    bool can_share = true;
    if (threadIdx.x < kTileSide) {
      if (to.of.q_t) {
        const uint32_t bits = find_scale(threadIdx.x);
        if (to.shares) can_share = find_shared_scale(threadIdx.x, bits);
      }
    } else {
      const int c = threadIdx.x - kTileSide;
      if (to.sums_rows && c < at.cols)
        to.of.partial_bias_grad[to.column + c] = shared_.sums.column(c);
    }
    if (to.rowwise) {
      if constexpr (!reduce_early) own_row_amax = row_amax_of_half_warp(row_amax);
      store_rows(fragment, own_row_amax, to, at);
    }
    // Factors are complete; sums and column_amax have been read.
    if (to.shares)
      can_share = __syncthreads_and(can_share);
    else if (columnwise_)
      __syncthreads();
    if (to.of.q_t) store_columns(fragment, to.shares && can_share, to, at.cols);
  }

 private:
  __device__ __forceinline__ void put_largest(const FragmentRow<Element>& col_amax) {
    uint32_t largest = 0;
#pragma unroll
    for (int w = 0; w < Fragment<Element>::kWords; ++w)
      largest = Word<Element>::max(largest, col_amax[w]);
    largest = __reduce_max_sync(kFullWarp, Word<Element>::largest(largest));
    if (lane_ == 0) shared_.warp_largest[warp_] = largest;
  }

  // Finds the scale of column c. Returns the bits of its amax.
  __device__ __forceinline__ uint32_t find_scale(int c) {
    uint32_t bits = 0;
#pragma unroll
    for (int w = 0; w < kTileWarps; ++w)
      bits = max(bits, uint32_t{shared_.column_amax.of_warps[w][c]});
    const BlockScale own = block_scale(Format<Element>::to_float(bits), rule_);
    shared_.col_factor[c] = own.factor;
    shared_.col_scale[c] = own.scale;
    return bits;
  }
  // Finds the scale that the columns may share. Returns whether column c can.
  __device__ __forceinline__ bool find_shared_scale(int c, uint32_t bits) {
    const float amax = Format<Element>::to_float(bits);
#pragma unroll
    for (int w = 0; w < kTileWarps; ++w) bits = max(bits, shared_.warp_largest[w]);
    const float largest = Format<Element>::to_float(bits);
    const bool can_share = amax == 0 || amax * kShareWithin >= largest;
    if (c == 0) {
      const BlockScale all = block_scale(largest, rule_);
      shared_.shared_factor = all.factor;
      shared_.shared_scale = all.scale;
    }
    return can_share;
  }

  __device__ __forceinline__ void store_rows(const Fragment<Element>& fragment,
                                             uint32_t own_row_amax, const FragmentOutputs& to,
                                             const TileBounds& at) const {
    const BlockScale row = block_scale(Format<Element>::to_float(own_row_amax), rule_);
    const int first_row = fragment_row_ * kFragmentSize;
    if (fragment_col_ < kFragmentSize && first_row + fragment_col_ < at.rows)
      to.of.scale[to.col / kTileSide * to.of.scale_stride + at.row_begin + first_row +
                  fragment_col_] = row.scale;
    const int valid_rows = fragment_col_ * kFragmentSize < at.cols ? at.rows - first_row : 0;
    uint8_t* next = to.of.q + static_cast<int64_t>(at.row_begin + first_row) * to.K + to.col +
                    fragment_col_ * kFragmentSize;
    const int half_warp = lane_ & kFragmentsPerSide;  // first lane of this row of fragments
#pragma unroll
    for (int i = 0; i < kFragmentSize; ++i) {
      const float factor = __shfl_sync(kFullWarp, row.factor, half_warp + i);
      const uint2 bytes = fragment.quantize_row(i, factor);
      uint2* q = reinterpret_cast<uint2*>(advance_row(next, to.K));
      if (i < valid_rows) *q = bytes;
    }
  }

  __device__ __forceinline__ void store_columns(const Fragment<Element>& fragment, bool share,
                                                const FragmentOutputs& to, int cols) {
    const float* own = &shared_.col_factor[fragment_col_ * kFragmentSize];
    float factor[kFragmentSize];
#pragma unroll
    for (int c = 0; c < kFragmentSize; ++c) factor[c] = own[c];
    if (share) {
#pragma unroll
      for (int c = 0; c < kFragmentSize; ++c) factor[c] = shared_.shared_factor;
    }
    if (threadIdx.x < cols)
      to.of.scale_t[to.column + threadIdx.x] =
          share ? shared_.shared_scale : shared_.col_scale[threadIdx.x];
#pragma unroll
    for (int c = 0; c < kFragmentSize; ++c)
      transposed_.put(c, fragment.quantize_column(c, factor[c]));
    __syncthreads();
    // No barrier after: the next tile writes col_factor one barrier later, `transposed` two later.
    transposed_.write(to.of.q_t + to.column * kTileSide, kTileSide, kTileSide, cols);
  }

  Shared& shared_;
  TransposedTile& transposed_;
  const ScaleRule rule_;
  const bool columnwise_;
  const int lane_ = threadIdx.x % 32, warp_ = threadIdx.x / 32;
  const int fragment_row_ = Fragment<Element>::row(), fragment_col_ = Fragment<Element>::column();
};

// Quantizes every step-th tile from `first` on, by one thread block.
template <typename Element, typename Source>
__device__ __forceinline__ void quantize_tiles_of_block(const Source& source, const int32_t* offs,
                                                        int E, int T, int all_cols, ScaleRule rule,
                                                        const BlockOutputs& outputs,
                                                        TransposedTile& transposed, unsigned first,
                                                        unsigned step) {
  __shared__ GroupTable table;
  __shared__ typename FragmentQuantizer<Element>::Shared shared;
  // At 16 bytes past a multiple of 32, copies take a fifth longer (SwiGLU, H200, 2026-11-22).
  extern __shared__ __align__(128) uint4 prefetch_shared[];
  using Buffer = typename Source::Buffer;
  auto& buffer = *reinterpret_cast<Buffer*>(prefetch_shared);

  constexpr int kFragments = fragments_of<Source>;
  constexpr bool kHasSecond = kFragments > Source::kParts;
  const bool columnwise = outputs.q_t || outputs.partial_bias_grad || kHasSecond;
  FragmentQuantizer<Element> quantizer(shared, transposed, rule, columnwise);
  const int part_cols = all_cols / Source::kParts;
  const TileWalk<Source> walk(table, offs, E, T, part_cols, columnwise, step);
  TileBounds at = walk.start(first);
  int n = 0;
  bool exists = walk.locate(at, n);
  if (exists) source.prefetch(buffer, at);
  for (; exists; exists = walk.locate_next(at, ++n)) {
    walk.search_ahead(at, n);
    Fragment<Element> fragments[kFragments];
    source.load(fragments, buffer, at);
    if constexpr (!std::is_empty_v<Buffer>) {
      // Located here and again at the loop's end: kept until then, it would take registers. The asm
      // hides from the compiler that the two are the same.
      TileBounds next = at;
      if (walk.locate_next(next, n + 1)) source.prefetch(buffer, next);
      asm("" : "+r"(at.block), "+r"(at.col_block));
    }

#pragma unroll
    for (int i = 0; i < kFragments; ++i) {
      // The Second's fragment goes first: registers are scarcest while all fragments are alive.
      const int part = (i + Source::kParts) % kFragments;
      const bool is_second = part == Source::kParts;
      const BlockOutputs& out = outputs_of(source, outputs, is_second);
      const int K = is_second ? part_cols : all_cols;
      const int col = (is_second ? 0 : part * part_cols) + at.col;
      const FragmentOutputs to{out,
                               !is_second && out.q,
                               !is_second && out.partial_bias_grad,
                               (is_second || Source::kCanShareScales) && out.share_scales,
                               K,
                               col,
                               static_cast<int64_t>(at.block) * K + col};
      // Sources without a buffer have few registers.
      quantizer.template quantize<std::is_empty_v<Buffer>>(fragments[part], to, at);
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
