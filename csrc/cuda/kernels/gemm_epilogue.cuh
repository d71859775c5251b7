// From accumulators to the output: scaled, biased, rounded, and stored or added.
//
// Bytes: an output is written once; adding reads it too. A warp's 16 rows go through shared memory in
// lines of 128 bytes, which the copy engine stores while the next tile is multiplied.
#pragma once

#include "gemm_tiles.cuh"

namespace grouped_linear::cuda {

template <typename T>
__device__ __forceinline__ T from_float(float value);
template <>
__device__ __forceinline__ float from_float(float value) {
  return value;
}
template <>
__device__ __forceinline__ __nv_bfloat16 from_float(float value) {
  return __float2bfloat16_rn(value);
}
template <>
__device__ __forceinline__ __half from_float(float value) {
  return __float2half_rn(value);
}

template <typename T>
struct alignas(2 * sizeof(T)) Pair {
  T x, y;
};

template <typename T>
__device__ __forceinline__ uint32_t packed(float x, float y) {
  const Pair<T> pair{from_float<T>(x), from_float<T>(y)};
  return *reinterpret_cast<const uint32_t*>(&pair);
}

// Adds one group's bias [cols] to a thread's sums; col: the tile's first column.
template <typename T, typename Config>
__device__ __forceinline__ void add_bias(float (&sum)[Config::kTileN / 2], const T* bias, int col,
                                         int cols) {
#pragma unroll
  for (int j = 0; j < Config::kTileN / 8; ++j) {
    const int at = col + 8 * j + 2 * (threadIdx.x % 4);
    if (at >= cols) continue;
    const float x = static_cast<float>(bias[at]), y = static_cast<float>(bias[at + 1]);
    sum[Config::sum_of(4 * j + 0)] += x;
    sum[Config::sum_of(4 * j + 1)] += y;
    sum[Config::sum_of(4 * j + 2)] += x;
    sum[Config::sum_of(4 * j + 3)] += y;
  }
}

// Puts a warp's 16 x kTileN sums, from column `first` on, into its warpgroup's staging buffers
// until they are full: buffer i holds 64 lines of 128 bytes, each swizzled by its number.
template <typename T, typename Config>
__device__ __forceinline__ void stage_tile(const float (&sum)[Config::kTileN / 2],
                                           uint8_t (&to)[Config::kTileN / 64][kStoreBytes],
                                           int first) {
  constexpr int line_cols = kLineBytes / sizeof(T), buffers = Config::kTileN / 64;
  const int lane = threadIdx.x % 32, quad = lane % 4, first_row = threadIdx.x / 32 % 4 * 16;
#pragma unroll
  for (int i = 0; i < buffers; ++i) {
#pragma unroll
    for (int j = 0; j < line_cols / 8; j += 2) {
      const auto at = [&](int k) {
        return sum[Config::sum_of(4 * (first / 8 + i * line_cols / 8 + j) + k)];
      };
      if constexpr (sizeof(T) == 2) {
        const int row = first_row + lane % 16, chunk = (j + lane / 16) ^ (row % 8);
        sm90::store_matrix(&to[i][row * kLineBytes + chunk * 16], packed<T>(at(0), at(1)),
                           packed<T>(at(2), at(3)), packed<T>(at(4), at(5)),
                           packed<T>(at(6), at(7)));
      } else {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const int row = first_row + lane / 4 + 8 * h;
          const int chunk = 2 * j + quad / 2;
          uint8_t* line = &to[i][row * kLineBytes + quad % 2 * 8];
          // One at a time: as vectors they would tie the sums to registers, see sum_of.
          volatile float* first_pair = reinterpret_cast<float*>(line + (chunk ^ (row % 8)) * 16);
          volatile float* second_pair =
              reinterpret_cast<float*>(line + ((chunk + 2) ^ (row % 8)) * 16);
          first_pair[0] = at(2 * h);
          first_pair[1] = at(2 * h + 1);
          second_pair[0] = at(2 * h + 4);
          second_pair[1] = at(2 * h + 5);
        }
      }
    }
  }
}

// Whether out is written, not added to.
__device__ __forceinline__ bool is_overwritten(const Epilogue& epilogue) {
  return !epilogue.accumulate || (epilogue.overwrite != nullptr && *epilogue.overwrite);
}

// Whether the copy engine stores a tile: it cannot reach what is not aligned, and it adds to 16 bits
// with two roundings.
__device__ __forceinline__ bool is_sent(const Epilogue& epilogue, bool overwrite) {
  return epilogue.copied && (overwrite || epilogue.dtype == Output::kFloat);
}

// The turns that every tile takes: in each, all warps that multiply fill the staging buffers, and one
// warp sends what they put there. Turns of tiles that are not sent are empty.
//
// A warp that sent its own part would wait for the engine: 1100 to 1400 cycles a tile of 128 x 256 in
// 16 bits and 250 to 450 one of 128 x 192 in FP8, during which nothing is multiplied (H200, 2026-11).
__device__ __forceinline__ int turns_of_tile(const Epilogue& epilogue) {
  return epilogue.dtype == Output::kFloat ? 2 : 1;
}

// The parity of turn `turn` of a block's tile `number`.
__device__ __forceinline__ uint32_t turn_parity(const Epilogue& epilogue, int number, int turn) {
  return (number * turns_of_tile(epilogue) + turn) & 1;
}

// Sends every tile of this block, in the order in which they are staged. By one thread.
template <typename Config>
__device__ void send(GemmShared<Config>& shared, const CUtensorMap& map, const Epilogue& epilogue,
                     const GemmShape& shape) {
  constexpr int buffers = Config::kTileN / 64;
  const bool overwrite = is_overwritten(epilogue), sends = is_sent(epilogue, overwrite);
  const int line_cols = kLineBytes / (epilogue.dtype == Output::kFloat ? 4 : 2);
  for (int number = 0;; ++number) {
    for (int turn = 0; turn < turns_of_tile(epilogue); ++turn) {
      sm90::barrier_wait(&shared.staged, turn_parity(epilogue, number, turn));
      const Tile& tile = shared.tiles[number % kTileRing];
      if (tile.steps < 0) return;
      // All groups' matrices are one below the other.
      const int before = Config::kByDepth ? tile.group * shape.rows : 0;
      const bool adds_nothing = (tile.steps == 0 && !overwrite) || tile.leaves() > 0;
      for (int part = 0; sends && !adds_nothing && part < kTileM / kStoreRows; ++part) {
        const int row = tile.row + part * kStoreRows;
        if (row >= tile.row_limit) break;
        const RaggedRows rows(before + row, before + tile.row_limit);
#pragma unroll
        for (int i = 0; i < buffers; ++i) {
          const int col = tile.col + (turn * buffers + i) * line_cols;
          if (col >= shape.cols) continue;
          if (overwrite)
            sm90::store_4d(&map, shared.store[part][i], col, rows.c1, rows.c2, rows.kOrigin);
          else
            sm90::add_4d(&map, shared.store[part][i], col, rows.c1, rows.c2, rows.kOrigin);
        }
      }
      sm90::store_commit();
      sm90::store_wait<0>();
      sm90::barrier_arrive(&shared.sent);
    }
  }
}

// The same from registers, for an out that the copy engine cannot reach, or cannot add to with one
// rounding.
template <typename T, typename Config>
__device__ __forceinline__ void write_tile(const float (&sum)[Config::kTileN / 2], T* out,
                                           const Tile& tile, int first_row, int row_limit, int cols,
                                           bool add) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int row = first_row + lane / 4 + 8 * h;
    if (row >= row_limit) continue;
    T* line = out + static_cast<int64_t>(row) * cols;
#pragma unroll
    for (int j = 0; j < Config::kTileN / 8; ++j) {
      const int col = tile.col + 8 * j + 2 * (lane % 4);
      if (col >= cols) continue;
      float x = sum[Config::sum_of(4 * j + 2 * h)], y = sum[Config::sum_of(4 * j + 2 * h + 1)];
      if (add) {
        x += static_cast<float>(line[col]);
        y += static_cast<float>(line[col + 1]);
      }
      line[col] = from_float<T>(x);
      line[col + 1] = from_float<T>(y);
    }
  }
}

// One warp's 16 x kTileN sums to out. take_turn(i, stage) calls stage in the tile's turn i.
template <typename T, typename Config, typename TakeTurn>
__device__ __forceinline__ void store_tile(float (&sum)[Config::kTileN / 2],
                                           uint8_t (&staging)[Config::kTileN / 64][kStoreBytes],
                                           const Epilogue& epilogue, const GemmShape& shape,
                                           const Tile& tile, int row, bool overwrite,
                                           const TakeTurn& take_turn) {
  if (!Config::kByDepth && epilogue.bias != nullptr)
    add_bias<T, Config>(sum,
                        static_cast<const T*>(epilogue.bias) + tile.group * epilogue.bias_stride,
                        tile.col, shape.cols);
  const bool sent = is_sent(epilogue, overwrite);
  if (!sent) {
    const int before = Config::kByDepth ? tile.group * shape.rows : 0;
    write_tile<T, Config>(sum, static_cast<T*>(epilogue.out), tile, before + row,
                          before + tile.row_limit, shape.cols, !overwrite);
  }
  constexpr int turns = sizeof(T) == 4 ? 2 : 1;
#pragma unroll
  for (int turn = 0; turn < turns; ++turn)
    take_turn(turn, [&] {
      if (!sent) return;
      stage_tile<T, Config>(sum, staging, turn * (Config::kTileN / turns));
      sm90::fence_shared_for_async();
    });
}

}  // namespace grouped_linear::cuda
