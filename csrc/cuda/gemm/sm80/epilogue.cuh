// Accumulators to the output: scaled (FP8 with a scale per group), biased, converted, and stored or
// added.
//
// A warp writes eight rows of its accumulators at a time to shared memory, in float32, and reads them
// back row by row, so that its stores have 16 bytes a thread and whole sectors.
#pragma once

#include "cuda/gemm/epilogue_math.cuh"
#include "cuda/gemm/sm80/shared_storage.cuh"
#include "cuda/gemm/tile_order.cuh"

namespace grouped_linear::cuda::sm80 {

// count elements of a row: value (+ bias) (+ what is there) to `out`.
template <typename T, bool aligned, int count>
__device__ __forceinline__ void store_elements(T* out, const float* values, const T* bias,
                                               bool add) {
  static_assert(count * sizeof(T) == 16);
  alignas(16) T result[count];
  if (add) {
    if constexpr (aligned) {
      *reinterpret_cast<uint4*>(result) = *reinterpret_cast<const uint4*>(out);
    } else {
#pragma unroll
      for (int i = 0; i < count; ++i) result[i] = out[i];
    }
  }
#pragma unroll
  for (int i = 0; i < count; ++i) {
    float value = values[i];
    if (bias != nullptr) value += static_cast<float>(bias[i]);
    if (add) value += static_cast<float>(result[i]);
    result[i] = from_float<T>(value);
  }
  if constexpr (aligned) {
    *reinterpret_cast<uint4*>(out) = *reinterpret_cast<const uint4*>(result);
  } else {
#pragma unroll
    for (int i = 0; i < count; ++i) out[i] = result[i];
  }
}

template <typename T, bool aligned, typename Config>
__device__ __forceinline__ void write_outputs(const Accumulators<Config>& accum,
                                              EpilogueRows<Config>& buffer,
                                              const EpilogueArguments& args, const GemmShape& shape,
                                              const WorkTile& tile, const MmaThread& thread,
                                              bool overwrite) {
  constexpr int count = 16 / sizeof(T), row_chunks = Config::kWarpN / count;
  static_assert(8 * row_chunks % 32 == 0);
  const int64_t before = Config::kKGrouped ? int64_t{tile.group} * shape.rows : 0;
  const T* bias = nullptr;
  if (!Config::kKGrouped && args.bias != nullptr)
    bias = static_cast<const T*>(args.bias) + tile.group * args.bias_stride;
#pragma unroll
  for (int i = 0; i < 2 * (Config::kWarpM / 16); ++i) {
    const int first_row = tile.row + thread.row + 8 * i;
    __syncwarp();
#pragma unroll
    for (int j = 0; j < Config::kWarpN / 8; ++j)
      *reinterpret_cast<float2*>(
          &buffer.rows[thread.lane / 4][8 * j + 2 * (thread.lane % 4)]) =
          make_float2(accum[i / 2][j][i % 2 * 2], accum[i / 2][j][i % 2 * 2 + 1]);
    __syncwarp();
#pragma unroll
    for (int at = 0; at < 8 * row_chunks; at += 32) {
      const int row = (at + thread.lane) / row_chunks;
      const int from_col = (at + thread.lane) % row_chunks * count;
      const int col = tile.col + thread.col + from_col;
      if (first_row + row >= tile.row_end || col >= shape.cols) continue;
      T* out = static_cast<T*>(args.out) + (before + first_row + row) * shape.cols + col;
      store_elements<T, aligned, count>(out, &buffer.rows[row][from_col],
                                        bias == nullptr ? nullptr : bias + col, !overwrite);
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
  const auto write = [&]<typename T>(T) {
    if (args.aligned)
      write_outputs<T, true, Config>(accum, buffer, args, shape, tile, thread, overwrite);
    else
      write_outputs<T, false, Config>(accum, buffer, args, shape, tile, thread, overwrite);
  };
  switch (args.type) {
    case OutputType::kBFloat16: return write(__nv_bfloat16());
    case OutputType::kHalf: return write(__half());
    case OutputType::kFloat: return write(float());
  }
}

// M-grouped: zeros in the rows that belong to no group. By all blocks of the grid.
__device__ __forceinline__ void zero_tail_rows(const EpilogueArguments& args,
                                               const GroupTable& groups, const GemmShape& shape) {
  const int64_t row_bytes = int64_t{shape.cols} * (args.type == OutputType::kFloat ? 4 : 2);
  const int64_t begin = groups.row_end[shape.E - 1] * row_bytes, end = shape.T * row_bytes;
  const int64_t thread = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  const int64_t threads = int64_t{gridDim.x} * blockDim.x;
  char* out = static_cast<char*>(args.out);
  if (args.aligned) {
    for (int64_t at = begin + thread * 16; at < end; at += threads * 16)
      *reinterpret_cast<uint4*>(out + at) = make_uint4(0, 0, 0, 0);
  } else {
    for (int64_t at = begin + thread * 2; at < end; at += threads * 2)
      *reinterpret_cast<uint16_t*>(out + at) = 0;
  }
}

}  // namespace grouped_linear::cuda::sm80
