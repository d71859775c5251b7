// SPDX-License-Identifier: Apache-2.0
// Swapped operands of M-grouped GEMMs in 16 bits: the transpose of out is computed.
//
// b is wgmma's first operand: each math warpgroup has 64 of a tile's 128 columns. The tile's rows
// lie along wgmma's N, which may be any multiple of 16. So a group's rows are shared out evenly
// among as few tiles as they need, and few of these rows are empty: groups of 512 random rows take
// 1.015 times as many, in tiles of 128 rows 1.12 times. The blocks of a cluster have the same rows,
// of which each loads one half into both, and columns beside one another.
//
// Every element is the same sum of the same products as without: bits are equal.
//
// Floor, for n rows: a k-block takes 4 n cycles of the tensor cores and 256 + 3 n of shared memory
// (128 + 2 n read by wgmma, 128 + n written by TMA). For an output, tiles of 192 x 128 load 1.17
// times as many bytes as tiles of 128 x 256: takes_swapped says where that is worth it.
#pragma once

#include "cuda/gemm/epilogue_math.cuh"
#include "cuda/gemm/sm90/smem_layout.cuh"

namespace grouped_linear::cuda::sm90 {

// Calls with(Int<16 * units>()), since wgmma's N is a constant: one of first to last units.
template <typename Config, int first = 1, int last = Config::kTileM / kSwappedUnit, typename With>
__device__ __forceinline__ void with_rows(int units, const With& with) {
  constexpr int middle = (first + last) / 2;
  if constexpr (first == last)
    with(Int<first * kSwappedUnit>());
  else if (units <= middle)
    with_rows<Config, first, middle>(units, with);
  else
    with_rows<Config, middle + 1, last>(units, with);
}

// Writes a warpgroup's accumulators to its buffer: 64 columns of each row, a line of 128 bytes.
// accum[4 j + 2 h + i] is of column 16 warp + lane / 4 + 8 h, and of row 8 j + 2 (lane % 4) + i.
template <typename Config>
__device__ __forceinline__ void write_swapped(const float (&accum)[Config::kAccumulators],
                                              uint8_t* lines, int units) {
  using Convert = Format<typename Config::A>;
  const int thread = reread_thread_index(), lane = thread % 32, warp = thread / 32 % 4;
#pragma unroll
  for (int j = 0; j < Config::kTileM / 8; j += 2) {
    if (j / 2 >= units) break;
    const int row = 8 * j + lane / 16 * 8 + lane % 8, piece = warp * 2 + lane / 8 % 2;
    stmatrix_x4_trans(&lines[row * kSwizzleBytes + (piece ^ (row % 8)) * 16],
                      Convert::from_floats(accum[4 * j], accum[4 * j + 1]),
                      Convert::from_floats(accum[4 * j + 2], accum[4 * j + 3]),
                      Convert::from_floats(accum[4 * j + 4], accum[4 * j + 5]),
                      Convert::from_floats(accum[4 * j + 6], accum[4 * j + 7]));
  }
  fence_proxy_async();
}

}  // namespace grouped_linear::cuda::sm90
