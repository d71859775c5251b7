// Grouped products of float32 operands with FFMA: for tests and completeness, with no speed target.
// (The tensor cores would round the operands to tf32 and break the promise of float32.)
//
// 64 x 64 outputs a block, 4 x 4 a thread, 16 of the depth at a time.
#pragma once

#include "cuda/common/pdl.cuh"
#include "cuda/gemm/sm90/epilogue.cuh"

namespace grouped_linear::cuda {

// element(group, i, d) = first[group * group_stride + i * stride + d * depth_stride]
struct FloatOperand {
  const float* first;
  int64_t group_stride, stride, depth_stride;
};

constexpr int kFloatTile = 64, kFloatDepth = 16, kFloatThreads = 256;

template <typename T>
__device__ void store_value(float value, void* out, int64_t at, const void* bias, int64_t bias_at,
                            bool add) {
  T* to = static_cast<T*>(out) + at;
  if (bias != nullptr) value += static_cast<float>(static_cast<const T*>(bias)[bias_at]);
  if (add) value += static_cast<float>(*to);
  *to = from_float<T>(value);
}

template <bool by_depth>
__global__ void __launch_bounds__(kFloatThreads, 2)
    grouped_mm_float_kernel(const FloatOperand a, const FloatOperand b, const int32_t* offs,
                            const Epilogue epilogue, const GemmShape shape) {
  grid_dependency_wait();
  __shared__ GroupTable groups;
  __shared__ float a_tile[kFloatDepth][kFloatTile + 1], b_tile[kFloatDepth][kFloatTile + 1];
  load_groups<kFloatThreads>(groups, offs, shape.E, shape.T, TilesOf{kFloatTile});
  const bool overwrite =
      !epilogue.accumulate || (epilogue.overwrite != nullptr && *epilogue.overwrite);

  const int E = shape.E, col_tiles = (shape.cols + kFloatTile - 1) / kFloatTile;
  const int tail_rows = shape.T - groups.row_end[E - 1];
  const int64_t row_tiles =
      by_depth ? static_cast<int64_t>((shape.rows + kFloatTile - 1) / kFloatTile) * E
               : groups.tile_end[E - 1] + (tail_rows + kFloatTile - 1) / kFloatTile;
  for (int64_t tile = blockIdx.x; tile < row_tiles * col_tiles; tile += gridDim.x) {
    const int col = static_cast<int>(tile % col_tiles) * kFloatTile;
    const int row_tile = static_cast<int>(tile / col_tiles);
    int group, row, row_limit, depth_begin = 0, depth_end = shape.depth;
    if (by_depth) {
      const int tiles_a_group = (shape.rows + kFloatTile - 1) / kFloatTile;
      group = row_tile / tiles_a_group;
      row = row_tile % tiles_a_group * kFloatTile;
      row_limit = shape.rows;
      depth_begin = groups.row_begin(group);
      depth_end = groups.row_end[group];
    } else {
      const bool tail = row_tile >= groups.tile_end[E - 1];
      group = tail ? E : groups.group_of_tile(row_tile, E);
      row = groups.row_begin(group) + (row_tile - groups.tile_begin(group)) * kFloatTile;
      row_limit = tail ? shape.T : groups.row_end[group];
      if (tail) depth_end = 0;
    }

    float sum[4][4] = {};
    const int tx = threadIdx.x % 16, ty = threadIdx.x / 16;
    for (int depth = depth_begin; depth < depth_end; depth += kFloatDepth) {
      for (int i = threadIdx.x; i < kFloatDepth * kFloatTile; i += kFloatThreads) {
        const int d = i / kFloatTile, r = i % kFloatTile;
        const bool in_depth = depth + d < depth_end;
        a_tile[d][r] = in_depth && row + r < row_limit
                           ? a.first[(row + r) * a.stride + (depth + d) * a.depth_stride]
                           : 0;
        b_tile[d][r] = in_depth && col + r < shape.cols
                           ? b.first[group * b.group_stride + (col + r) * b.stride +
                                     (depth + d) * b.depth_stride]
                           : 0;
      }
      __syncthreads();
      for (int d = 0; d < kFloatDepth; ++d)
#pragma unroll
        for (int i = 0; i < 4; ++i)
#pragma unroll
          for (int j = 0; j < 4; ++j) sum[i][j] += a_tile[d][ty * 4 + i] * b_tile[d][tx * 4 + j];
      __syncthreads();
    }
    if (!overwrite && depth_begin >= depth_end) continue;  // an empty group adds nothing

    const int64_t group_start =
        by_depth ? static_cast<int64_t>(group) * shape.rows * shape.cols : 0;
    const void* bias = group == E ? nullptr : epilogue.bias;
    for (int i = 0; i < 4; ++i)
      for (int j = 0; j < 4; ++j) {
        const int r = row + ty * 4 + i, c = col + tx * 4 + j;
        if (r >= row_limit || c >= shape.cols) continue;
        const int64_t at = group_start + static_cast<int64_t>(r) * shape.cols + c;
        const int64_t bias_at = group * epilogue.bias_stride + c;
        if (epilogue.dtype == Output::kBFloat16)
          store_value<__nv_bfloat16>(sum[i][j], epilogue.out, at, bias, bias_at, !overwrite);
        else if (epilogue.dtype == Output::kHalf)
          store_value<__half>(sum[i][j], epilogue.out, at, bias, bias_at, !overwrite);
        else
          store_value<float>(sum[i][j], epilogue.out, at, bias, bias_at, !overwrite);
      }
  }
}

}  // namespace grouped_linear::cuda
