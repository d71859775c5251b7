// SPDX-License-Identifier: Apache-2.0
// Block scaling of a weight [E, N, K]: one scale for each 128 x 128 tile, q and q_t from one read.
//
// Bytes an element of bf16: 2 read, 1 written for q and 1 for q_t: 4. 8 x 4096 x 7168 at the 4.27
// TB/s of a copy: 220 us. One thread block a tile, several on an SM at once.
#pragma once

#include "cuda/common/pdl.cuh"
#include "cuda/quantize/mxfp4_tile.cuh"
#include "layout.h"

namespace grouped_linear::cuda {

// Where expert e's dense [N, K] matrix starts: in one packed weight, or anywhere.
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

// N and K are multiples of 16.
struct WeightOutputs {
  int N, K;
  uint8_t *q, *q_t;  // [E, N, K] and [E, K, N]; null where they are not asked for
  float* scale;      // [E, ceil(N / 128), ceil(K / 128)]
};

// A tile's one scale, as Mxfp4Tile has those of its blocks.
template <typename Element>
class BlockTile {
  BlockScale scale_;

 public:
  __device__ __forceinline__ void add_row(const Fragment<Element>&, int) {}

  // Numbers that are not finite become NaN and count as zero.
  __device__ __forceinline__ void finish(Fragment<Element>& w, ScaleRule rule) {
    uint32_t row_amax[kFragmentSize], amax = 0;
    FragmentRow<Element> col_amax;
    w.find_amax(row_amax, col_amax);
#pragma unroll
    for (int i = 0; i < kFragmentSize; ++i) amax = max(amax, row_amax[i]);
    scale_ = block_scale(Format<Element>::to_float(max_of_tile(amax)), rule);
  }

  __device__ __forceinline__ float scale() const { return scale_.scale; }
  __device__ __forceinline__ uint2 quantize_row(const Fragment<Element>& w, int i) const {
    return w.quantize_row(i, scale_.factor);
  }
};

template <typename Element, Mxfp4 kBlocks>
using WeightTile =
    std::conditional_t<kBlocks == Mxfp4::kNone, BlockTile<Element>, Mxfp4Tile<Element, kBlocks>>;

// Tile `number` of a weight [E, N, K], and the calling thread's fragment of it.
struct TileOfWeight {
  int N, K, row, col, rows, cols;  // so many of its rows and columns are the weight's
  int64_t e, first;                // the fragment's first element
  int fragment_row = threadIdx.x / kFragmentsPerSide * kFragmentSize;
  int fragment_col = threadIdx.x % kFragmentsPerSide * kFragmentSize;

  __device__ __forceinline__ TileOfWeight(unsigned number, int N, int K) : N(N), K(K) {
    const int row_blocks = (N + kTileSide - 1) / kTileSide,
              col_blocks = (K + kTileSide - 1) / kTileSide;
    e = number / (row_blocks * col_blocks);
    row = number / col_blocks % row_blocks * kTileSide;
    col = number % col_blocks * kTileSide;
    rows = min(kTileSide, N - row), cols = min(kTileSide, K - col);
    first = (e * N + row + fragment_row) * K + col + fragment_col;
  }
  // Rows of the fragment that are the weight's.
  __device__ __forceinline__ int valid_rows() const {
    return fragment_col < cols ? rows - fragment_row : 0;
  }
  // Stores to q_t [E, K, N].
  __device__ __forceinline__ void store_transposed(QuantizedFragment& quantized,
                                                   TransposedTile& transposed, uint8_t* q_t) const {
    quantized.put_transposed(transposed);
    __syncthreads();
    transposed.write(q_t + (e * K + col) * N + row, N, rows, cols);
  }
};

// Quantizes tile `number`, by one thread block.
template <typename Element, Mxfp4 kBlocks = Mxfp4::kNone, typename Experts>
__device__ __forceinline__ void quantize_weight_tile(const Experts& w, bool vectorised,
                                                     ScaleRule rule, const WeightOutputs& out,
                                                     TransposedTile& transposed, unsigned number) {
  const TileOfWeight at(number, out.N, out.K);
  Fragment<Element> fragment;
  fragment.load(w.expert(at.e) + static_cast<int64_t>(at.row) * at.K + at.col, at.K, at.rows,
                at.cols, vectorised);
  WeightTile<Element, kBlocks> tile;
#pragma unroll
  for (int i = 0; i < kFragmentSize; ++i) tile.add_row(fragment, i);
  tile.finish(fragment, rule);
  if (threadIdx.x == 0) out.scale[number] = tile.scale();
  QuantizedFragment quantized;
  uint8_t* q = out.q + at.first;
  const int stored_rows = out.q ? at.valid_rows() : 0;
#pragma unroll
  for (int i = 0; i < kFragmentSize; ++i) {
    const uint2 bytes = tile.quantize_row(fragment, i);
    quantized.set_row(i, bytes);
    if (i < stored_rows) *reinterpret_cast<uint2*>(q + static_cast<int64_t>(i) * at.K) = bytes;
  }
  if (out.q_t) at.store_transposed(quantized, transposed, out.q_t);
}

// Changes nothing where refresh is given and false.
template <typename Element, Mxfp4 kBlocks, typename Experts>
__global__ void __launch_bounds__(kTileThreads, kTileOccupancy<Element>)
    quantize_weight_kernel(const __grid_constant__ Experts w, bool vectorised, ScaleRule rule,
                           const bool* refresh, WeightOutputs out) {
  grid_dependency_wait();
  if (refresh && !*refresh) return;
  __shared__ TransposedTile transposed;
  quantize_weight_tile<Element, kBlocks>(w, vectorised, rule, out, transposed, blockIdx.x);
}

}  // namespace grouped_linear::cuda
