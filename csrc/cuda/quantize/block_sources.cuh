// SPDX-License-Identifier: Apache-2.0
// What a block-scaling pass quantizes: rows of a tensor, or gathered rows. SwiGLU and its gradient:
// block_swiglu.cuh.
//
// A source loads the calling thread's fragment of a tile, with zeros past the tile's rows and
// columns. A source with kParts == 2 loads one fragment in each half of the columns, K / 2 apart. A
// source with a Second also loads one of another matrix [T, K / kParts], which is quantized
// columnwise. A source with a Buffer prefetches into shared memory where its rows are aligned: a
// thread block starts the copies of its next tile as soon as it holds this one in registers.
//
// Sources with kSingleRows also load eight columns of one row: load_row.
//
// Waves are how many times over a grid fills the GPU. A thread block steps through every
// gridDim.x-th tile, and neighbouring blocks have neighbouring columns of the same rows (gathered
// rows: see below). Blocks that start one after another stay in that order, and so near each other
// in memory; blocks that stay for many tiles drift apart. Where a tile costs little besides its
// bytes, blocks are therefore many and brief, and do not prefetch. Where a tile costs more (SwiGLU,
// gathered rows), they are fewer and prefetch. Speed with 2, 4, 8 and 32 waves, relative to 1 (H200,
// 2026-11-21, medians over 8 cases): both layouts 1.03, 1.06, 1.08, 1.09; gathered 1.01, 1.02, 1.04,
// 1.02; SwiGLU 0.98, 0.96, 0.94, 0.92. Prefetching the next tiles into L2 alone costs 10 to 20%.
// More than 32 groups take a thread block time to look at: it stays for more tiles.
//
// A token's row is gathered once an expert. Tiles of gathered rows are therefore taken down the
// columns (kDownColumns): 128 columns of all tokens stay in L2 until every expert has read them.
// Each wave sweeps over all columns, so waves are few. The speeds above are of tiles along the
// rows.
#pragma once

#include "cuda/common/fragments.cuh"

namespace grouped_linear::cuda {

// Outputs that are not requested have null pointers.
struct BlockOutputs {
  uint8_t* q;            // [T, K]
  float* scale;          // [ceil(K / 128), scale_stride]
  int64_t scale_stride;  // T rounded up
  uint8_t* q_t;          // [row blocks, K, 128]
  float* scale_t;        // [row blocks, K]
  bool share_scales;     // the 128 columns of a tile share a scale_t if their amax lie near enough
  float* partial_bias_grad;  // [row blocks, K], see bias_grad.cuh
};

struct Waves {
  int few_groups, many_groups;  // at most 32, more
};

// A tile of [T, K]: its number by rows and by columns, where it starts, and how much of it is
// valid.
struct TileBounds {
  int block, col_block;
  int row_begin, rows, col, cols;
};

// Rows of x [T, K].
template <typename Element>
struct Rows {
  static constexpr int kOccupancy = kTileOccupancy<Element>, kParts = 1;
  static constexpr Waves kWaves{32, 8};
  static constexpr bool kCanShareScales = true;  // see BlockOutputs
  static constexpr bool kDownColumns = false;    // see above
  static constexpr bool kSingleRows = true;
  struct Buffer {};
  const Element* x;
  int64_t stride;
  bool vectorised;

  __device__ __forceinline__ void prefetch(Buffer&, const TileBounds&) const {}
  __device__ __forceinline__ void load(Fragment<Element> (&fragment)[1], Buffer&,
                                       const TileBounds& at) const {
    fragment[0].load(x + at.row_begin * stride + at.col, stride, at.rows, at.cols, vectorised);
  }
  __device__ __forceinline__ void load_row(int row, int col, FragmentRow<Element>& to) const {
    Fragment<Element>::load_row(x + row * stride + col, vectorised, to);
  }
};

// Rows indices[t] of x [S, K], S >= 1. Indices out of range are clamped into it. vectorised: S and
// the bytes of a row also fit into 32 bits.
template <typename Element>
struct GatheredRows {
  static_assert(sizeof(Element) == 2, "three blocks of 16-bit elements fit on an SM");
  static constexpr int kOccupancy = 3, kParts = 1;
  static constexpr Waves kWaves{4, 1};
  static constexpr bool kCanShareScales = true;
  static constexpr bool kDownColumns = true, kSingleRows = true;
  using Buffer = PrefetchBuffer<Element>;
  const Element* x;
  int64_t stride;
  bool vectorised;
  const int32_t* indices;
  int64_t S;

  // The row of x that is row i of the calling thread's fragment.
  __device__ __forceinline__ int64_t source_row(const TileBounds& at, int i) const {
    const int64_t s =
        indices[at.row_begin + min(Fragment<Element>::row() * kFragmentSize + i, at.rows - 1)];
    return min(max(s, int64_t{0}), S - 1);
  }
  __device__ __forceinline__ void prefetch(Buffer& buffer, const TileBounds& at) const {
    if (vectorised) {
      // Half a warp has the same eight rows: each thread looks up one.
      const auto own = static_cast<uint32_t>(source_row(at, threadIdx.x % kFragmentSize));
      const auto* first = reinterpret_cast<const uint8_t*>(x + at.col);
      const uint32_t row_bytes = static_cast<uint32_t>(stride) * sizeof(Element);
      const auto row = [&](int i) {
        const uint64_t s = __shfl_sync(kFullWarp, own, i, kFragmentSize);
        return reinterpret_cast<const Element*>(first + s * row_bytes);
      };
      Fragment<Element>::prefetch_rows(buffer, row, at.rows, at.cols);
    }
    cp_async_commit();
  }
  __device__ __forceinline__ void load(Fragment<Element> (&fragment)[1], Buffer& buffer,
                                       const TileBounds& at) const {
    if (vectorised) {
      cp_async_wait();
      fragment[0].load_prefetched(buffer);
    } else {
      const auto row = [&](int i) { return x + source_row(at, i) * stride + at.col; };
      fragment[0].load_rows(row, at.rows, at.cols, false);
    }
  }
  __device__ __forceinline__ void load_row(int row, int col, FragmentRow<Element>& to) const {
    const int64_t s = min(max(int64_t{indices[row]}, int64_t{0}), S - 1);
    Fragment<Element>::load_row(x + s * stride + col, vectorised, to);
  }
};

}  // namespace grouped_linear::cuda
