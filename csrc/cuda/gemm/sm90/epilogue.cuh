// SPDX-License-Identifier: Apache-2.0
// The epilogue of a linear layer: accumulators are scaled (FP8 with a scale per group), biased,
// converted, and stored or added to the output.
//
// An epilogue is a template parameter of the kernel. It has two halves, which meet in a warpgroup's
// epilogue buffers in shared memory. apply, by the math warps, fills them from the accumulators.
// run_store_warp, by one thread or warp a warpgroup, writes them to the output. LinearEpilogue
// shows each member's signature:
//
//   Arguments            what the kernel is given for it: EpilogueArguments, or derived from that
//   kRegisters           that a store warp's threads need; the producer may need more
//   subtiles             rounds through the buffers that a tile takes
//   prefetch             once a kernel: prefetches the output's tensor map
//   apply                one warpgroup's kWgmmaM x kTileN accumulators: fills the buffers, subtile
//                        by subtile, each inside sync(subtile, fill)
//   run_store_warp       by a thread of a store warp, or with elementwise work by the whole warp:
//                        all tiles of the block, also those that write nothing. For every subtile
//                        it arrives at epilogue_empty and waits for epilogue_full, so that both
//                        halves stay in step. The last one may have to schedule (roles.h)
//
// To change values alone, derive from LinearEpilogue and change the accumulators before its apply
// (tests/gemm_variants/variant.cu has such a one).
//
// A thread's accumulators: accum[accumulator_of<Config>(4 j + 2 h + i)] belongs to row lane / 4 + 8
// h of its warp's 16, and to column 8 j + 2 (lane % 4) + i of the tile.
//
// Bytes: an output is written once; adding reads it too. The buffers hold lines of 128 bytes, which
// TMA stores while the next tile is computed. float32 has twice the bytes: it takes two subtiles,
// and the second waits until the first was stored.
#pragma once

#include <type_traits>

#include "cuda/common/elements.cuh"
#include "cuda/gemm/epilogue_math.cuh"
#include "cuda/gemm/sm90/split_k.cuh"
#include "cuda/gemm/sm90/tensor_maps.cuh"

namespace grouped_linear::cuda::sm90 {

// Adds one group's bias [cols] to a thread's accumulators; col: the tile's first column. A tile of
// gate and up has part_cols columns of each, from col on, and up's bias follows gate's.
template <typename T, typename Config, int part_cols = Config::kTileN>
__device__ __forceinline__ void add_bias(float (&accum)[Config::kTileN / 2], const T* bias, int col,
                                         int cols) {
#pragma unroll
  for (int j = 0; j < Config::kTileN / 8; ++j) {
    const int at = col + 8 * j % part_cols + 2 * (threadIdx.x % 4);
    if (at >= cols) continue;
    const T* pair = (8 * j < part_cols ? bias : bias + cols) + at;
    const float x = static_cast<float>(pair[0]), y = static_cast<float>(pair[1]);
    accum[accumulator_of<Config>(4 * j + 0)] += x;
    accum[accumulator_of<Config>(4 * j + 1)] += y;
    accum[accumulator_of<Config>(4 * j + 2)] += x;
    accum[accumulator_of<Config>(4 * j + 3)] += y;
  }
}

// The buffers of a warpgroup, or of a warp: kEpilogueRows lines of 128 bytes each, swizzled by
// their numbers.
template <typename Config>
using EpilogueBuffers = uint8_t[Config::kEpilogueBuffers][Config::kEpilogueRows * kSwizzleBytes];

// This warp's first line in a buffer of so many bytes.
template <size_t bytes>
__device__ __forceinline__ int first_line(const uint8_t (&)[bytes]) {
  return bytes < kWgmmaM * kSwizzleBytes ? 0 : threadIdx.x / 32 % 4 * 16;
}

// The address of a thread's first pair of float32 in a buffer, in the row of its first
// accumulators. The addresses of the others follow by xor with 16 bytes times 2, 4 and 6, and 8
// lines below.
template <size_t bytes>
__device__ __forceinline__ uint32_t float_pair(const uint8_t (&buffer)[bytes]) {
  const int lane = threadIdx.x % 32, quad = lane % 4;
  const int row = first_line(buffer) + lane / 4;
  return smem_address(&buffer[row * kSwizzleBytes]) + ((quad / 2) ^ (row % 8)) * 16 + quad % 2 * 8;
}

// The row that a lane names to stmatrix or ldmatrix, for the 16-bit columns 8 j to 8 j + 15 of a
// buffer.
template <typename Buffer>
__device__ __forceinline__ auto* matrix_row(Buffer& buffer, int j) {
  const int lane = threadIdx.x % 32, row = first_line(buffer) + lane % 16;
  return &buffer[row * kSwizzleBytes + ((j + lane / 16) ^ (row % 8)) * 16];
}

// Writes a warp's 16 x kTileN accumulators, from column `first` on, to its buffers until they are
// full.
template <typename T, typename Config>
__device__ __forceinline__ void write_buffers(const float (&accum)[Config::kTileN / 2],
                                              EpilogueBuffers<Config>& to, int first) {
  constexpr int line_cols = kSwizzleBytes / sizeof(T);
#pragma unroll
  for (int i = 0; i < Config::kEpilogueBuffers; ++i) {
    const auto at = [&](int j, int k) {
      return accum[accumulator_of<Config>(4 * ((first + i * line_cols) / 8 + j) + k)];
    };
    if constexpr (sizeof(T) == 2) {
#pragma unroll
      for (int j = 0; j < 8; j += 2)
        stmatrix_x4(matrix_row(to[i], j), Format<T>::from_floats(at(j, 0), at(j, 1)),
                    Format<T>::from_floats(at(j, 2), at(j, 3)),
                    Format<T>::from_floats(at(j + 1, 0), at(j + 1, 1)),
                    Format<T>::from_floats(at(j + 1, 2), at(j + 1, 3)));
    } else {
      // Odd rows store the other half of their line first, so that they share no bank with even
      // rows.
      const bool odd = threadIdx.x / 4 % 2 != 0;
      const uint32_t first_pair = float_pair(to[i]) ^ (odd ? 64 : 0);
#pragma unroll
      for (int j = 0; j < 2; ++j) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const auto of = [&](bool second, int k) {
            return second ? at(j + 2, 2 * h + k) : at(j, 2 * h + k);
          };
          const uint32_t pair = (first_pair ^ (32 * j)) + h * 8 * kSwizzleBytes;
          st_shared_float2(pair, of(odd, 0), of(odd, 1));
          st_shared_float2(pair ^ 64, of(!odd, 0), of(!odd, 1));
        }
      }
    }
  }
}

// Adds the buffers' contents to a warp's accumulators from column `first` on.
template <typename T, typename Config>
__device__ __forceinline__ void add_buffers(float (&accum)[Config::kTileN / 2],
                                            const EpilogueBuffers<Config>& from, int first) {
  constexpr int line_cols = kSwizzleBytes / sizeof(T);
#pragma unroll
  for (int i = 0; i < Config::kEpilogueBuffers; ++i) {
    const auto at = [&](int j, int k) -> float& {
      return accum[accumulator_of<Config>(4 * ((first + i * line_cols) / 8 + j) + k)];
    };
    if constexpr (sizeof(T) == 2) {
#pragma unroll
      for (int j = 0; j < 8; j += 2) {
        uint32_t pairs[4];
        ldmatrix_x4(pairs, smem_address(matrix_row(from[i], j)));
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          const T* pair = reinterpret_cast<const T*>(&pairs[k]);
          at(j + k / 2, k % 2 * 2) += static_cast<float>(pair[0]);
          at(j + k / 2, k % 2 * 2 + 1) += static_cast<float>(pair[1]);
        }
      }
    } else {
      const uint32_t first_pair = float_pair(from[i]);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const float2 pair = ld_shared_float2((first_pair ^ (32 * j)) + h * 8 * kSwizzleBytes);
          at(j, 2 * h) += pair.x;
          at(j, 2 * h + 1) += pair.y;
        }
      }
    }
  }
}

// Copies a warp's rows of a subtile from its buffers to out (or back), element by element: for an
// output that is not aligned to TMA's 16 bytes. row: the warp's first row in out; first: the
// subtile's first column.
template <typename T, typename Config, int subtile_cols, bool back>
__device__ __forceinline__ void copy_buffers(EpilogueBuffers<Config>& buffers, T* out, int row,
                                             int row_end, int first, int cols) {
  constexpr int line_cols = kSwizzleBytes / sizeof(T);
  const int first_row = first_line(buffers[0]);
  __syncwarp();
#pragma unroll 1
  for (int i = threadIdx.x % 32; i < 16 * subtile_cols; i += 32) {
    const int line = i / subtile_cols, col = i % subtile_cols, byte = col % line_cols * sizeof(T);
    if (row + line >= row_end || first + col >= cols) continue;
    T& buffered = reinterpret_cast<T&>(
        buffers[col / line_cols][(first_row + line) * kSwizzleBytes + (byte ^ (line % 8 * 16))]);
    T& there = out[static_cast<int64_t>(row + line) * cols + first + col];
    if (back)
      buffered = there;
    else
      there = buffered;
  }
  __syncwarp();
}

// Where a value lies in the buffers of a warpgroup that stores its tile transposed. A line has
// values of one column of the tile, of 64 rows in 16 bits and of 32 in float32; the lines of 64
// columns fill a buffer, and in float32 those of rows 32 to 63 the next one.
template <typename T, typename Config>
__device__ __forceinline__ uint8_t* transposed_place(EpilogueBuffers<Config>& buffers, int row,
                                                     int col) {
  constexpr int line_rows = kSwizzleBytes / sizeof(T), lines = kWgmmaM / line_rows;
  const int byte = row % line_rows * sizeof(T);
  return &buffers[col / 64 * lines + row / line_rows]
                 [col % 64 * kSwizzleBytes + (byte ^ (col % 8 * 16))];
}

// Calls each(place, k, j) for the places of a warp's accumulators: in 16 bits for four matrices at
// a time (stmatrix, ldmatrix), from accumulator 4 j on, in float32 for accumulator 4 j + k.
template <typename T, typename Config, typename Each>
__device__ __forceinline__ void for_transposed(EpilogueBuffers<Config>& buffers, int subtile,
                                               const Each& each) {
  constexpr int cols = Config::kTileN / (sizeof(T) == 4 ? 2 : 1);
  const int thread = reread_thread_index(), lane = thread % 32, row = thread / 32 % 4 * 16;
#pragma unroll
  for (int j = 0; j < cols / 8; j += sizeof(T) == 4 ? 1 : 2) {
    if constexpr (sizeof(T) == 2) {
      each(transposed_place<T, Config>(buffers, row + lane / 8 % 2 * 8,
                                       8 * j + lane / 16 * 8 + lane % 8),
           0, j);
    } else {
#pragma unroll
      for (int k = 0; k < 4; ++k)
        each(transposed_place<T, Config>(buffers, row + lane / 4 + k / 2 * 8,
                                         8 * j + lane % 4 * 2 + k % 2),
             k, subtile * cols / 8 + j);
    }
  }
}

// write_buffers and add_buffers for a tile that is stored transposed.
template <typename T, typename Config>
__device__ __forceinline__ void write_transposed(const float (&accum)[Config::kTileN / 2],
                                                 EpilogueBuffers<Config>& to, int subtile) {
  for_transposed<T, Config>(to, subtile, [&](uint8_t* place, int k, int j) {
    if constexpr (sizeof(T) == 2)
      stmatrix_x4_trans(place, Format<T>::from_floats(accum[4 * j], accum[4 * j + 1]),
                        Format<T>::from_floats(accum[4 * j + 2], accum[4 * j + 3]),
                        Format<T>::from_floats(accum[4 * j + 4], accum[4 * j + 5]),
                        Format<T>::from_floats(accum[4 * j + 6], accum[4 * j + 7]));
    else
      *reinterpret_cast<float*>(place) = accum[4 * j + k];
  });
}

template <typename T, typename Config>
__device__ __forceinline__ void add_transposed(float (&accum)[Config::kTileN / 2],
                                               EpilogueBuffers<Config>& from, int subtile) {
  for_transposed<T, Config>(from, subtile, [&](uint8_t* place, int k, int j) {
    if constexpr (sizeof(T) == 2) {
      uint32_t pairs[4];
      ldmatrix_x4<true>(pairs, smem_address(place));
#pragma unroll
      for (int i = 0; i < 8; ++i)
        accum[4 * j + i] += static_cast<float>(reinterpret_cast<const T*>(&pairs[i / 2])[i % 2]);
    } else {
      accum[4 * j + k] += *reinterpret_cast<const float*>(place);
    }
  });
}

// copy_buffers for a warp of a tile that is stored transposed. row, col: of the tile, where this
// warp's rows and the subtile's columns start. out: of the tile's group, [cols, rows].
template <typename T, typename Config, int subtile_cols, bool back>
__device__ __forceinline__ void copy_transposed(EpilogueBuffers<Config>& buffers, T* out, int row,
                                                int col, const GemmShape& shape) {
  const int first_row = threadIdx.x / 32 % 4 * 16;
  __syncwarp();
#pragma unroll 1
  for (int i = threadIdx.x % 32; i < 16 * subtile_cols; i += 32) {
    const int r = i % 16, c = i / 16;
    if (row + r >= shape.rows || col + c >= shape.cols) continue;
    T& buffered = *reinterpret_cast<T*>(transposed_place<T, Config>(buffers, first_row + r, c));
    T& there = out[static_cast<int64_t>(col + c) * shape.rows + row + r];
    if (back)
      buffered = there;
    else
      there = buffered;
  }
  __syncwarp();
}

struct LinearEpilogue {
  using Arguments = EpilogueArguments;
  static constexpr int kRegisters = 40;

  static __device__ __forceinline__ int subtiles(const Arguments& args) {
    return args.type == OutputType::kFloat ? 2 : 1;
  }

  static __device__ void prefetch(const TensorMaps& maps) { prefetch_tensor_map(&maps.out); }

  // overwrite: whether out is overwritten, read once a kernel. sync(subtile, fill): waits until the
  // warpgroup's buffers are empty (or hold what is added to), calls fill, and tells the store warp.
  template <typename Config, typename Params, typename Sync>
  static __device__ __forceinline__ void apply(float (&accum)[Config::kTileN / 2],
                                               SharedStorage<Config>& shared, const Params& params,
                                               const WorkTile& tile, bool overwrite,
                                               const Sync& sync) {
    const Arguments& args = params.epilogue;
    const GemmShape& shape = params.shape;
    if constexpr (Config::kScalePerGroup && !Config::kLowRank) {
      const float scale_a = args.scale_a[tile.group], scale_b = args.scale_b[tile.group];
#pragma unroll
      for (int i = 0; i < Config::kTileN / 2; ++i) accum[i] = accum[i] * scale_a * scale_b;
    }
    const int thread = reread_thread_index();
    auto& buffers =
        shared.epilogue[thread / 128 - 1][Config::kEpilogueRows < kWgmmaM ? thread / 32 % 4 : 0];
    const int row = tile.row + (thread / 32 - 4) * 16;
    with_output_type(args.type, [&]<typename T>() {
      write<T, Config>(accum, buffers, args, shape, tile, row, overwrite, sync);
    });
  }

  template <typename Config, typename Params>
  static __device__ void run_store_warp(SharedStorage<Config>& shared, const Params& params,
                                        int warp);

 private:
  // One warp's 16 x kTileN accumulators to its buffers. row: its first one in the output matrix.
  template <typename T, typename Config, typename Sync>
  static __device__ __forceinline__ void write(float (&accum)[Config::kTileN / 2],
                                               EpilogueBuffers<Config>& buffers,
                                               const Arguments& args, const GemmShape& shape,
                                               const WorkTile& tile, int row, bool overwrite,
                                               const Sync& sync) {
    if (Config::kHasBias && args.bias != nullptr)
      add_bias<T, Config>(accum, static_cast<const T*>(args.bias) + tile.group * args.bias_stride,
                          tile.col, shape.cols);
    constexpr int subtiles = sizeof(T) == 4 ? 2 : 1, subtile_cols = Config::kTileN / subtiles;
    const int before = Config::kKGrouped ? tile.group * shape.rows : 0;
#pragma unroll
    for (int subtile = 0; subtile < subtiles; ++subtile)
      sync(subtile, [&] {
        const int first = subtile * subtile_cols;
        const auto copy = [&](auto back) {
          if constexpr (Config::kTransposed)
            return copy_transposed<T, Config, subtile_cols, back>(
                buffers,
                static_cast<T*>(args.out) +
                    static_cast<int64_t>(tile.group) * shape.rows * shape.cols,
                row, tile.col + first, shape);
          copy_buffers<T, Config, subtile_cols, back>(buffers, static_cast<T*>(args.out),
                                                      before + row, before + tile.row_end,
                                                      tile.col + first, shape.cols);
        };
        if (Config::kAdds && !overwrite) {
          if (!args.aligned) copy(std::true_type{});
          if (subtile == 0 || !args.aligned) {
            if constexpr (Config::kTransposed)
              add_transposed<T, Config>(accum, buffers, subtile);
            else
              add_buffers<T, Config>(accum, buffers, first);
          }
        }
        if constexpr (Config::kTransposed)
          write_transposed<T, Config>(accum, buffers, subtile);
        else
          write_buffers<T, Config>(accum, buffers, first);
        if (args.aligned)
          fence_proxy_async();
        else
          copy(std::false_type{});
      });
  }
};

}  // namespace grouped_linear::cuda::sm90
