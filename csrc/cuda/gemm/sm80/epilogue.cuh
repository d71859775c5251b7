// SPDX-License-Identifier: Apache-2.0
// Accumulators to the output: scaled (FP8 with a scale per group), biased, converted, and stored or
// added.
//
// A warp writes eight rows of its accumulators at a time to shared memory, in float32, and reads
// them back row by row, so that its stores have 16 bytes a thread and whole sectors.
#pragma once

#include "cuda/gemm/epilogue_math.cuh"
#include "cuda/gemm/sm80/shared_storage.cuh"
#include "cuda/gemm/tile_order.cuh"

namespace grouped_linear::cuda::sm80 {

// K-grouped, where the output is added to: fetches this warp's part into L2 while it is computed.
template <typename Config>
__device__ __forceinline__ void prefetch_outputs(const EpilogueArguments& args,
                                                 const GemmShape& shape, const WorkTile& tile,
                                                 const MmaThread& thread) {
  const int item = args.type == OutputType::kFloat ? 4 : 2, line = 128 / item;
  const int lines = Config::kWarpN / line;
#pragma unroll 1
  for (int i = thread.lane; i < Config::kWarpM * lines; i += 32) {
    const int row = tile.row + thread.row + i / lines;
    const int col = tile.col + thread.col + i % lines * line;
    if (row >= tile.row_end || col >= shape.cols) continue;
    const int64_t at = (int64_t{tile.group} * shape.rows + row) * shape.cols + col;
    asm volatile("prefetch.global.L2 [%0];" ::"l"(static_cast<const char*>(args.out) + at * item));
  }
}

// Adds one group's bias [cols] to a thread's accumulators; col: the first of the warp's columns.
template <typename T, typename Config>
__device__ __forceinline__ void add_bias(Accumulators<Config>& accum, const T* bias, int lane,
                                         int col, int cols) {
#pragma unroll
  for (int j = 0; j < Config::kWarpN / 8; ++j) {
    const int at = col + 8 * j + 2 * (lane % 4);
    if (at >= cols) continue;
    const float x = static_cast<float>(bias[at]), y = static_cast<float>(bias[at + 1]);
#pragma unroll
    for (int i = 0; i < Config::kWarpM / 16; ++i)
#pragma unroll
      for (int k = 0; k < 4; ++k) accum[i][j][k] += k % 2 == 0 ? x : y;
  }
}

// 16 bytes of a row of outputs: `values`, or these added to what is there.
template <typename T>
__device__ __forceinline__ void store_vector(T* out, const float* values, bool add) {
  constexpr int count = 16 / sizeof(T);
  alignas(16) T result[count];
  if (add) *reinterpret_cast<uint4*>(result) = *reinterpret_cast<const uint4*>(out);
#pragma unroll
  for (int i = 0; i < count; ++i)
    result[i] = from_float<T>(add ? values[i] + static_cast<float>(result[i]) : values[i]);
  *reinterpret_cast<uint4*>(out) = *reinterpret_cast<const uint4*>(result);
}

template <typename T, typename Config>
__device__ __forceinline__ void write_outputs(Accumulators<Config>& accum,
                                              EpilogueRows<Config>& buffer,
                                              const EpilogueArguments& args, const GemmShape& shape,
                                              const WorkTile& tile, const MmaThread& thread,
                                              bool overwrite) {
  constexpr int count = 16 / sizeof(T), row_vectors = Config::kWarpN / count;
  static_assert(8 * row_vectors % 32 == 0);
  const int col = tile.col + thread.col, group = tile.group;
  if (Config::kHasBias && args.bias != nullptr)
    add_bias<T, Config>(accum, static_cast<const T*>(args.bias) + group * args.bias_stride,
                        thread.lane, col, shape.cols);
  const int64_t first_row =
      (Config::kKGrouped ? int64_t{group} * shape.rows : 0) + tile.row + thread.row;
  T* out = static_cast<T*>(args.out) + first_row * shape.cols + col;
  const int cols = shape.cols - col;
  int rows = tile.row_end - tile.row - thread.row;  // left
#pragma unroll
  for (int i = 0; i < Config::kWarpM / 8; ++i, rows -= 8, out += int64_t{8} * shape.cols) {
    __syncwarp();
#pragma unroll
    for (int j = 0; j < Config::kWarpN / 8; ++j)
      *reinterpret_cast<float2*>(&buffer.rows[thread.lane / 4][8 * j + 2 * (thread.lane % 4)]) =
          make_float2(accum[i / 2][j][i % 2 * 2], accum[i / 2][j][i % 2 * 2 + 1]);
    __syncwarp();
    if (args.aligned) {
#pragma unroll
      for (int at = 0; at < 8 * row_vectors; at += 32) {
        const int row = (at + thread.lane) / row_vectors;
        const int from = (at + thread.lane) % row_vectors * count;
        if (row < rows && from < cols)
          store_vector(out + int64_t{row} * shape.cols + from, &buffer.rows[row][from],
                       Config::kAdds && !overwrite);
      }
    } else {
#pragma unroll 1
      for (int at = thread.lane; at < 8 * Config::kWarpN; at += 32) {
        const int row = at / Config::kWarpN, from = at % Config::kWarpN;
        if (row >= rows || from >= cols) continue;
        T& there = out[int64_t{row} * shape.cols + from];
        const float value = buffer.rows[row][from];
        there = from_float<T>(overwrite ? value : value + static_cast<float>(there));
      }
    }
  }
}

template <typename Config>
__device__ __forceinline__ void run_epilogue(Accumulators<Config>& accum,
                                             EpilogueRows<Config>& buffer,
                                             const EpilogueArguments& args, const GemmShape& shape,
                                             const WorkTile& tile, const MmaThread& thread,
                                             bool overwrite) {
  if constexpr (Config::kScalePerGroup) {
    const float scale_a = args.scale_a[tile.group], scale_b = args.scale_b[tile.group];
#pragma unroll
    for (int i = 0; i < Config::kWarpM / 16; ++i)
#pragma unroll
      for (int j = 0; j < Config::kWarpN / 8; ++j)
#pragma unroll
        for (int k = 0; k < 4; ++k) accum[i][j][k] = accum[i][j][k] * scale_a * scale_b;
  }
  with_output_type(args.type, [&]<typename T>() {
    write_outputs<T, Config>(accum, buffer, args, shape, tile, thread, overwrite);
  });
}

}  // namespace grouped_linear::cuda::sm80
