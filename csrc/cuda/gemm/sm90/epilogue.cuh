// From accumulators to the output: scaled, biased, rounded, and stored or added.
//
// Bytes: an output is written once; adding reads it too. A warp's 16 rows go through shared memory in
// lines of 128 bytes, which the copy engine stores while the next tile is multiplied. float32 has twice the
// bytes: it goes in two turns, and the second waits until the first was sent.
#pragma once

#include "cuda/gemm/sm90/schedule.cuh"

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

// The staging buffers of a warpgroup, or of a warp: kStagedRows lines of 128 bytes each, swizzled by their
// numbers.
template <typename Config>
using Staging = uint8_t[Config::kTileN / 64][Config::kStagedRows * kLineBytes];

// A warp's first line in one of so many bytes.
template <size_t bytes>
__device__ __forceinline__ int first_line(const uint8_t (&)[bytes]) {
  return bytes < kStoreRows * kLineBytes ? 0 : threadIdx.x / 32 % 4 * 16;
}

// Where a thread has the first of its pairs of float32 in a staging buffer, in the row of its first sums.
// The others are in what follows by xor: 16 bytes times 2, 4 and 6, and 8 lines below.
template <size_t bytes>
__device__ __forceinline__ uint32_t float_pair(const uint8_t (&buffer)[bytes]) {
  const int lane = threadIdx.x % 32, quad = lane % 4;
  const int row = first_line(buffer) + lane / 4;
  return sm90::shared_address(&buffer[row * kLineBytes]) + ((quad / 2) ^ (row % 8)) * 16 +
         quad % 2 * 8;
}

// The same of 16-bit values, for columns 8 j to 8 j + 15 of the buffer, as the matrices that sm90 loads and
// stores.
template <typename Buffer>
__device__ __forceinline__ auto* matrices(Buffer& buffer, int j) {
  const int lane = threadIdx.x % 32, row = first_line(buffer) + lane % 16;
  return &buffer[row * kLineBytes + ((j + lane / 16) ^ (row % 8)) * 16];
}

// Puts a warp's 16 x kTileN sums, from column `first` on, into its staging buffers until they are full.
template <typename T, typename Config>
__device__ __forceinline__ void stage_tile(const float (&sum)[Config::kTileN / 2],
                                           Staging<Config>& to, int first) {
  constexpr int line_cols = kLineBytes / sizeof(T);
#pragma unroll
  for (int i = 0; i < Config::kTileN / 64; ++i) {
    const auto at = [&](int j, int k) {
      return sum[Config::sum_of(4 * ((first + i * line_cols) / 8 + j) + k)];
    };
    if constexpr (sizeof(T) == 2) {
#pragma unroll
      for (int j = 0; j < 8; j += 2)
        sm90::store_matrix(matrices(to[i], j), packed<T>(at(j, 0), at(j, 1)),
                           packed<T>(at(j, 2), at(j, 3)), packed<T>(at(j + 1, 0), at(j + 1, 1)),
                           packed<T>(at(j + 1, 2), at(j + 1, 3)));
    } else {
      // Odd rows store the other half of their line first: so they and even ones meet in no bank.
      const bool odd = threadIdx.x / 4 % 2 != 0;
      const uint32_t first_pair = float_pair(to[i]) ^ (odd ? 64 : 0);
#pragma unroll
      for (int j = 0; j < 2; ++j) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const auto of = [&](bool second, int k) {
            return second ? at(j + 2, 2 * h + k) : at(j, 2 * h + k);
          };
          const uint32_t pair = (first_pair ^ (32 * j)) + h * 8 * kLineBytes;
          sm90::store_float2(pair, of(odd, 0), of(odd, 1));
          sm90::store_float2(pair ^ 64, of(!odd, 0), of(!odd, 1));
        }
      }
    }
  }
}

// Adds what is in the staging buffers to a warp's sums from column `first` on.
template <typename T, typename Config>
__device__ __forceinline__ void add_staged(float (&sum)[Config::kTileN / 2],
                                           const Staging<Config>& from, int first) {
  constexpr int line_cols = kLineBytes / sizeof(T);
#pragma unroll
  for (int i = 0; i < Config::kTileN / 64; ++i) {
    const auto at = [&](int j, int k) -> float& {
      return sum[Config::sum_of(4 * ((first + i * line_cols) / 8 + j) + k)];
    };
    if constexpr (sizeof(T) == 2) {
#pragma unroll
      for (int j = 0; j < 8; j += 2) {
        uint32_t pairs[4];
        sm90::load_matrix(matrices(from[i], j), pairs);
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          const auto& pair = reinterpret_cast<const Pair<T>&>(pairs[k]);
          at(j + k / 2, k % 2 * 2) += static_cast<float>(pair.x);
          at(j + k / 2, k % 2 * 2 + 1) += static_cast<float>(pair.y);
        }
      }
    } else {
      const uint32_t first_pair = float_pair(from[i]);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const float2 pair = sm90::load_float2((first_pair ^ (32 * j)) + h * 8 * kLineBytes);
          at(j, 2 * h) += pair.x;
          at(j, 2 * h + 1) += pair.y;
        }
      }
    }
  }
}

// Columns of out in a line of 128 bytes.
__host__ __device__ __forceinline__ int line_cols_of(const Epilogue& epilogue) {
  return kLineBytes / (epilogue.dtype == Output::kFloat ? 4 : 2);
}

// Whether one copy takes several lines beside one another, of rows whose lines are all whole; else it takes
// one, which ends with the row. See out_map.
template <typename Config>
__host__ __device__ __forceinline__ bool sends_whole_rows(const Epilogue& epilogue, int cols) {
  return Config::kStagedRows < kStoreRows && cols % line_cols_of(epilogue) == 0;
}

// Whether out is written, not added to.
__device__ __forceinline__ bool is_overwritten(const Epilogue& epilogue) {
  return !epilogue.accumulate || (epilogue.overwrite != nullptr && *epilogue.overwrite);
}

// The turns that every tile takes, each warpgroup by itself: in each, its warps fill its staging buffers, and
// another warp sends what they put there. Turns of tiles that are not sent are empty.
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

// Clears what Zeros copies, by depth, where half of its room is in use. By one warp.
__device__ __forceinline__ void clear_zeros(GemmControl& control) {
#pragma unroll 1
  for (int i = threadIdx.x % 32; i < GemmControl::kFewerZeros / 16; i += 32)
    reinterpret_cast<uint4*>(control.zeros)[i] = make_uint4(0, 0, 0, 0);
  sm90::fence_shared_for_async();
  __syncwarp();
}

// Whether a warp has nothing else to do than to copy zeros.
template <typename Config>
constexpr bool kHasIdleWarp = !Config::kBlocks;

// Copies what is to be zero, piece by piece: rows that belong to no group, or by depth matrices of groups
// without rows. By one thread a block: of the idle warp, or of one that sends, while it waits. What it knows
// is in shared memory, where it costs other roles no registers.
template <typename Config>
class Zeros {
 public:
  __device__ Zeros(GemmShared<Config>& shared, const Epilogue& epilogue, const GemmShape& shape)
      : shared_(shared), epilogue_(epilogue), shape_(shape) {}

  __device__ void begin() {
    ZeroingState& state = shared_.zeroing;
    state = {};
    state.at = blockIdx.x * int64_t{kPiece};
    state.left = !Config::kByDepth || (is_overwritten(epilogue_) && shared_.taken_count < shape_.E);
    state.begin = Config::kByDepth ? 0 : shared_.groups.row_end[shape_.E - 1] * row_bytes();
  }

  __device__ bool left() const { return shared_.zeroing.left; }

  __device__ void copy_rest() {
    while (left()) copy();
    sm90::store_wait<0>();
  }

  // Copies some more.
  __device__ void copy() {
    ZeroingState& state = shared_.zeroing;
    const int64_t bytes =
        Config::kByDepth ? shape_.rows * row_bytes() : shape_.T * row_bytes() - state.begin;
    bool skips = state.at >= bytes;
    if constexpr (Config::kByDepth)
      if (state.next_taken < shared_.taken_count &&
          shared_.taken()[state.next_taken] == state.group) {
        ++state.next_taken;
        skips = true;
      }
    if (skips) {
      state.left = Config::kByDepth && ++state.group < shape_.E;
      state.begin += bytes;
      state.at = blockIdx.x * int64_t{kPiece};
      return;
    }
    int64_t at = state.at;
#pragma unroll 1
    for (int i = 0; i < 8 && at < bytes; ++i, at += gridDim.x * int64_t{kPiece})
      sm90::store_bytes(static_cast<char*>(epilogue_.out) + state.begin + at, shared_.zeros,
                        static_cast<uint32_t>(min(bytes - at, int64_t{kPiece})));
    sm90::store_commit();
    sm90::store_wait<1>();
    state.at = at;
  }

 private:
  static constexpr int kPiece = Config::kByDepth ? GemmControl::kFewerZeros : kZeroBytes;
  __device__ int64_t row_bytes() const {
    return shape_.cols * (epilogue_.dtype == Output::kFloat ? 4 : 2);
  }
  GemmShared<Config>& shared_;
  const Epilogue& epilogue_;
  const GemmShape& shape_;
};

// Sends what a warpgroup stages of every tile of this block. By one thread.
//
// What is added to is copied to where results are staged and added there, the first half of float32, while
// products run; the second half is added by L2. L2 alone adds some 300 float32 a nanosecond, and makes copies
// of operands wait (H200, 2026-11).
template <typename Config, bool whole_rows>
__device__ void send(GemmShared<Config>& shared, const CUtensorMap& map, const Epilogue& epilogue,
                     const TileCounts& counts, const GemmShape& shape, int group) {
  constexpr int buffers = Config::kTileN / 64, at_once = whole_rows ? buffers : 1;
  constexpr int parts = kStoreRows / Config::kStagedRows;
  const int turns = turns_of_tile(epilogue);
  const int line_cols = line_cols_of(epilogue);
  const bool adds = Config::kByDepth && !is_overwritten(epilogue);
  uint64_t *staged = &shared.staged[group], *ready = &shared.ready[group];
  Zeros<Config> zeros(shared, epilogue, shape);
  const bool zeroes = !kHasIdleWarp<Config> && group == 0;
  if (zeroes) zeros.begin();
  uint32_t parity = 0;
  const auto wait_for_results = [&] {
    while (zeroes && zeros.left() && !sm90::barrier_test(sm90::shared_address(staged), parity))
      zeros.copy();
    sm90::barrier_wait(staged, parity);
    parity ^= 1;
  };
  Work<Config> ahead(shared, counts, shape);
  for (int number = 0;; ++number) {
    Tile tile;
    if (adds) {
      tile = ahead.next();
    } else {
      sm90::barrier_arrive(ready);
      wait_for_results();
      tile = shared.tiles[number % kTileRing];
    }
    // All groups' matrices are one below the other.
    const int before = Config::kByDepth ? tile.group * shape.rows : 0;
    const int row = tile.row + group * kStoreRows;
    const RaggedRows rows(before + row, before + tile.row_limit);
    const bool nothing = !epilogue.copied || row >= tile.row_limit || tile.leaves() > 0 ||
                         tile.steps < 0 || (tile.steps == 0 && adds);
    const int end = nothing ? 0 : shape.cols;  // of the columns to be sent
    for (int turn = 0; turn < turns; ++turn) {
      const int first = tile.col + turn * buffers * line_cols;
      const int used = min((end - first + line_cols - 1) / line_cols, buffers);
      // Where one copy takes several lines. No division here: copies come close upon one another.
      const int line = whole_rows ? first >> (turns == 1 ? 6 : 5) : 0;
      if (adds && turn == 0) {
        const int lines = whole_rows && used > 0 ? buffers : max(used, 0);
        sm90::barrier_arrive_expect(ready, lines * kStoreRows * kLineBytes);
#pragma unroll 1
        for (int part = 0; part < parts; ++part) {
          const int row = rows.c1 + part * Config::kStagedRows;
#pragma unroll 1
          for (int i = 0; i < used; i += at_once) {
            uint8_t* to = shared.store[group][part][i];
            const int col = first + i * line_cols;
            if constexpr (whole_rows)
              sm90::load_box(to, &map, ready, 0, row, line, rows.c2, rows.kOrigin);
            else
              sm90::load_box(to, &map, ready, col, row, rows.c2, rows.kOrigin);
          }
        }
      } else if (turn > 0) {
        sm90::barrier_arrive(ready);
      }
      if (adds || turn > 0) wait_for_results();
      if (tile.steps < 0) break;
#pragma unroll 1
      for (int part = 0; part < parts; ++part) {
        const int row = rows.c1 + part * Config::kStagedRows;
#pragma unroll
        for (int i = 0; i < buffers; i += at_once) {
          if (i >= used) break;
          const uint8_t* from = shared.store[group][part][i];
          const int col = first + i * line_cols;
          if constexpr (whole_rows) {
            if (adds && turn > 0)
              sm90::add_box(&map, from, 0, row, line, rows.c2, rows.kOrigin);
            else
              sm90::store_box(&map, from, 0, row, line, rows.c2, rows.kOrigin);
          } else if (adds && turn > 0) {
            sm90::add_box(&map, from, col, row, rows.c2, rows.kOrigin);
          } else {
            sm90::store_box(&map, from, col, row, rows.c2, rows.kOrigin);
          }
        }
      }
      sm90::store_commit();
      sm90::store_wait<0>();
    }
    if (tile.steps < 0) break;
  }
  if (zeroes) zeros.copy_rest();
  sm90::store_wait<0>();
}

// Copies a warp's rows of a turn, from column `first` of the tile on, from its staging buffers to out (or back),
// number by number: for an out that the copy engine cannot reach. row: its first one in out.
template <typename T, typename Config, int turn_cols, bool back>
__device__ __forceinline__ void copy_staged(Staging<Config>& staging, T* out, int row,
                                            int row_limit, int first, int cols) {
  constexpr int line_cols = kLineBytes / sizeof(T);
  const int first_row = first_line(staging[0]);
  __syncwarp();
#pragma unroll 1
  for (int i = threadIdx.x % 32; i < 16 * turn_cols; i += 32) {
    const int line = i / turn_cols, col = i % turn_cols, byte = col % line_cols * sizeof(T);
    if (row + line >= row_limit || first + col >= cols) continue;
    T& staged = reinterpret_cast<T&>(
        staging[col / line_cols][(first_row + line) * kLineBytes + (byte ^ (line % 8 * 16))]);
    T& there = out[static_cast<int64_t>(row + line) * cols + first + col];
    if (back)
      staged = there;
    else
      there = staged;
  }
  __syncwarp();
}

// One warp's 16 x kTileN sums to out. take_turn(i, stage) calls stage in the tile's turn i.
template <typename T, typename Config, typename TakeTurn>
__device__ __forceinline__ void store_tile(float (&sum)[Config::kTileN / 2],
                                           Staging<Config>& staging, const Epilogue& epilogue,
                                           const GemmShape& shape, const Tile& tile, int row,
                                           bool overwrite, const TakeTurn& take_turn) {
  if (!Config::kByDepth && epilogue.bias != nullptr)
    add_bias<T, Config>(sum,
                        static_cast<const T*>(epilogue.bias) + tile.group * epilogue.bias_stride,
                        tile.col, shape.cols);
  constexpr int turns = sizeof(T) == 4 ? 2 : 1, turn_cols = Config::kTileN / turns;
  const int before = Config::kByDepth ? tile.group * shape.rows : 0;
#pragma unroll
  for (int turn = 0; turn < turns; ++turn)
    take_turn(turn, [&] {
      const int first = turn * turn_cols;
      const auto copy = [&](auto back) {
        copy_staged<T, Config, turn_cols, back>(staging, static_cast<T*>(epilogue.out),
                                                before + row, before + tile.row_limit,
                                                tile.col + first, shape.cols);
      };
      if (Config::kByDepth && !overwrite) {
        if (!epilogue.copied) copy(std::true_type{});
        if (turn == 0 || !epilogue.copied) add_staged<T, Config>(sum, staging, first);
      }
      stage_tile<T, Config>(sum, staging, first);
      if (epilogue.copied)
        sm90::fence_shared_for_async();
      else
        copy(std::false_type{});
    });
}

}  // namespace grouped_linear::cuda
