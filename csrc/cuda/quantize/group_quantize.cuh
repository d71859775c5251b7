// One pass over what is quantized [T, K]: a 128 x 128 tile is read or computed once and gives its
// rowwise and columnwise data, both scales, and its share of the bias gradient.
//
// Bytes an element of bf16: 2 read, 1 + 4/128 written for each layout, so 3.03 rowwise and 4.06 for
// both; 32768 x 7168 at the 4.27 TB/s of a copy: 167 us and 223 us. The bias gradient adds 4/128.
// SwiGLU reads 4 bytes an element of h, its gradient 3 an element of d_gate_up.
//
// The number of tiles is known on the device alone, so the grid is bounded by what the GPU holds at
// once, some generations of it, and a block works through every gridDim.x-th tile. Neighbouring blocks
// take neighbouring columns of the same rows. Blocks that start one after another stay in that order,
// and so near each other in memory; those that stay for many tiles drift apart. Where a tile costs
// little besides its bytes, blocks are therefore many and brief, and load without looking ahead; where
// it costs more (SwiGLU, gathered rows) they are fewer and copy their next tile while they work on one.
//
// Reaches (H200, 2026-11-22) of a copy's speed: rowwise 0.98, both 0.95, SwiGLU 0.90, gradient 0.89;
// where K is no multiple of 128 the gradient 0.69. SwiGLU with alpha, beta and a limit 0.77, gradient 0.75,
// gate and up in turns 0.74 and 0.68 (2026-11-24).
#pragma once

#include "cuda/common/groups.cuh"
#include "cuda/common/pdl.cuh"
#include "cuda/quantize/block_scale.cuh"
#include "cuda/quantize/swiglu.cuh"

namespace grouped_linear::cuda {

// Where the results go; null for what is not asked for.
struct GroupQuantized {
  uint8_t* q;            // [T, K]
  float* scale;          // [ceil(K / 128), scale_stride]
  int64_t scale_stride;  // T rounded up
  uint8_t* q_t;          // [blocks, K, 128]
  float* scale_t;        // [blocks, K]
  bool share_scales;     // 128 columns of q_t share one where they lie near enough to one another
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
    row_end = scan_warp(lane < E ? min(max(offs[lane], 0), T) : 0,
                        [](int a, int b) { return max(a, b); });
    const int left = __shfl_up_sync(kFullWarp, row_end, 1);
    const int rows = row_end - (lane == 0 ? 0 : left);
    tile_end = scan_warp((rows + kTile - 1) / kTile, [](int a, int b) { return a + b; });
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
// A source loads the patch of the calling thread from a tile, zero past its rows and columns. One
// with two parts loads a patch of each half of the columns, K / 2 apart. One with Ahead copies what it
// reads to shared memory ahead, where rows are aligned: a block starts the copies of its next tile as soon
// as it holds this one in registers. SwiGLU takes a tile in four steps of two rows a patch and has the
// copies of two on their way; with those of one, each step waited for the memory.
//
// Speed with 2, 4, 8 and 32 generations of blocks beside one (H200, 2026-11-21, medians over 8 cases):
// both layouts 1.03, 1.06, 1.08, 1.09; gathered 1.01, 1.02, 1.04, 1.02; SwiGLU 0.98, 0.96, 0.94, 0.92.
// Fetching next tiles into L2 alone costs 10 to 20%. More than 32 groups cost a block time to look at: it
// stays for more tiles.
struct Generations {
  int few_groups, many_groups;
};

// Where a tile is.
struct TilePlaceInRows {
  int block, col_block;  // of 128 rows and of 128 columns
  int row_begin, rows, col, cols;
};

// Rows of x [T, K].
template <typename Element>
struct Rows {
  static constexpr int kOccupancy = kTileOccupancy<Element>, kParts = 1;
  static constexpr Generations kGenerations{32, 8};
  static constexpr bool kMayShare = true;  // scales, see GroupQuantized
  struct Ahead {};
  const Element* x;
  int64_t stride;
  bool vectorised;

  __device__ __forceinline__ void start(Ahead&, const TilePlaceInRows&) const {}
  __device__ __forceinline__ void load(Patch<Element> (&patch)[1], Ahead&,
                                       const TilePlaceInRows& at) const {
    patch[0].load(x + at.row_begin * stride + at.col, stride, at.rows, at.cols, vectorised);
  }
};

// Rows taken[t] of x [S, K], which has S >= 1 rows. What is out of range is clamped into it. vectorised: S and
// the bytes of a row fit into 32 bits, too.
template <typename Element, typename Index>
struct GatheredRows {
  static constexpr int kOccupancy = sizeof(Element) == 2 ? 3 : 2, kParts = 1;
  static constexpr Generations kGenerations{8, 4};
  static constexpr bool kMayShare = true;
  using Ahead = TileAhead<Element>;
  const Element* x;
  int64_t stride;
  bool vectorised;
  const Index* taken;
  int64_t S;

  // The row of x that row i of the calling thread's patch is.
  __device__ __forceinline__ int64_t source_row(const TilePlaceInRows& at, int i) const {
    const int64_t s = taken[at.row_begin + min(Patch<Element>::row() * kPatch + i, at.rows - 1)];
    return min(max(s, int64_t{0}), S - 1);
  }
  __device__ __forceinline__ void start(Ahead& ahead, const TilePlaceInRows& at) const {
    if (vectorised) {
      // Half a warp has the same eight rows: each thread looks up one.
      const auto own = static_cast<uint32_t>(source_row(at, threadIdx.x % kPatch));
      const auto* first = reinterpret_cast<const uint8_t*>(x + at.col);
      const uint32_t row_bytes = static_cast<uint32_t>(stride) * sizeof(Element);
      const auto row = [&](int i) {
        const uint64_t s = __shfl_sync(kFullWarp, own, i, kPatch);
        return reinterpret_cast<const Element*>(first + s * row_bytes);
      };
      Patch<Element>::start_rows(ahead, row, at.rows, at.cols);
    }
    end_copies();
  }
  __device__ __forceinline__ void load(Patch<Element> (&patch)[1], Ahead& ahead,
                                       const TilePlaceInRows& at) const {
    if (vectorised) {
      wait_for_copies();
      patch[0].take(ahead);
    } else {
      const auto row = [&](int i) { return x + source_row(at, i) * stride + at.col; };
      patch[0].load_rows(row, at.rows, at.cols, false);
    }
  }
};

// Those times factor[t], rounded to Element.
template <typename Element, typename Index>
struct ScaledRows : GatheredRows<Element, Index> {
  static constexpr Generations kGenerations{4, 2};
  const float* factor;

  __device__ __forceinline__ void load(Patch<Element> (&patch)[1],
                                       typename GatheredRows<Element, Index>::Ahead& ahead,
                                       const TilePlaceInRows& at) const {
    GatheredRows<Element, Index>::load(patch, ahead, at);
    const int first = Patch<Element>::row() * kPatch;
#pragma unroll
    for (int i = 0; i < kPatch; ++i) {
      // Rows past the end are zero and stay so, whatever the factor is.
      const float f = first + i < at.rows ? factor[at.row_begin + first + i] : 0;
      Eight<Element> scaled;
      for_eight<Element>(scaled, [&](int c) {
        return __fmul_rn(Patch<Element>::element(patch[0].words[i], c), f);
      });
#pragma unroll
      for (int w = 0; w < Patch<Element>::kWords; ++w) patch[0].words[i][w] = scaled[w];
    }
  }
};

// h [T, K] of gate_up [T, 2 K], rounded to Element; kept where h is not null.
template <typename Element, typename Form>
struct Swiglu {
  static constexpr int kOccupancy = sizeof(Element) == 2 ? 3 : 1, kParts = 1;
  static constexpr Generations kGenerations{1, 1};
  static constexpr bool kMayShare = true;
  static constexpr int kRows = 2;  // of every patch at a time: few registers, for a third block
  struct Ahead {
    TileAhead<Element, 2 * kRows> gate, up;
  };
  const Element* gate_up;
  int64_t stride;
  bool vectorised;
  int K;
  Element* h;
  Form form;

  __device__ __forceinline__ void start(Ahead& ahead, const TilePlaceInRows& at) const {
    start_rows<0>(ahead, at);
    start_rows<kRows>(ahead, at);
  }
  __device__ __forceinline__ void load(Patch<Element> (&patch)[1], Ahead& ahead,
                                       const TilePlaceInRows& at) const {
    load_rows<0>(patch[0], ahead, at);
    if (!h) return;
    const int first = Patch<Element>::row() * kPatch, column = Patch<Element>::column() * kPatch;
    const int here = column < at.cols ? at.rows - first : 0;
    Element* next = h + static_cast<int64_t>(at.row_begin + first) * K + at.col + column;
#pragma unroll
    for (int i = 0; i < kPatch; ++i) {
      Element* to = take_row(next, K);
      if (i < here) Patch<Element>::store_words(patch[0].words[i], to);
    }
  }

 private:
  // Where the tile's first row is in gate_up.
  __device__ __forceinline__ const Element* gate(const TilePlaceInRows& at) const {
    return gate_up + at.row_begin * stride + of_gate(form, at.col);
  }
  template <int begin>
  __device__ __forceinline__ void start_rows(Ahead& ahead, const TilePlaceInRows& at) const {
    if (!vectorised) return;
    constexpr int end = begin + kRows;
    int cols = at.cols, cols_of_up = at.cols;
    if (form.interleaved) {  // the first 128 columns that hold the tile's gates and ups, and the others
      __syncwarp();          // its other threads have read what they copied before
      cols *= 2;
      cols_of_up = cols - kTile;
    }
    const Element* up = gate(at) + (form.interleaved ? kTile : K);
    Patch<Element>::template start<begin, end>(ahead.gate, gate(at), stride, at.rows, cols);
    Patch<Element>::template start<begin, end>(ahead.up, up, stride, at.rows, cols_of_up);
    end_copies();
  }
  // Rows of `gate` and `up` that were copied; in turns, two eights of both.
  template <int begin, int end>
  __device__ __forceinline__ void take(Patch<Element>& gate, Patch<Element>& up,
                                       const Ahead& ahead) const {
    if (!form.interleaved) {
      gate.template take<begin, end>(ahead.gate);
      return up.template take<begin, end>(ahead.up);
    }
    __syncwarp();
    const int column = Patch<Element>::column(), copied_by = threadIdx.x - column;
    const auto& half = column < kPatches / 2 ? ahead.gate : ahead.up;
    const int eight = 2 * column % kPatches;
    gate.template take<begin, end>(half, copied_by + eight);
    up.template take<begin, end>(half, copied_by + eight + 1);
  }
  // From row `begin` of the patch on: while some rows are worked on, the next are copied.
  template <int begin>
  __device__ __forceinline__ void load_rows(Patch<Element>& patch, Ahead& ahead,
                                            const TilePlaceInRows& at) const {
    constexpr int end = begin + kRows, in_flight = end < kPatch ? 1 : 0;
    Patch<Element> ups;
    if (vectorised) {
      wait_for_copies<in_flight>();
      take<begin, end>(patch, ups, ahead);
      if constexpr (end + kRows < kPatch) start_rows<end + kRows>(ahead, at);
    } else {
      const int own = form.interleaved ? Patch<Element>::column() * kPatch : 0;
      const Element *gates = gate(at) + own, *up = gates + to_up(form, K);
      patch.template load<begin, end>(gates, stride, at.rows, at.cols, false);
      ups.template load<begin, end>(up, stride, at.rows, at.cols, false);
    }
    if (Patch<Element>::row() * kPatch < at.rows)  // small groups leave most warps without any
#pragma unroll
      for (int i = begin; i < end; ++i)
        swiglu_of_eight<Element>(form, patch.words[i], ups.words[i]);
    if constexpr (end < kPatch) load_rows<end>(patch, ahead, at);
  }
};

// d_gate_up [T, 2 K] from dh [T, K] and gate_up [T, 2 K], rounded to Element. `parts`: 2 where
// Element has 16 bits, all rows are aligned and K is a multiple of 128, so that no tile reaches from
// the columns of gate into those of up: then everything is read once. Else 1. A patch is of one half
// in any case, for K is a multiple of 16. Where gate and up take turns it has four of each: 1.
template <typename Element, int parts, typename Form>
struct SwigluGrad {
  static constexpr int kOccupancy = sizeof(Element) == 2 ? 2 : 1, kParts = parts;
  static constexpr Generations kGenerations{1, 1};
  static constexpr bool kMayShare = false;  // gradients do not
  static constexpr int kRows = 2;           // of every patch at a time; with 4, registers spill
  struct Ahead {
    TileAhead<Element, 2 * kRows> dh, gate, up;
  };
  const Element* dh;
  int64_t dh_stride;
  const Element* gate_up;
  int64_t stride;
  bool vectorised;
  int K;
  Form form;

  __device__ __forceinline__ void start(Ahead& ahead, const TilePlaceInRows& at) const {
    start_rows<0>(ahead, at, columns(at));
    start_rows<kRows>(ahead, at, columns(at));
  }
  __device__ __forceinline__ void load(Patch<Element> (&patch)[parts], Ahead& ahead,
                                       const TilePlaceInRows& at) const {
    load_rows<0>(patch, ahead, at, columns(at));
  }

 private:
  // Where the tile's first row is in each operand, as if all of its columns were in this patch's half.
  struct Columns {
    bool of_gate, needs_up;
    const Element *dh, *gate;
  };
  __device__ __forceinline__ Columns columns(const TilePlaceInRows& at) const {
    const int own = Patch<Element>::column() * kPatch;
    const bool of_gate = parts == 2 || at.col + own < K;
    int k = of_gate ? at.col : at.col - K, dh_k = k;
    if (in_turns()) {
      k = at.col;
      dh_k = (at.col + own) / 2 / kPatch * kPatch - own;
    }
    return {of_gate, (of_gate || Form::kHasLimit) && !in_turns(),
            dh + at.row_begin * dh_stride + dh_k, gate_up + at.row_begin * stride + k};
  }
  __device__ __forceinline__ bool in_turns() const { return parts == 1 && form.interleaved; }
  template <int begin>
  __device__ __forceinline__ void start_rows(Ahead& ahead, const TilePlaceInRows& at,
                                             const Columns& here) const {
    if (parts == 1 && !vectorised) return;
    constexpr int end = begin + kRows;
    Patch<Element>::template start<begin, end>(ahead.dh, here.dh, dh_stride, at.rows, at.cols);
    Patch<Element>::template start<begin, end>(ahead.gate, here.gate, stride, at.rows, at.cols);
    if (!in_turns())
      Patch<Element>::template start<begin, end>(ahead.up, here.gate + K, stride,
                                                 here.needs_up ? at.rows : 0, at.cols);
    end_copies();
  }
  // From row `begin` of the patches on: while some rows are worked on, the next are copied.
  template <int begin>
  __device__ __forceinline__ void load_rows(Patch<Element> (&patch)[parts], Ahead& ahead,
                                            const TilePlaceInRows& at, const Columns& here) const {
    constexpr int end = begin + kRows, in_flight = end < kPatch ? 1 : 0;
    Patch<Element> d, up;
    if (parts == 2 || vectorised) {
      wait_for_copies<in_flight>();
      d.template take<begin, end>(ahead.dh);
      patch[0].template take<begin, end>(ahead.gate);
      up.template take<begin, end>(ahead.up);
      if constexpr (end + kRows < kPatch) start_rows<end + kRows>(ahead, at, here);
    } else {
      d.template load<begin, end>(here.dh, dh_stride, at.rows, at.cols, false);
      patch[0].template load<begin, end>(here.gate, stride, at.rows, at.cols, false);
      up.template load<begin, end>(here.gate + K, stride, here.needs_up ? at.rows : 0, at.cols,
                                   false);
    }
    if (Patch<Element>::row() * kPatch < at.rows) {
#pragma unroll
      for (int i = begin; i < end; ++i) {
        if constexpr (parts == 2)
          swiglu_grads_of_eight<Element>(form, d.words[i], patch[0].words[i], up.words[i],
                                         patch[1].words[i]);
        else if (in_turns())
          swiglu_grads_of_turns<Element>(form, Patch<Element>::column() % 2 == 1, d.words[i],
                                         patch[0].words[i]);
        else
          swiglu_grad_of_eight<Element>(form, here.of_gate, d.words[i], patch[0].words[i],
                                        up.words[i]);
      }
    } else {
      patch[parts - 1].template clear<begin, end>();
    }
    if constexpr (end < kPatch) load_rows<end>(patch, ahead, at, here);
  }
};

// --- the pass -----------------------------------------------------------------------------------

// What one block does of it: every step-th tile from `first` on.
template <typename Element, typename Source>
__device__ __forceinline__ void quantize_tiles_of_block(const Source& source, const int32_t* offs,
                                                        int E, int T, int K, ScaleRule rule,
                                                        const GroupQuantized& out,
                                                        TurnedTile& turned, unsigned first,
                                                        unsigned step) {
  using Bits = typename Format<Element>::Bits;
  __shared__ GroupTable table;
  alignas(16) __shared__ Bits warp_amax[kTileWarps][kTile];
  __shared__ uint32_t warp_largest[kTileWarps];
  __shared__ float shared_factor, shared_scale;
  alignas(16) __shared__ float col_factor[kTile];
  __shared__ float col_scale[kTile];
  alignas(16) __shared__ float patch_sums[kPatches][kTile];
  // 16 bytes past a multiple of 32, copies would take a fifth longer (SwiGLU, H200, 2026-11-22).
  extern __shared__ __align__(128) uint4 tiles_ahead[];
  auto& ahead = *reinterpret_cast<typename Source::Ahead*>(tiles_ahead);

  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int patch_row = threadIdx.x / kPatches, patch_col = threadIdx.x % kPatches;
  const int half_warp = lane & kPatches;           // the first lane of this thread's row of patches
  const bool columns = out.q_t || out.block_sums;  // rowwise alone, no warp waits for another
  const bool shares = Source::kMayShare && out.share_scales;

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
  const int block_step = step / col_blocks, col_step = step % col_blocks;
  // Whether there is such a tile; then all about it.
  const auto place = [&](TilePlaceInRows& at) {
    if (at.block >= blocks) return false;
    if (few_groups) {
      groups.rows_of_tile(at.block, at.row_begin, at.rows);
    } else {
      const int e = table.group_of_tile(at.block, E);
      at.row_begin = table.row_begin(e) + (at.block - table.tile_begin(e)) * kTile;
      at.rows = min(kTile, table.row_end[e] - at.row_begin);
    }
    at.col = at.col_block * kTile;
    at.cols = min(kTile, part_cols - at.col);
    return true;
  };
  const auto place_next = [&](TilePlaceInRows& at) {
    at.block += block_step;
    at.col_block += col_step;
    if (at.col_block >= col_blocks) {
      at.col_block -= col_blocks;
      ++at.block;
    }
    return place(at);
  };

  TilePlaceInRows at{};
  at.block = first / col_blocks;
  at.col_block = first % col_blocks;
  bool there = place(at);
  if (there) source.start(ahead, at);
  for (; there; there = place_next(at)) {
    Patch<Element> patches[Source::kParts];
    source.load(patches, ahead, at);
    if constexpr (!std::is_empty_v<typename Source::Ahead>) {
      TilePlaceInRows next = at;  // found twice: it would take registers until then
      if (place_next(next)) source.start(ahead, next);
      asm("" : "+r"(at.block), "+r"(at.col_block));  // hides that the two are the same
    }

#pragma unroll
    for (int part = 0; part < Source::kParts; ++part) {
      Patch<Element>& patch = patches[part];
      const int block = at.block, row_begin = at.row_begin, rows = at.rows, cols = at.cols;
      const int col = part * part_cols + at.col;
      if (out.block_sums) {  // before what is not finite turns into NaN
        float sums[kPatch];
        patch.column_sums(sums);
        float4* piece = reinterpret_cast<float4*>(&patch_sums[patch_row][patch_col * kPatch]);
        piece[0] = make_float4(sums[0], sums[1], sums[2], sums[3]);
        piece[1] = make_float4(sums[4], sums[5], sums[6], sums[7]);
      }

      uint32_t row_amax[kPatch], col_amax[Patch<Element>::kWords];
      patch.find_amax(row_amax, col_amax);
      // One register instead of eight, where there are few.
      constexpr bool early = std::is_empty_v<typename Source::Ahead>;
      uint32_t own_row_amax = 0;
      if constexpr (early) own_row_amax = row_amax_of_half_warp(row_amax);

      if (out.q_t) {
        if (shares) {
          uint32_t largest = 0;
#pragma unroll
          for (int w = 0; w < Patch<Element>::kWords; ++w)
            largest = Word<Element>::max(largest, col_amax[w]);
          largest = __reduce_max_sync(kFullWarp, Word<Element>::largest(largest));
          if (lane == 0) warp_largest[warp] = largest;
        }
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
      bool near = true;
      if (threadIdx.x < kTile) {
        const int c = threadIdx.x;
        if (out.q_t) {
          uint32_t bits = 0;
#pragma unroll
          for (int w = 0; w < kTileWarps; ++w) bits = max(bits, uint32_t{warp_amax[w][c]});
          const float amax = Format<Element>::to_float(bits);
          const BlockScale column = block_scale(amax, rule);
          col_factor[c] = column.factor;
          col_scale[c] = column.scale;
          if (shares) {
#pragma unroll
            for (int w = 0; w < kTileWarps; ++w) bits = max(bits, warp_largest[w]);
            const float largest = Format<Element>::to_float(bits);
            near = amax == 0 || amax * kShareWithin >= largest;
            if (c == 0) {
              const BlockScale all = block_scale(largest, rule);
              shared_factor = all.factor;
              shared_scale = all.scale;
            }
          }
        }
      } else if (out.block_sums) {
        const int c = threadIdx.x - kTile;
        float sum = 0;
#pragma unroll
        for (int p = 0; p < kPatches; ++p) sum = __fadd_rn(sum, patch_sums[p][c]);
        if (c < cols) out.block_sums[static_cast<int64_t>(block) * K + col + c] = sum;
      }

      if (out.q) {
        if constexpr (!early) own_row_amax = row_amax_of_half_warp(row_amax);
        const BlockScale row = block_scale(Format<Element>::to_float(own_row_amax), rule);
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
      if (shares)
        near = __syncthreads_and(near);
      else if (columns)
        __syncthreads();

      if (out.q_t) {
        const float4* factor = reinterpret_cast<const float4*>(&col_factor[patch_col * kPatch]);
        float4 low = factor[0], high = factor[1];
        const bool shared = shares && near;
        if (shared) {
          const float f = shared_factor;
          low = high = make_float4(f, f, f, f);
        }
        if (threadIdx.x < cols)
          out.scale_t[static_cast<int64_t>(block) * K + col + threadIdx.x] =
              shared ? shared_scale : col_scale[threadIdx.x];
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
  }
}

template <typename Element, typename Source>
__global__ void __launch_bounds__(kTileThreads, Source::kOccupancy)
    group_quantize_kernel(Source source, const int32_t* offs, int E, int T, int K, ScaleRule rule,
                          GroupQuantized out) {
  grid_dependency_wait();
  __shared__ TurnedTile turned;
  quantize_tiles_of_block<Element>(source, offs, E, T, K, rule, out, turned, blockIdx.x, gridDim.x);
}

constexpr int kSumThreads = 256;

// bias_grad [E, K]: the sums of a group's blocks, added from the first block to the last. One
// thread a column, blockIdx.x for 256 of them, blockIdx.y for every gridDim.y-th group.
static __global__ void __launch_bounds__(kSumThreads)
    add_block_sums_kernel(const float* block_sums, const int32_t* offs, int E, int T, int K,
                          float* bias_grad) {
  grid_dependency_wait();
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
