// Grouped matrix products on Hopper's tensor cores, BF16, FP16 and block-scaled FP8.
//
//   by rows (fprop, dgrad):  out[t, n]    = sum_k a[t, k] * b[e, n, k]   for the rows t of group e
//   by depth (wgrad):        out[e, n, k] = sum_t a[t, n] * b[t, k]      over the rows t of group e
//
// Arithmetic: 2 T N K operations either way. On an H200 (132 SMs; dense cuBLAS reaches about 700
// TFLOP/s in bf16 and 1300 in FP8) the shapes that train are bound by it. wgrad writes E N K
// outputs, which bounds it where groups have less than about 500 rows.
//
// Reaches (H200, 2026-11, bench_grouped_mm, geometric means over the training shapes, uneven
// splits): 0.83, 0.85, 0.76 of one dense product for fprop, dgrad, wgrad in bf16; 0.68, 0.70, 0.45
// in FP8. DESIGN.md tells where the rest goes.
//
// One persistent block an SM walks over output tiles of 128 x kTileN. Warpgroup 0 copies operand
// stages with TMA into a ring in shared memory, warpgroups 1 and 2 multiply 64 rows each with wgmma
// and store. Sizes are read on the device: nothing here depends on T, E or the splits but loop
// bounds.
//
// Group borders fall anywhere. Loads may run past a group's end, into the next group's rows: such
// rows only reach outputs that are not stored (by rows), are zero in the padded layout (by depth,
// FP8), or are zeroed in shared memory before they are multiplied (by depth, 16-bit: 0 * NaN would
// be NaN).
#pragma once

#include "groups.cuh"
#include "sm90.cuh"

namespace grouped_linear::cuda {

constexpr int kTileM = 128;
constexpr int kLineBytes = 128;  // one line of the 128-byte swizzle
constexpr int kMathWarps = 8;
constexpr int kThreads = 128 + 32 * kMathWarps;
constexpr int kStoreCols = 64;  // columns that a warp stages at a time to store whole lines
constexpr int kStorePitch = kStoreCols + 4;
constexpr int kScaleRows = kTileM + 4;  // of a tile that starts anywhere, from an aligned row on
constexpr int kBandTiles = 16;          // row tiles that share an operand while it is in L2

enum class Output : int { kBFloat16, kHalf, kFloat };

// How a tile's values reach `out`.
struct Epilogue {
  void* out;
  Output dtype;
  bool vectorised;        // out is aligned to 16 bytes
  const void* bias;       // [E, cols] of out's dtype, or null (by rows)
  int64_t bias_stride;    // elements between groups
  bool accumulate;        // add to out (by depth)
  const bool* overwrite;  // with accumulate: where it points to true, write instead
};

struct GemmShape {
  int T, E;
  int rows, cols;  // of an output matrix: (T, N) by rows, (N, K) by depth
  int depth;       // K, by rows
};

// The 128 x 128 scales of b by rows, by their strides.
struct WeightScale {
  const float* scale;
  int64_t group_stride, row_stride, depth_stride;
};

// kCluster: blocks that share a's tile and have neighbouring columns.
template <typename T_, int kTileN_, int kStages_, int kCluster_, bool kByDepth_, int kAMajor_,
          int kBMajor_>
struct GemmConfig {
  using T = T_;
  static constexpr int kTileN = kTileN_, kStages = kStages_, kCluster = kCluster_;
  // Rows of a's tile that each block copies, to all.
  static constexpr int kShareM = kTileM / kCluster;
  static constexpr bool kByDepth = kByDepth_, kScaled = sizeof(T) == 1;
  static constexpr int kAMajor = kAMajor_, kBMajor = kBMajor_;
  static constexpr int kTileK = kLineBytes / sizeof(T);  // 64 in BF16, 128 in FP8
  static constexpr int kMmaK = 32 / sizeof(T);
  static constexpr int kABytes = kTileM * kLineBytes, kBBytes = kTileN * kLineBytes;
};

template <typename Config>
struct GemmShared {
  struct Stage {
    alignas(1024) uint8_t a[Config::kABytes];
    alignas(1024) uint8_t b[Config::kBBytes];
  };
  struct Scales {
    alignas(128) float a[Config::kByDepth ? kTileM : kScaleRows];
    // By rows: the weight's scales of the tile's first and last columns, see produce_weight_scales.
    alignas(128) float b[Config::kByDepth ? Config::kTileN : 2];
  };
  struct NoScales {};

  Stage stages[Config::kStages];
  std::conditional_t<Config::kScaled, Scales, NoScales> scales[Config::kStages];
  alignas(16) float store[kMathWarps][16][kStorePitch];
  uint64_t full[Config::kStages], empty[Config::kStages];
  GroupTable groups;
};

// One output tile, and the steps along its depth.
struct Tile {
  int group;               // E for the rows past the last group, which are zero
  int row, row_limit;      // first row in out, and the first row that is not to be stored
  int col;                 // first column
  int depth_begin, steps;  // by depth: the group's first row (16-bit) or block (FP8)
  int depth_rows;          // by depth: how many rows the group has
};

// Turns the number of a cluster's tile into this block's part of it. Row tiles run fastest, in
// bands of kBandTiles, so that blocks that run together share both operands in L2.
template <typename Config>
__device__ Tile tile_of(int number, const GroupTable& groups, const GemmShape& shape) {
  constexpr int cluster_cols = Config::kTileN * Config::kCluster;
  const int col_tiles = (shape.cols + cluster_cols - 1) / cluster_cols;
  Tile tile;
  int row_tiles, local;
  if constexpr (Config::kByDepth) {
    row_tiles = (shape.rows + kTileM - 1) / kTileM;
    tile.group = number / (row_tiles * col_tiles);
    local = number % (row_tiles * col_tiles);
    tile.depth_rows = groups.row_end[tile.group] - groups.row_begin(tile.group);
    const int first_block = groups.tile_begin(tile.group);
    const int last_block = min(groups.tile_end[tile.group], shape.T / kTileM);
    tile.depth_begin = Config::kScaled ? first_block : groups.row_begin(tile.group);
    tile.steps = Config::kScaled ? max(last_block - first_block, 0)
                                 : (tile.depth_rows + Config::kTileK - 1) / Config::kTileK;
  } else {
    const int row_tile = number / col_tiles;
    const bool tail = row_tile >= groups.tile_end[shape.E - 1];
    tile.group = tail ? shape.E : groups.group_of_tile(row_tile, shape.E);
    const int first = groups.tile_begin(tile.group);
    const int rows_begin = groups.row_begin(tile.group);
    tile.row_limit = tail ? shape.T : groups.row_end[tile.group];
    row_tiles =
        tail ? (shape.T - rows_begin + kTileM - 1) / kTileM : groups.tile_end[tile.group] - first;
    local = number - first * col_tiles;
    tile.row = rows_begin;
    tile.steps = tail ? 0 : (shape.depth + Config::kTileK - 1) / Config::kTileK;
  }
  const int band = local / (kBandTiles * col_tiles), in_band = local % (kBandTiles * col_tiles);
  const int band_rows = min(kBandTiles, row_tiles - band * kBandTiles);
  const int row_tile = band * kBandTiles + in_band % band_rows;
  tile.col = in_band / band_rows * cluster_cols + sm90::cluster_rank() * Config::kTileN;
  if constexpr (Config::kByDepth) {
    tile.row = row_tile * kTileM;
    tile.row_limit = shape.rows;
  } else {
    tile.row += row_tile * kTileM;
  }
  return tile;
}

// A tile covers up to 128 x 512 outputs of a tensor that fits in memory: an int counts them.
template <typename Config>
__device__ int tile_count(const GroupTable& groups, const GemmShape& shape) {
  constexpr int cluster_cols = Config::kTileN * Config::kCluster;
  const int col_tiles = (shape.cols + cluster_cols - 1) / cluster_cols;
  if constexpr (Config::kByDepth) return col_tiles * ((shape.rows + kTileM - 1) / kTileM) * shape.E;
  const int tail_rows = shape.T - groups.row_end[shape.E - 1];
  return col_tiles * (groups.tile_end[shape.E - 1] + (tail_rows + kTileM - 1) / kTileM);
}

// Where in the ring of stages a warpgroup is.
template <int stages>
struct RingPosition {
  int stage = 0;
  uint32_t parity = 0;
  __device__ void advance() {
    if (++stage == stages) {
      stage = 0;
      parity ^= 1;
    }
  }
};

// Copies every step of every tile of this block into the ring.
template <typename Config>
__device__ void produce(GemmShared<Config>& shared, const CUtensorMap& map_a,
                        const CUtensorMap& map_b, const CUtensorMap& map_scale_a,
                        const CUtensorMap& map_scale_b, const GemmShape& shape) {
  constexpr int scale_bytes =
      !Config::kScaled ? 0 : 4 * (Config::kByDepth ? kTileM + Config::kTileN : kScaleRows);
  constexpr int share = Config::kShareM;
  constexpr uint16_t all = (1 << Config::kCluster) - 1;
  const int rank = static_cast<int>(sm90::cluster_rank());
  RingPosition<Config::kStages> ring;
  const int tiles = tile_count<Config>(shared.groups, shape);
  for (int number = blockIdx.x / Config::kCluster; number < tiles;
       number += gridDim.x / Config::kCluster) {
    const Tile tile = tile_of<Config>(number, shared.groups, shape);
    for (int step = 0; step < tile.steps; ++step, ring.advance()) {
      auto& stage = shared.stages[ring.stage];
      uint8_t* a_share = stage.a + rank * share * kLineBytes;
      uint64_t* full = &shared.full[ring.stage];
      sm90::barrier_wait(&shared.empty[ring.stage], ring.parity ^ 1);
      sm90::barrier_arrive_expect(full, Config::kABytes + Config::kBBytes + scale_bytes);
      if constexpr (Config::kScaled && Config::kByDepth) {
        auto& scales = shared.scales[ring.stage];
        const int block = tile.depth_begin + step;
        sm90::load_3d_multicast(a_share, &map_a, full, 0, tile.row + rank * share, block, all);
        sm90::load_3d(stage.b, &map_b, full, 0, tile.col, block);
        sm90::load_2d(scales.a, &map_scale_a, full, tile.row, block);
        sm90::load_2d(scales.b, &map_scale_b, full, tile.col, block);
      } else if constexpr (Config::kByDepth) {
        const int row = tile.depth_begin + step * Config::kTileK;
#pragma unroll
        for (int c = 0; c < share; c += Config::kTileK)
          sm90::load_2d_multicast(a_share + c * kLineBytes, &map_a, full,
                                  tile.row + rank * share + c, row, all);
#pragma unroll
        for (int c = 0; c < Config::kTileN / Config::kTileK; ++c)
          sm90::load_2d(stage.b + c * Config::kTileK * kLineBytes, &map_b, full,
                        tile.col + c * Config::kTileK, row);
      } else {
        const int k = step * Config::kTileK;
        sm90::load_2d_multicast(a_share, &map_a, full, k, tile.row + rank * share, all);
        if constexpr (Config::kBMajor == 0) {
          sm90::load_3d(stage.b, &map_b, full, k, tile.col, tile.group);
        } else {
#pragma unroll
          for (int c = 0; c < Config::kTileN / Config::kTileK; ++c)
            sm90::load_3d(stage.b + c * Config::kTileK * kLineBytes, &map_b, full,
                          tile.col + c * Config::kTileK, k, tile.group);
        }
        // The innermost coordinate of a copy must be a multiple of 16 bytes (H200, 2026-11: an
        // "illegal instruction" otherwise), and a group may start at any row.
        if constexpr (Config::kScaled)
          sm90::load_2d(shared.scales[ring.stage].a, &map_scale_a, full, tile.row & ~3, step);
      }
    }
  }
}

// Puts the weight's scales of every step beside the step's operands. A tile of 192 columns meets
// two blocks of 128: one with its first 64 columns, the other with its last 64, and either with
// those between. A warp reads 32 steps at once: however the scales lie, their latency is paid while
// the ring is full.
template <typename Config>
__device__ void produce_weight_scales(GemmShared<Config>& shared, const WeightScale& scale,
                                      const GemmShape& shape) {
  const int lane = threadIdx.x % 32;
  RingPosition<Config::kStages> ring;
  const int tiles = tile_count<Config>(shared.groups, shape);
  for (int number = blockIdx.x / Config::kCluster; number < tiles;
       number += gridDim.x / Config::kCluster) {
    const Tile tile = tile_of<Config>(number, shared.groups, shape);
    if (tile.steps == 0) continue;
    const int first = min(tile.col, shape.cols - 1) / kTileM;
    const int last = min(tile.col + kTileM, shape.cols - 1) / kTileM;
    const float* group = scale.scale + tile.group * scale.group_stride;
    for (int begin = 0; begin < tile.steps; begin += 32) {
      const int64_t step = min(begin + lane, tile.steps - 1) * scale.depth_stride;
      const float of_first = group[first * scale.row_stride + step];
      const float of_last = group[last * scale.row_stride + step];
      for (int i = 0; i < min(32, tile.steps - begin); ++i, ring.advance()) {
        const float2 scales =
            make_float2(__shfl_sync(0xffffffff, of_first, i), __shfl_sync(0xffffffff, of_last, i));
        sm90::barrier_wait(&shared.empty[ring.stage], ring.parity ^ 1);
        if (lane == 0) {
          *reinterpret_cast<float2*>(shared.scales[ring.stage].b) = scales;
          sm90::barrier_arrive(&shared.full[ring.stage]);
        }
      }
    }
  }
}

// The operands of one warpgroup. Descriptors count addresses in units of 16 bytes, so those of a
// stage and of a step along K are the first ones plus constants.
template <typename Config>
class WarpgroupOperands {
 public:
  __device__ WarpgroupOperands(const GemmShared<Config>& shared, int math_group) {
    constexpr uint32_t lines = 8 * kLineBytes;
    const uint8_t* a =
        shared.stages[0].a + math_group * (Config::kAMajor == 0 ? 64 * kLineBytes : kColumn);
    a_ = sm90::operand(a, Config::kAMajor == 0 ? 16 : kColumn, lines);
    b_ = sm90::operand(shared.stages[0].b, Config::kBMajor == 0 ? 16 : kColumn, lines);
    // The same for all lanes, which the compiler cannot see: it keeps them in uniform registers
    // then.
    a_ = __shfl_sync(0xffffffff, a_, 0);
    b_ = __shfl_sync(0xffffffff, b_, 0);
  }

  // acc = (add ? acc : 0) + a @ b.T over kTileK.
  __device__ __forceinline__ void multiply(int stage, float (&acc)[Config::kTileN / 2],
                                           bool add) const {
    const uint64_t at =
        stage * static_cast<uint32_t>(sizeof(typename GemmShared<Config>::Stage) / 16);
#pragma unroll
    for (int k = 0; k < Config::kTileK; k += Config::kMmaK) {
      constexpr int k_major = sizeof(typename Config::T), mn_major = kLineBytes;
      const uint64_t a = a_ + at + k * (Config::kAMajor == 0 ? k_major : mn_major) / 16;
      const uint64_t b = b_ + at + k * (Config::kBMajor == 0 ? k_major : mn_major) / 16;
      sm90::wgmma<typename Config::T, Config::kTileN, Config::kAMajor, Config::kBMajor>(
          acc, a, b, add || k > 0);
    }
  }

 private:
  static constexpr int kColumn = Config::kTileK * kLineBytes;  // a 64-element column, M/N-major
  uint64_t a_, b_;
};

// Zeroes the rows from `valid` on of a stage whose lines are rows (by depth, 16-bit), so that
// neither the next group's rows nor NaN past the end are multiplied. Called by both math
// warpgroups.
template <typename Config>
__device__ void zero_stage_rows(typename GemmShared<Config>::Stage& stage, int valid) {
  constexpr int columns = (kTileM + Config::kTileN) / 64, chunks = kLineBytes / 16;
  const int count = columns * (Config::kTileK - valid) * chunks;
  for (int i = threadIdx.x - 128; i < count; i += 32 * kMathWarps) {
    const int column = i / ((Config::kTileK - valid) * chunks);
    const int line = column * Config::kTileK + valid + i / chunks % (Config::kTileK - valid);
    // a and b lie one after the other
    reinterpret_cast<uint4*>(stage.a + line * kLineBytes)[i % chunks] = make_uint4(0, 0, 0, 0);
  }
  sm90::fence_shared_for_async();
  sm90::named_barrier(1, 32 * kMathWarps);
}

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

// Stores count values; a whole 16 bytes at once where out is aligned.
template <typename T>
__device__ __forceinline__ void store_values(const float4* values, T* out, const T* bias, bool add,
                                             bool vectorised) {
  constexpr int count = 16 / sizeof(T);
  alignas(16) T packed[count];
  float4 unpacked[count / 4];
#pragma unroll
  for (int i = 0; i < count / 4; ++i) unpacked[i] = values[i];
  if (add) {
    if (vectorised)
      *reinterpret_cast<uint4*>(packed) = *reinterpret_cast<const uint4*>(out);
    else
#pragma unroll
      for (int i = 0; i < count; ++i) packed[i] = out[i];
  }
#pragma unroll
  for (int i = 0; i < count; ++i) {
    float value = reinterpret_cast<const float*>(unpacked)[i];
    if (bias != nullptr) value += static_cast<float>(bias[i]);
    if (add) value += static_cast<float>(packed[i]);
    packed[i] = from_float<T>(value);
  }
  if (vectorised)
    *reinterpret_cast<uint4*>(out) = *reinterpret_cast<const uint4*>(packed);
  else
#pragma unroll
    for (int i = 0; i < count; ++i) out[i] = packed[i];
}

// One warp's 16 x kTileN accumulators to out: through shared memory, kStoreCols columns at a time,
// so that each row is written in whole 32-byte sectors.
template <typename T, int kTileN>
__device__ void store_tile(const float (&acc)[kTileN / 2], float (&staging)[16][kStorePitch],
                           const Epilogue& epilogue, const GemmShape& shape, const Tile& tile,
                           int first_row, bool add) {
  constexpr int piece = 16 / sizeof(T), pieces = kStoreCols / piece;
  const int lane = threadIdx.x % 32;
  T* out = static_cast<T*>(epilogue.out);
  const T* bias = static_cast<const T*>(epilogue.bias);
#pragma unroll
  for (int c = 0; c < kTileN / kStoreCols; ++c) {
    __syncwarp();
#pragma unroll
    for (int j = 0; j < kStoreCols / 8; ++j) {
      const float* d = &acc[4 * (c * kStoreCols / 8 + j)];
      const int col = 8 * j + 2 * (lane % 4);
      *reinterpret_cast<float2*>(&staging[lane / 4][col]) = make_float2(d[0], d[1]);
      *reinterpret_cast<float2*>(&staging[lane / 4 + 8][col]) = make_float2(d[2], d[3]);
    }
    __syncwarp();
#pragma unroll
    for (int i = lane; i < 16 * pieces; i += 32) {
      const int row = first_row + i / pieces;
      const int col = tile.col + c * kStoreCols + i % pieces * piece;
      if (row >= tile.row_limit || col >= shape.cols) continue;
      store_values<T>(reinterpret_cast<float4*>(&staging[i / pieces][i % pieces * piece]),
                      out + static_cast<int64_t>(row) * shape.cols + col,
                      bias == nullptr ? nullptr : bias + col, add, epilogue.vectorised);
    }
  }
}

// Multiplies every tile of this block, 64 rows a warpgroup.
template <typename Config>
__device__ void consume(GemmShared<Config>& shared, const Epilogue& epilogue,
                        const GemmShape& shape) {
  const int math_group = threadIdx.x / 128 - 1, warp = threadIdx.x / 32 - 4,
            lane = threadIdx.x % 32;
  const auto release = [&](int stage) {
    __syncwarp();  // the whole warp has read the stage's scales
    if (lane < Config::kCluster) sm90::barrier_arrive_at(&shared.empty[stage], lane);
  };
  const bool overwrite =
      !epilogue.accumulate || (epilogue.overwrite != nullptr && *epilogue.overwrite);
  constexpr int count = Config::kTileN / 2;
  const WarpgroupOperands<Config> operands(shared, math_group);
  RingPosition<Config::kStages> ring;
  const int tiles = tile_count<Config>(shared.groups, shape);
  for (int number = blockIdx.x / Config::kCluster; number < tiles;
       number += gridDim.x / Config::kCluster) {
    const Tile tile = tile_of<Config>(number, shared.groups, shape);
    float sum[count];
#pragma unroll
    for (int i = 0; i < count; ++i) sum[i] = 0;

    if constexpr (Config::kScaled) {
      // Promotion: every 128 of the depth is summed by the tensor cores on its own, scaled, and
      // added in float32. The tensor cores keep about 14 bits of a sum in FP8; float32 keeps 24.
      const int row =
          warp % 4 * 16 + lane / 4 + math_group * 64 + (Config::kByDepth ? 0 : tile.row % 4);
      for (int step = 0; step < tile.steps; ++step, ring.advance()) {
        float acc[count];
        sm90::barrier_wait(&shared.full[ring.stage], ring.parity);
        sm90::pin(acc);
        sm90::wgmma_fence();
        operands.multiply(ring.stage, acc, false);
        sm90::wgmma_commit();
        const auto& scales = shared.scales[ring.stage];
        const float scale_0 = scales.a[row], scale_1 = scales.a[row + 8];
        float2 weight{};
        if constexpr (!Config::kByDepth) weight = *reinterpret_cast<const float2*>(scales.b);
        sm90::wgmma_wait<0>();
        sm90::pin(acc);
        if constexpr (Config::kByDepth) {
#pragma unroll
          for (int j = 0; j < Config::kTileN / 8; ++j) {
            const float2 scale =
                *reinterpret_cast<const float2*>(&scales.b[8 * j + 2 * (lane % 4)]);
            sum[4 * j + 0] += scale_0 * scale.x * acc[4 * j + 0];
            sum[4 * j + 1] += scale_0 * scale.y * acc[4 * j + 1];
            sum[4 * j + 2] += scale_1 * scale.x * acc[4 * j + 2];
            sum[4 * j + 3] += scale_1 * scale.y * acc[4 * j + 3];
          }
          release(ring.stage);
        } else {
          const float middle = tile.col % kTileM == 0 ? weight.x : weight.y;
          release(ring.stage);
#pragma unroll
          for (int j = 0; j < Config::kTileN / 8; ++j) {
            const float column_scale = j < 8 ? weight.x : j < 16 ? middle : weight.y;
            const float s0 = scale_0 * column_scale, s1 = scale_1 * column_scale;
            sum[4 * j + 0] += s0 * acc[4 * j + 0];
            sum[4 * j + 1] += s0 * acc[4 * j + 1];
            sum[4 * j + 2] += s1 * acc[4 * j + 2];
            sum[4 * j + 3] += s1 * acc[4 * j + 3];
          }
        }
      }
    } else {
      // One stage's products stay in flight while the next is issued; a stage is given back when
      // the products of the one after it have been issued and its own are done.
      int previous = -1;
      for (int step = 0; step < tile.steps; ++step, ring.advance()) {
        sm90::barrier_wait(&shared.full[ring.stage], ring.parity);
        if constexpr (Config::kByDepth) {
          const int valid = tile.depth_rows - step * Config::kTileK;
          if (valid < Config::kTileK) zero_stage_rows<Config>(shared.stages[ring.stage], valid);
        }
        sm90::pin(sum);
        sm90::wgmma_fence();
        operands.multiply(ring.stage, sum, true);
        sm90::wgmma_commit();
        sm90::wgmma_wait<1>();
        if (previous >= 0) release(previous);
        previous = ring.stage;
      }
      sm90::wgmma_wait<0>();
      sm90::pin(sum);
      if (previous >= 0) release(previous);
    }

    const int first_row = tile.row + math_group * 64 + warp % 4 * 16;
    if (!overwrite && tile.steps == 0) continue;  // an empty group adds nothing
    Epilogue mine = epilogue;
    const int item = epilogue.dtype == Output::kFloat ? 4 : 2;
    if constexpr (Config::kByDepth)
      mine.out = static_cast<char*>(epilogue.out) +
                 static_cast<int64_t>(tile.group) * shape.rows * shape.cols * item;
    if (mine.bias != nullptr)
      mine.bias = tile.group == shape.E ? nullptr
                                        : static_cast<const char*>(epilogue.bias) +
                                              tile.group * epilogue.bias_stride * item;
    auto& staging = shared.store[warp];
    switch (epilogue.dtype) {
      case Output::kBFloat16:
        store_tile<__nv_bfloat16, Config::kTileN>(sum, staging, mine, shape, tile, first_row,
                                                  !overwrite);
        break;
      case Output::kHalf:
        store_tile<__half, Config::kTileN>(sum, staging, mine, shape, tile, first_row, !overwrite);
        break;
      case Output::kFloat:
        store_tile<float, Config::kTileN>(sum, staging, mine, shape, tile, first_row, !overwrite);
        break;
    }
  }
}

template <typename Config>
__global__ void __launch_bounds__(kThreads, 1) __cluster_dims__(Config::kCluster)
    grouped_gemm_kernel(const __grid_constant__ CUtensorMap map_a,
                        const __grid_constant__ CUtensorMap map_b,
                        const __grid_constant__ CUtensorMap map_scale_a,
                        const __grid_constant__ CUtensorMap map_scale_b,
                        const int32_t* __restrict__ offs, const WeightScale weight_scale,
                        const Epilogue epilogue, const GemmShape shape) {
  extern __shared__ __align__(1024) uint8_t raw[];
  auto& shared = *reinterpret_cast<GemmShared<Config>*>(raw);
  if (threadIdx.x == 0) {
    sm90::prefetch_tensor_map(&map_a);
    sm90::prefetch_tensor_map(&map_b);
    for (int s = 0; s < Config::kStages; ++s) {
      sm90::barrier_init(&shared.full[s], Config::kScaled && !Config::kByDepth ? 2 : 1);
      sm90::barrier_init(&shared.empty[s], kMathWarps * Config::kCluster);
    }
    sm90::fence_barrier_init();
  }
  load_groups<kThreads>(shared.groups, offs, shape.E, shape.T, kTileM);
  // No block copies into another, or arrives there, before its barriers stand.
  sm90::cluster_sync();

  if (threadIdx.x < 128) {
    sm90::give_registers<40>();
    if (threadIdx.x == 0) produce<Config>(shared, map_a, map_b, map_scale_a, map_scale_b, shape);
    if constexpr (Config::kScaled && !Config::kByDepth)
      if (threadIdx.x / 32 == 1) produce_weight_scales<Config>(shared, weight_scale, shape);
  } else {
    sm90::take_registers<232>();
    consume<Config>(shared, epilogue, shape);
  }
  __syncwarp();
  sm90::cluster_sync();  // nor leaves while another may still arrive at its barriers
}

}  // namespace grouped_linear::cuda
