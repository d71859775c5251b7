// SPDX-License-Identifier: Apache-2.0
// Grouped GEMM of float32 operands with FFMA: for tests and completeness, with no speed target.
//
// 64 x 64 outputs a block, 4 x 4 a thread, 16 of K at a time.
#pragma once

#include "cuda/common/groups.cuh"
#include "cuda/common/pdl.cuh"
#include "cuda/common/row_numbers.cuh"
#include "cuda/gemm/epilogue_math.cuh"

namespace grouped_linear::cuda::simt {

// element(group, i, k) = first[group * group_stride + i * stride + k * k_stride], where i
// (M-grouped) or k (K-grouped) is first looked up in rows.
struct FloatOperand {
  const float* first;
  int64_t group_stride, stride, k_stride;
  RowNumbers rows;

  template <Grouping grouping>
  __device__ float at(int group, int i, int k) const {
    if (grouping == Grouping::kM)
      i = rows.row(i);
    else
      k = rows.row(k);
    return first[group * group_stride + i * stride + k * k_stride];
  }
};

constexpr int kTile = 64, kTileK = 16, kThreads = 256;

template <typename T>
__device__ void store_value(float value, void* out, int64_t at, const void* bias, int64_t bias_at,
                            bool add) {
  T* to = static_cast<T*>(out) + at;
  if (bias != nullptr) value += static_cast<float>(static_cast<const T*>(bias)[bias_at]);
  if (add) value += static_cast<float>(*to);
  *to = from_float<T>(value);
}

template <Grouping grouping>
__global__ void __launch_bounds__(kThreads, 2)
    grouped_gemm_float_kernel(const FloatOperand a, const FloatOperand b, const int32_t* offs,
                              const EpilogueArguments epilogue, const GemmShape shape) {
  constexpr bool k_grouped = grouping == Grouping::kK;
  grid_dependency_wait();
  __shared__ GroupTable groups;
  __shared__ float a_tile[kTileK][kTile + 1], b_tile[kTileK][kTile + 1];
  load_groups<kThreads>(groups, offs, shape.E, shape.T, TilesOf{kTile});
  const bool overwrite = overwrites(epilogue);

  const int E = shape.E, col_tiles = (shape.cols + kTile - 1) / kTile;
  const int tail_rows = shape.T - groups.row_end[E - 1];
  const int64_t row_tiles = k_grouped ? static_cast<int64_t>((shape.rows + kTile - 1) / kTile) * E
                                      : groups.tile_end[E - 1] + (tail_rows + kTile - 1) / kTile;
  for (int64_t tile = blockIdx.x; tile < row_tiles * col_tiles; tile += gridDim.x) {
    const int col = static_cast<int>(tile % col_tiles) * kTile;
    const int row_tile = static_cast<int>(tile / col_tiles);
    int group, row, row_end, k_begin = 0, k_end = shape.K;
    if (k_grouped) {
      const int tiles_per_group = (shape.rows + kTile - 1) / kTile;
      group = row_tile / tiles_per_group;
      row = row_tile % tiles_per_group * kTile;
      row_end = shape.rows;
      k_begin = groups.row_begin(group);
      k_end = groups.row_end[group];
    } else {
      const bool tail = row_tile >= groups.tile_end[E - 1];
      group = tail ? E : groups.group_of_tile(row_tile, E);
      row = groups.row_begin(group) + (row_tile - groups.tile_begin(group)) * kTile;
      row_end = tail ? shape.T : groups.row_end[group];
      if (tail) k_end = 0;
    }

    float accum[4][4] = {};
    const int tx = threadIdx.x % 16, ty = threadIdx.x / 16;
    for (int k = k_begin; k < k_end; k += kTileK) {
      for (int i = threadIdx.x; i < kTileK * kTile; i += kThreads) {
        const int d = i / kTile, r = i % kTile;
        const bool in_k = k + d < k_end;
        a_tile[d][r] = in_k && row + r < row_end ? a.at<grouping>(0, row + r, k + d) : 0;
        b_tile[d][r] = in_k && col + r < shape.cols ? b.at<grouping>(group, col + r, k + d) : 0;
      }
      __syncthreads();
      for (int d = 0; d < kTileK; ++d)
#pragma unroll
        for (int i = 0; i < 4; ++i)
#pragma unroll
          for (int j = 0; j < 4; ++j) accum[i][j] += a_tile[d][ty * 4 + i] * b_tile[d][tx * 4 + j];
      __syncthreads();
    }
    if (!overwrite && k_begin >= k_end) continue;  // an empty group adds nothing

    const int64_t group_start =
        k_grouped ? static_cast<int64_t>(group) * shape.rows * shape.cols : 0;
    const void* bias = group == E ? nullptr : epilogue.bias;
    for (int i = 0; i < 4; ++i)
      for (int j = 0; j < 4; ++j) {
        const int r = row + ty * 4 + i, c = col + tx * 4 + j;
        if (r >= row_end || c >= shape.cols) continue;
        const int64_t at = group_start + static_cast<int64_t>(r) * shape.cols + c;
        const int64_t bias_at = group * epilogue.bias_stride + c;
        if (epilogue.type == OutputType::kBFloat16)
          store_value<__nv_bfloat16>(accum[i][j], epilogue.out, at, bias, bias_at, !overwrite);
        else if (epilogue.type == OutputType::kHalf)
          store_value<__half>(accum[i][j], epilogue.out, at, bias, bias_at, !overwrite);
        else
          store_value<float>(accum[i][j], epilogue.out, at, bias, bias_at, !overwrite);
      }
  }
}

}  // namespace grouped_linear::cuda::simt
