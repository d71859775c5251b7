// One scale a group, in 128 x 128 tiles: activations [T, K] in groups, or weights [E, N, K].
//
// Bytes an element of bf16: 2 read, 1 written for q and 1 for q_t: 3 or 4, where the scale is known
// before (delayed scaling). A scale from the data itself costs one more read, 5 or 6: its amax must
// be complete before the first element is quantized.
//
// As in group_quantize.cuh the grid is some generations of what the GPU holds at once, and blocks walk
// through the tiles. One scale serves both layouts, so the bytes of q_t are those of q, turned over.
#pragma once

#include "cuda/common/pdl.cuh"
#include "cuda/quantize/group_quantize.cuh"
#include "cuda/quantize/tile_sums.cuh"

namespace grouped_linear::cuda {

// The rows of every group: as offs say, or `group_rows` of each expert where offs is null.
struct GroupedTiles {
  const int32_t* offs;
  int E, T, K, group_rows;
};

struct TilePlace {
  int group, block, rows;
  int64_t row_begin, row_in_group;
};

// The tiles in rows of tiles, and what is known of one; `table` is filled where there are offs.
__device__ __forceinline__ int tile_rows(const GroupedTiles& tiles, const GroupTable& table) {
  if (tiles.offs) return table.tile_end[tiles.E - 1];
  return tiles.E * ((tiles.group_rows + kTile - 1) / kTile);
}

__device__ __forceinline__ TilePlace tile_place(const GroupedTiles& tiles, const GroupTable& table,
                                                int block) {
  TilePlace place;
  place.block = block;
  if (tiles.offs) {
    place.group = table.group_of_tile(block, tiles.E);
    place.row_in_group = static_cast<int64_t>(block - table.tile_begin(place.group)) * kTile;
    place.row_begin = table.row_begin(place.group) + place.row_in_group;
    place.rows = min(kTile, static_cast<int>(table.row_end[place.group] - place.row_begin));
  } else {
    const int per_group = (tiles.group_rows + kTile - 1) / kTile;
    place.group = block / per_group;
    place.row_in_group = static_cast<int64_t>(block % per_group) * kTile;
    place.row_begin = static_cast<int64_t>(place.group) * tiles.group_rows + place.row_in_group;
    place.rows = min(kTile, tiles.group_rows - static_cast<int>(place.row_in_group));
  }
  return place;
}

// The largest magnitude of a patch, as bits of the element's format.
template <typename Element, bool finite_only>
__device__ __forceinline__ uint32_t patch_amax(const Patch<Element>& patch) {
  uint32_t amax = 0;
#pragma unroll
  for (int i = 0; i < kPatch; ++i) {
#pragma unroll
    for (int w = 0; w < Patch<Element>::kWords; ++w) {
      uint32_t magnitudes = patch.words[i][w] & Word<Element>::kMagnitudes;
      if constexpr (finite_only) magnitudes &= ~Word<Element>::not_finite(magnitudes);
      amax = Word<Element>::max(amax, magnitudes);
    }
  }
  return Word<Element>::largest(amax);
}

// Raises a group's amax by what a warp found. Magnitudes of floats are ordered as integers, so the
// order of the warps does not matter. Most find a larger one there already.
__device__ __forceinline__ void raise_amax(uint32_t* group_amax, uint32_t float_bits) {
  float_bits = __reduce_max_sync(kFullWarp, float_bits);
  if (threadIdx.x % 32 == 0 && float_bits > *static_cast<volatile uint32_t*>(group_amax))
    atomicMax(group_amax, float_bits);
}

// amax [E], zero before: the largest finite magnitude of each group, as the bits of a float32.
// Where refresh is given and false, nothing is read.
template <typename Element>
__global__ void __launch_bounds__(kTileThreads, kTileOccupancy<Element>)
    group_amax_kernel(const Element* x, int64_t x_stride, bool vectorised, GroupedTiles tiles,
                      const bool* refresh, uint32_t* amax) {
  grid_dependency_wait();
  if (refresh && !*refresh) return;
  __shared__ GroupTable table;
  if (tiles.offs) load_groups<kTileThreads>(table, tiles.offs, tiles.E, tiles.T, TilesOf{kTile});
  const int col_blocks = (tiles.K + kTile - 1) / kTile;
  const int64_t count = static_cast<int64_t>(tile_rows(tiles, table)) * col_blocks;
  for (int64_t t = blockIdx.x; t < count; t += gridDim.x) {
    const TilePlace place = tile_place(tiles, table, static_cast<int>(t / col_blocks));
    const int col = static_cast<int>(t % col_blocks) * kTile;
    Patch<Element> patch;
    patch.load(x + place.row_begin * x_stride + col, x_stride, place.rows,
               min(kTile, tiles.K - col), vectorised);
    const uint32_t largest = patch_amax<Element, true>(patch);
    raise_amax(&amax[place.group], __float_as_uint(Format<Element>::to_float(largest)));
  }
}

// Where a group's factor comes from: its amax, or where that is null its scale.
struct GroupScale {
  const uint32_t* amax;
  ScaleRule rule;
  float* scale_out;       // [E], written where it is not null
  const float* scale_in;  // [E]

  __device__ __forceinline__ BlockScale of_amax(int e, float fp8_max) const {
    return block_scale(__uint_as_float(amax[e]), rule, fp8_max);
  }
  __device__ __forceinline__ float scale(int e, float fp8_max) const {
    return amax ? of_amax(e, fp8_max).scale : scale_in[e];
  }
  __device__ __forceinline__ float factor(int e, float fp8_max) const {
    return amax ? of_amax(e, fp8_max).factor : __fdiv_rn(1.0f, scale_in[e]);
  }
};

// Where the results go; null for what is not asked for.
struct PerGroupQuantized {
  uint8_t* q;         // as x
  uint8_t* q_t;       // [blocks, K, 128], or [E, K, N] of a weight
  float* block_sums;  // [blocks, K], see GroupQuantized
  uint32_t* amax;     // [E], raised to the largest magnitudes; infinity for what is not finite
};

template <bool e5m2>
__device__ __forceinline__ uint32_t to_fp8x4(float a, float b, float c, float d) {
  constexpr __nv_fp8_interpretation_t format = e5m2 ? __NV_E5M2 : __NV_E4M3;
  const uint32_t low = __nv_cvt_float2_to_fp8x2(make_float2(a, b), __NV_SATFINITE, format);
  const uint32_t high = __nv_cvt_float2_to_fp8x2(make_float2(c, d), __NV_SATFINITE, format);
  return low | high << 16;
}

// Element (i, c) of a patch as bits; i and c are constants of unrolled loops.
template <typename Element>
__device__ __forceinline__ uint32_t patch_bits(const Patch<Element>& patch, int i, int c) {
  constexpr int per_word = Word<Element>::kElements;
  const uint32_t word = patch.words[i][c / per_word];
  if constexpr (per_word == 1)
    return word;
  else
    return c % 2 == 0 ? word & 0xffff : word >> 16;
}

// Row i of the patch, the first element in the lowest byte. What is finite saturates. `special`:
// some element of the patch is not finite; cvt.satfinite would make an infinity the largest number.
template <typename Element, bool e5m2>
__device__ __forceinline__ uint2 quantize_patch_row(const Patch<Element>& patch, int i,
                                                    float factor, bool special) {
  float p[kPatch];
#pragma unroll
  for (int c = 0; c < kPatch; ++c)
    p[c] = __fmul_rn(Format<Element>::to_float(patch_bits(patch, i, c)), factor);
  uint32_t bytes[2] = {to_fp8x4<e5m2>(p[0], p[1], p[2], p[3]),
                       to_fp8x4<e5m2>(p[4], p[5], p[6], p[7])};
  if (special) {
    constexpr uint32_t magnitude_bits = sizeof(Element) == 2 ? 0x7fff : 0x7fffffff;
#pragma unroll
    for (int c = 0; c < kPatch; ++c) {
      const uint32_t bits = patch_bits(patch, i, c), magnitude = bits & magnitude_bits;
      if (magnitude < Format<Element>::kInfinity) continue;
      const uint32_t negative =
          (bits > magnitude_bits ? 0x80 : 0) ^ (__float_as_uint(factor) >> 24 & 0x80);
      const bool infinity = e5m2 && magnitude == Format<Element>::kInfinity;
      const uint32_t byte = infinity ? 0x7c | negative : 0x7f;
      bytes[c / 4] = (bytes[c / 4] & ~(0xffu << 8 * (c % 4))) | byte << 8 * (c % 4);
    }
  }
  return make_uint2(bytes[0], bytes[1]);
}

// Where refresh is given and false, not a byte changes.
template <typename Element, bool e5m2>
__global__ void __launch_bounds__(kTileThreads, kTileOccupancy<Element>)
    quantize_per_group_kernel(const Element* x, int64_t x_stride, bool vectorised,
                              GroupedTiles tiles, GroupScale scale, const bool* refresh,
                              PerGroupQuantized out) {
  grid_dependency_wait();
  if (refresh && !*refresh) return;
  constexpr float fp8_max = e5m2 ? 57344.0f : 448.0f;
  __shared__ GroupTable table;
  __shared__ TileSums sums;
  extern __shared__ uint4 per_group_shared[];  // where q_t is asked for
  TurnedTile* turned = reinterpret_cast<TurnedTile*>(per_group_shared);

  const int K = tiles.K;
  if (scale.scale_out && blockIdx.x == 0)
    for (int e = threadIdx.x; e < tiles.E; e += kTileThreads)
      scale.scale_out[e] = scale.scale(e, fp8_max);

  if (tiles.offs) load_groups<kTileThreads>(table, tiles.offs, tiles.E, tiles.T, TilesOf{kTile});
  const int col_blocks = (K + kTile - 1) / kTile;
  const int64_t count = static_cast<int64_t>(tile_rows(tiles, table)) * col_blocks;
  for (int64_t t = blockIdx.x; t < count; t += gridDim.x) {
    const TilePlace place = tile_place(tiles, table, static_cast<int>(t / col_blocks));
    const int col = static_cast<int>(t % col_blocks) * kTile, cols = min(kTile, K - col);

    Patch<Element> patch;
    patch.load(x + place.row_begin * x_stride + col, x_stride, place.rows, cols, vectorised);
    const uint32_t largest = patch_amax<Element, false>(patch);
    const bool special = largest >= Format<Element>::kInfinity;
    if (out.amax) {
      const uint32_t bits = __float_as_uint(Format<Element>::to_float(largest));
      raise_amax(&out.amax[place.group], special ? 0x7f800000 : bits);
    }
    if (out.block_sums) {
      sums.put(patch);
      __syncthreads();
      const int c = threadIdx.x;
      if (c < cols)
        out.block_sums[static_cast<int64_t>(place.block) * K + col + c] = sums.column(c);
    }

    const float factor = scale.factor(place.group, fp8_max);
    const int patch_row = Patch<Element>::row() * kPatch;
    const int patch_col = Patch<Element>::column() * kPatch;
    const int64_t first = (place.row_begin + patch_row) * K + col + patch_col;
    uint32_t left[2][4], right[2][4];  // four columns of four rows each, above and below
#pragma unroll
    for (int i = 0; i < kPatch; ++i) {
      const uint2 bytes = quantize_patch_row<Element, e5m2>(patch, i, factor, special);
      left[i / 4][i % 4] = bytes.x;
      right[i / 4][i % 4] = bytes.y;
      if (out.q && patch_row + i < place.rows && patch_col < cols)
        *reinterpret_cast<uint2*>(out.q + first + static_cast<int64_t>(i) * K) = bytes;
    }

    if (out.q_t) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        transpose_bytes(left[half]);
        transpose_bytes(right[half]);
      }
      __syncthreads();  // the sums and the tile before have been read
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        turned->put(c, make_uint2(left[0][c], left[1][c]));
        turned->put(c + 4, make_uint2(right[0][c], right[1][c]));
      }
      __syncthreads();
      if (tiles.offs)
        turned->write(out.q_t + (static_cast<int64_t>(place.block) * K + col) * kTile, kTile, kTile,
                      cols);
      else
        turned->write(out.q_t + (static_cast<int64_t>(place.group) * K + col) * tiles.group_rows +
                          place.row_in_group,
                      tiles.group_rows, place.rows, cols);
    }
    // The next tile is stored where this one is still being read.
    if (out.block_sums) __syncthreads();
  }
}

}  // namespace grouped_linear::cuda
