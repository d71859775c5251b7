// SPDX-License-Identifier: Apache-2.0
// How quantized fragments become q and q_t in global memory.
//
// A fragment's rows are 8 bytes of q and go there directly. Its columns are 8 bytes of q_t, whose
// rows are long, so they pass through a transposed tile in shared memory: 16 KB written and read at
// the 128 bytes a cycle of an SM, 256 cycles a tile. Copying the same 65 KB (32 in, 33 out) through
// an SM's share of 4.27 TB/s takes about 3600.
#pragma once

#include "cuda/common/fragments.cuh"

namespace grouped_linear::cuda {

// A quantized tile, transposed in shared memory: [128 columns][16 granules of 8 rows]. Granule g of
// column k is stored at g ^ (k / 8), so that half a warp, which writes 8 bytes to each of 16
// columns 1 KB apart, uses every bank once. The two granules of 16 rows stay neighbours, in either
// order.
struct alignas(16) TransposedTile {
  uint2 granules[kTileSide][kFragmentsPerSide];

  // Stores the 8 rows of column c of the calling thread's fragment.
  __device__ __forceinline__ void put(int c, uint2 rows) {
    const int fragment_col = threadIdx.x % kFragmentsPerSide;
    const int fragment_row = threadIdx.x / kFragmentsPerSide;
    granules[fragment_col * kFragmentSize + c][fragment_row ^ fragment_col] = rows;
  }

  // Writes column k to q_t + k * pitch, for the columns below cols and the rows below rows, a
  // multiple of 16. Eight threads write the 128 bytes of a column.
  __device__ __forceinline__ void write(uint8_t* q_t, int64_t pitch, int rows, int cols) const {
    const int chunk = threadIdx.x % 8;
#pragma unroll
    for (int step = 0; step < kTileSide * 8 / kTileThreads; ++step) {
      const int k = step * (kTileThreads / 8) + threadIdx.x / 8, swizzle = k / kFragmentSize;
      const uint4 v = reinterpret_cast<const uint4*>(granules[k])[chunk ^ (swizzle / 2)];
      const uint4 in_order = swizzle % 2 == 0 ? v : make_uint4(v.z, v.w, v.x, v.y);
      if (k < cols && chunk * 16 < rows)
        *reinterpret_cast<uint4*>(q_t + k * pitch + chunk * 16) = in_order;
    }
  }
};

// Transposes 4 x 4 bytes: rows in words become columns in words.
__device__ __forceinline__ void transpose_bytes(uint32_t (&w)[4]) {
  const uint32_t top_left = __byte_perm(w[0], w[1], 0x5140);
  const uint32_t bottom_left = __byte_perm(w[2], w[3], 0x5140);
  const uint32_t top_right = __byte_perm(w[0], w[1], 0x7362);
  const uint32_t bottom_right = __byte_perm(w[2], w[3], 0x7362);
  w[0] = __byte_perm(top_left, bottom_left, 0x5410);
  w[1] = __byte_perm(top_left, bottom_left, 0x7632);
  w[2] = __byte_perm(top_right, bottom_right, 0x5410);
  w[3] = __byte_perm(top_right, bottom_right, 0x7632);
}

// The bytes of a fragment whose rows and columns have the same scale: q_t has the bytes of q.
struct QuantizedFragment {
  uint32_t left[2][4], right[2][4];  // four columns of four rows each, above and below

  // i is a constant of an unrolled loop.
  __device__ __forceinline__ void set_row(int i, uint2 bytes) {
    left[i / 4][i % 4] = bytes.x;
    right[i / 4][i % 4] = bytes.y;
  }

  // Stores the columns, once all rows are set.
  __device__ __forceinline__ void put_transposed(TransposedTile& transposed) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      transpose_bytes(left[half]);
      transpose_bytes(right[half]);
    }
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      transposed.put(c, make_uint2(left[0][c], left[1][c]));
      transposed.put(c + 4, make_uint2(right[0][c], right[1][c]));
    }
  }
};

}  // namespace grouped_linear::cuda
