// Grouped matrix products on Hopper's tensor cores, BF16, FP16 and block-scaled FP8.
//
//   by rows (fprop, dgrad):  out[t, n]    = sum_k a[t, k] * b[e, n, k]   for the rows t of group e
//   by depth (wgrad):        out[e, n, k] = sum_t a[t, n] * b[t, k]      over the rows t of group e
//
// Arithmetic: 2 T N K operations either way. On an H200 (132 SMs; dense cuBLAS reaches about 700
// TFLOP/s in bf16 and 1300 to 1500 in FP8) the shapes that train are bound by it. wgrad writes E N K
// outputs, which bounds it where groups have less than about 500 rows.
//
// Floor: for 128 of the depth, a 128 x 192 tile of FP8 takes 768 cycles of the tensor cores. Shared
// memory moves 128 bytes a cycle: 512 cycles of operands read by wgmma and 320 of them written by
// TMA make 832, and by depth the scales of the columns, 48 a thread, add 384. 16-bit tiles: 1024
// cycles of tensor cores, 1024 of shared memory.
//
// Reaches (H200, 2026-11): FP8 by rows 880 cycles; by depth about 1300.
// benchmarks/results/bench_grouped_mm_nvidia_h200.md has the shares of a dense product.
//
// One persistent block an SM, in clusters of two, walks over output tiles of 128 x kTileN.
// Warpgroup 0 copies operand stages with TMA into a ring in shared memory; warpgroups 1 and 2
// multiply 64 rows each with wgmma and store. Sizes are read on the device: nothing
// here depends on T, E or the splits but loop bounds.
//
// The two tiles of a cluster are neighbours. As long as a group has a pair of row tiles, they lie
// one below the other and share b's tile, else beside one another and share a's. Each block copies
// one half of what is shared to both.
//
// Group borders fall anywhere. Loads by rows may run past a group's end, into the next group's
// rows: they only reach outputs that are not stored. Loads by depth find zeros there, in the padded
// layout (FP8) or because the tensor map ends there (16-bit, see RaggedRows). Stores end with the
// group by the same kind of map.
#pragma once

#include "groups.cuh"
#include "sm90.cuh"

namespace grouped_linear::cuda {

constexpr int kTileM = 128;
constexpr int kLineBytes = 128;  // one line of the 128-byte swizzle
constexpr int kMathWarps = 8;
constexpr int kThreads = 128 + 32 * kMathWarps;
constexpr int kCluster = 2;
constexpr int kScaleRows = kTileM + 4;  // of a tile that starts anywhere, from an aligned row on
constexpr int kBandPairs = 8;   // pairs of row tiles that share an operand while it is in L2
constexpr int kStoreRows = 16;  // a warp's part of an output tile
constexpr int kZeroBytes = 4096;
constexpr int kTileRing =
    8;  // more tiles than there are stages: one is stored, the rest are under way

enum class Output : int { kBFloat16, kHalf, kFloat };

// How a tile's values reach `out`.
struct Epilogue {
  void* out;
  Output dtype;
  bool copied;                     // by the copy engine: out is aligned to 16 bytes
  const void* bias;                // [E, cols] of out's dtype, or null (by rows)
  int64_t bias_stride;             // elements between groups
  const float *scale_a, *scale_b;  // [E], of groups, where FP8 operands have such
  bool accumulate;                 // add to out (by depth)
  const bool* overwrite;           // with accumulate: where it points to true, write instead
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

struct TensorMaps {
  CUtensorMap a, b, scale_a, scale_b, out;
};

// Coordinates in a tensor map of rows that ends where it is told to, for groups that end anywhere.
//
// The map's dimensions are columns, rows (2^30 of them), rows again, and one whose stride is 2^34
// bytes less a row's. The coordinate 2^30 of the last moves an address by 2^64, which is nothing,
// and 2^30 rows back. Row r of those before `limit` is then at (2^30 - (limit - r), limit, 2^30):
// from `limit` on rows lie outside of the map, are not stored, and are loaded as zeros. Triton
// arranges its "ragged" tensor maps like this.
struct RaggedRows {
  static constexpr int kOrigin = 1 << 30;
  int c1, c2;
  __device__ RaggedRows(int row, int limit) : c1(kOrigin - (limit - row)), c2(limit) {}
};

// Where FP8 operands have their scales.
enum class Scaling { kNone, kBlocks, kGroups };

template <typename A_, typename B_, int kTileN_, int kStages_, Scaling kScaling, bool kByDepth_,
          int kAMajor_ = 0, int kBMajor_ = 0>
struct GemmConfig {
  using A = A_;
  using B = B_;
  static constexpr int kTileN = kTileN_, kStages = kStages_;
  static constexpr bool kByDepth = kByDepth_, kFp8 = sizeof(A) == 1;
  static constexpr bool kBlocks = kScaling == Scaling::kBlocks;
  static constexpr bool kGroups = kScaling == Scaling::kGroups;
  static constexpr int kAMajor = kAMajor_, kBMajor = kBMajor_;
  static constexpr int kTileK = kLineBytes / sizeof(A);  // 64 in BF16, 128 in FP8
  static constexpr int kMmaK = 32 / sizeof(A);
  static constexpr int kABytes = kTileM * kLineBytes, kBBytes = kTileN * kLineBytes;
};

// One output tile of this block, and the steps along its depth.
struct alignas(16) Tile {
  int group;
  int row, row_limit;           // first row in the output matrix, and the first not to be stored
  int col;                      // first column; past the last in a block that has nothing to do
  int steps;                    // -1: there are no more tiles
  int depth_begin, depth_rows;  // by depth: the group's first row (16-bit) or block (FP8), its rows
  int shares_b;                 // with the other block of the cluster, else a
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
  alignas(1024) uint8_t store[kMathWarps][Config::kTileN / 64][kStoreRows * kLineBytes];
  std::conditional_t<Config::kBlocks, Scales, NoScales> scales[Config::kStages];
  Tile tiles[kTileRing];
  uint64_t full[Config::kStages], empty[Config::kStages];
  GroupTable groups;  // tile_end counts clusters by rows, blocks of 128 rows by depth
  alignas(128) uint8_t zeros[Config::kByDepth ? 16 : kZeroBytes];
};

__device__ __forceinline__ int row_tiles(int rows) { return (rows + kTileM - 1) / kTileM; }

template <typename Config>
__device__ __forceinline__ int col_tiles(const GemmShape& shape) {
  return (shape.cols + Config::kTileN - 1) / Config::kTileN;
}

// How many clusters a matrix of rows x cols tiles takes: pairs of rows, then pairs of columns.
__device__ __forceinline__ int cluster_tiles(int rows, int cols) {
  return rows / 2 * cols + rows % 2 * ((cols + 1) / 2);
}

template <typename Config>
__device__ int cluster_count(const GroupTable& groups, const GemmShape& shape) {
  if constexpr (Config::kByDepth)
    return shape.E * cluster_tiles(row_tiles(shape.rows), col_tiles<Config>(shape));
  return groups.tile_end[shape.E - 1];
}

// This block's tile of the cluster's next two. Row tiles run fastest, in bands, so that blocks that
// run together share both operands in L2.
template <typename Config>
__device__ Tile tile_of(int number, const GroupTable& groups, const GemmShape& shape) {
  const int rank = static_cast<int>(sm90::cluster_rank()), cols = col_tiles<Config>(shape);
  Tile tile{};
  int rows, local;
  if constexpr (Config::kByDepth) {
    rows = row_tiles(shape.rows);
    tile.group = number / cluster_tiles(rows, cols);
    local = number % cluster_tiles(rows, cols);
    tile.row_limit = shape.rows;
    tile.depth_rows = groups.row_end[tile.group] - groups.row_begin(tile.group);
    const int first_block = groups.tile_begin(tile.group);
    const int last_block = min(groups.tile_end[tile.group], shape.T / kTileM);
    tile.depth_begin = Config::kFp8 ? first_block : groups.row_begin(tile.group);
    tile.steps = Config::kFp8 ? max(last_block - first_block, 0)
                              : (tile.depth_rows + Config::kTileK - 1) / Config::kTileK;
  } else {
    tile.group = groups.group_of_tile(number, shape.E);
    local = number - groups.tile_begin(tile.group);
    tile.row = groups.row_begin(tile.group);
    tile.row_limit = groups.row_end[tile.group];
    rows = row_tiles(tile.row_limit - tile.row);
    tile.steps = (shape.depth + Config::kTileK - 1) / Config::kTileK;
  }
  const int pairs = rows / 2;
  tile.shares_b = local < pairs * cols;
  if (tile.shares_b) {
    const int band = local / (kBandPairs * cols), in_band = local % (kBandPairs * cols);
    const int band_pairs = min(kBandPairs, pairs - band * kBandPairs);
    tile.row += (2 * (band * kBandPairs + in_band % band_pairs) + rank) * kTileM;
    tile.col = in_band / band_pairs * Config::kTileN;
  } else {
    tile.row += (rows - 1) * kTileM;
    tile.col = (2 * (local - pairs * cols) + rank) * Config::kTileN;
  }
  return tile;
}

// Where in the ring of stages a warp is.
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

// Copies one half of a's tile, 64 rows of it, into a stage; mask: of the cluster's blocks, see sm90.
template <typename Config>
__device__ __forceinline__ void load_a(GemmShared<Config>& shared, const TensorMaps& maps,
                                       const Tile& tile, int stage, int step, int half,
                                       uint16_t mask) {
  uint8_t* to = shared.stages[stage].a + half * (Config::kABytes / 2);
  uint64_t* full = &shared.full[stage];
  const int row = tile.row + half * (kTileM / 2);
  if constexpr (Config::kFp8 && Config::kByDepth) {
    sm90::load_3d(to, &maps.a, full, mask, 0, row, tile.depth_begin + step);
  } else if constexpr (Config::kByDepth) {
    const int at = tile.depth_begin + step * Config::kTileK;
    const RaggedRows rows(at, tile.depth_begin + tile.depth_rows);
    sm90::load_4d(to, &maps.a, full, mask, row, rows.c1, rows.c2, rows.kOrigin);
  } else {
    sm90::load_2d(to, &maps.a, full, mask, step * Config::kTileK, row);
  }
}

// The same of b's tile, kTileN / 2 columns of the output.
template <typename Config>
__device__ __forceinline__ void load_b(GemmShared<Config>& shared, const TensorMaps& maps,
                                       const GemmShape& shape, const Tile& tile, int stage,
                                       int step, int half, uint16_t mask) {
  uint8_t* to = shared.stages[stage].b + half * (Config::kBBytes / 2);
  uint64_t* full = &shared.full[stage];
  const int col = tile.col + half * (Config::kTileN / 2);
  if constexpr (Config::kFp8 && Config::kByDepth) {
    sm90::load_3d(to, &maps.b, full, mask, 0, col, tile.depth_begin + step);
  } else if constexpr (Config::kBMajor == 0) {
    sm90::load_3d(to, &maps.b, full, mask, step * Config::kTileK, col, tile.group);
  } else {
    const int at = tile.depth_begin + step * Config::kTileK;
    const RaggedRows rows(at, tile.depth_begin + tile.depth_rows);
#pragma unroll
    for (int c = 0; c < Config::kTileN / 2; c += 64) {
      uint8_t* column = to + c * kLineBytes;
      if constexpr (Config::kByDepth)
        sm90::load_4d(column, &maps.b, full, mask, col + c, rows.c1, rows.c2, rows.kOrigin);
      else
        sm90::load_3d(column, &maps.b, full, mask, col + c, at, tile.group);
    }
  }
}

// Copies every step of every tile of this block into the ring. A tile without steps takes a stage
// too, as does the end.
template <typename Config>
__device__ void produce(GemmShared<Config>& shared, const TensorMaps& maps,
                        const GemmShape& shape) {
  constexpr int scale_bytes =
      !Config::kBlocks ? 0 : 4 * (Config::kByDepth ? kTileM + Config::kTileN : kScaleRows);
  constexpr uint16_t all = (1 << kCluster) - 1;
  const int rank = static_cast<int>(sm90::cluster_rank());
  RingPosition<Config::kStages> ring;
  const int clusters = cluster_count<Config>(shared.groups, shape);
  int count = 0;
  for (int number = blockIdx.x / kCluster; number < clusters;
       number += gridDim.x / kCluster, ++count) {
    const Tile tile = tile_of<Config>(number, shared.groups, shape);
    if (tile.steps == 0) {
      sm90::barrier_wait(&shared.empty[ring.stage], ring.parity ^ 1);
      shared.tiles[count % kTileRing] = tile;
      sm90::barrier_arrive(&shared.full[ring.stage]);
      ring.advance();
    }
#pragma unroll 1
    for (int step = 0; step < tile.steps; ++step, ring.advance()) {
      const int stage = ring.stage;
      uint64_t* full = &shared.full[stage];
      sm90::barrier_wait(&shared.empty[stage], ring.parity ^ 1);
      if (step == 0) shared.tiles[count % kTileRing] = tile;
      sm90::barrier_arrive_expect(full, Config::kABytes + Config::kBBytes + scale_bytes);
      if (tile.shares_b) {
        load_a<Config>(shared, maps, tile, stage, step, 0, 0);
        load_a<Config>(shared, maps, tile, stage, step, 1, 0);
        load_b<Config>(shared, maps, shape, tile, stage, step, rank, all);
      } else {
        load_a<Config>(shared, maps, tile, stage, step, rank, all);
        load_b<Config>(shared, maps, shape, tile, stage, step, 0, 0);
        load_b<Config>(shared, maps, shape, tile, stage, step, 1, 0);
      }
      if constexpr (Config::kBlocks && Config::kByDepth) {
        auto& scales = shared.scales[stage];
        const int block = tile.depth_begin + step;
        sm90::load_2d(scales.a, &maps.scale_a, full, 0, tile.row, block);
        sm90::load_2d(scales.b, &maps.scale_b, full, 0, tile.col, block);
      } else if constexpr (Config::kBlocks) {
        // The innermost coordinate of a copy must be a multiple of 16 bytes (H200, 2026-11: an
        // "illegal instruction" otherwise), and a group may start at any row.
        sm90::load_2d(shared.scales[stage].a, &maps.scale_a, full, 0, tile.row & ~3, step);
      }
    }
  }
  sm90::barrier_wait(&shared.empty[ring.stage], ring.parity ^ 1);
  shared.tiles[count % kTileRing].steps = -1;
  sm90::barrier_arrive(&shared.full[ring.stage]);
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
  const int clusters = cluster_count<Config>(shared.groups, shape);
  for (int number = blockIdx.x / kCluster; number < clusters; number += gridDim.x / kCluster) {
    const Tile tile = tile_of<Config>(number, shared.groups, shape);
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
  sm90::barrier_wait(&shared.empty[ring.stage], ring.parity ^ 1);
  if (lane == 0) sm90::barrier_arrive(&shared.full[ring.stage]);
}

// Zeroes the rows that belong to no group (by rows), a few copies at a time beside the products.
template <typename Config>
__device__ void zero_tail(const GemmShared<Config>& shared, const Epilogue& epilogue,
                          const GemmShape& shape) {
  const int64_t row_bytes = shape.cols * (epilogue.dtype == Output::kFloat ? 4 : 2);
  char* out = static_cast<char*>(epilogue.out);
  const int64_t end = shape.T * row_bytes;
  for (int64_t at = shared.groups.row_end[shape.E - 1] * row_bytes + blockIdx.x * kZeroBytes;
       at < end; at += gridDim.x * int64_t{kZeroBytes}) {
    const int64_t bytes = end - at < kZeroBytes ? end - at : kZeroBytes;
    sm90::store_bytes(out + at, shared.zeros, static_cast<uint32_t>(bytes));
    sm90::store_commit();
    sm90::store_wait<4>();
  }
  sm90::store_wait<0>();
}

// The operands of one warpgroup. Descriptors count addresses in units of 16 bytes, so those of a
// stage and of a step along K are the first ones plus constants, in their lower halves.
template <typename Config>
class WarpgroupOperands {
 public:
  __device__ WarpgroupOperands(const GemmShared<Config>& shared, int math_group)
      : a_(sm90::shared_address(shared.stages[0].a) % kOneBlock / 16 +
           math_group * (Config::kAMajor == 0 ? 64 * kLineBytes : kColumn) / 16),
        b_(sm90::shared_address(shared.stages[0].b) % kOneBlock / 16) {
    // The same for all lanes, which the compiler cannot see: it keeps them in uniform registers
    // then.
    a_ = __shfl_sync(0xffffffff, a_, 0);
    b_ = __shfl_sync(0xffffffff, b_, 0);
  }

  // acc = (add ? acc : 0) + a @ b.T over kTileK.
  __device__ __forceinline__ void multiply(int stage, float (&acc)[Config::kTileN / 2],
                                           bool add) const {
    const uint32_t at =
        stage * static_cast<uint32_t>(sizeof(typename GemmShared<Config>::Stage) / 16);
    sm90::wgmma_fence();
#pragma unroll
    for (int k = 0; k < Config::kTileK; k += Config::kMmaK) {
      constexpr int k_major = sizeof(typename Config::A), mn_major = kLineBytes;
      const uint64_t a =
          sm90::operand(a_ + at + k * (Config::kAMajor == 0 ? k_major : mn_major) / 16,
                        Config::kAMajor == 0 ? 16 : kColumn, 8 * kLineBytes);
      const uint64_t b =
          sm90::operand(b_ + at + k * (Config::kBMajor == 0 ? k_major : mn_major) / 16,
                        Config::kBMajor == 0 ? 16 : kColumn, 8 * kLineBytes);
      sm90::wgmma<typename Config::A, typename Config::B, Config::kTileN, Config::kAMajor,
                  Config::kBMajor>(acc, a, b, add || k > 0);
    }
    sm90::wgmma_commit();
  }

 private:
  static constexpr int kColumn = Config::kTileK * kLineBytes;  // a 64-element column, M/N-major
  static constexpr uint32_t kOneBlock = 1 << 24;  // above are the block's rank in the cluster
  uint32_t a_, b_;
};

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

// Adds to a thread's pairs of accumulators the output's columns of `row`, a row of `bias` [cols].
template <typename T, typename Config>
__device__ __forceinline__ void add_bias(float (&acc)[Config::kTileN / 2], const T* bias, int col,
                                         int cols) {
#pragma unroll
  for (int j = 0; j < Config::kTileN / 8; ++j) {
    const int at = col + 8 * j + 2 * (threadIdx.x % 4);
    if (at >= cols) continue;
    const float x = static_cast<float>(bias[at]), y = static_cast<float>(bias[at + 1]);
    acc[4 * j + 0] += x;
    acc[4 * j + 1] += y;
    acc[4 * j + 2] += x;
    acc[4 * j + 3] += y;
  }
}

// Puts `lines` of a warp's 16 x kTileN accumulators into its staging buffers, from column `first`
// on: buffer i holds 16 lines of 128 bytes, each swizzled by its number.
template <typename T, typename Config>
__device__ __forceinline__ void stage_tile(const float (&acc)[Config::kTileN / 2],
                                           uint8_t (&to)[Config::kTileN / 64][2048], int first) {
  constexpr int line_cols = kLineBytes / sizeof(T), buffers = Config::kTileN / 64;
  const int lane = threadIdx.x % 32, quad = lane % 4;
#pragma unroll
  for (int i = 0; i < buffers; ++i) {
#pragma unroll
    for (int j = 0; j < line_cols / 8; j += 2) {
      const float* d = &acc[4 * ((first / 8) + i * line_cols / 8 + j)];
      if constexpr (sizeof(T) == 2) {
        const int row = lane % 16, chunk = (j + lane / 16) ^ (row % 8);
        sm90::store_matrix(&to[i][row * kLineBytes + chunk * 16], packed<T>(d[0], d[1]),
                           packed<T>(d[2], d[3]), packed<T>(d[4], d[5]), packed<T>(d[6], d[7]));
      } else {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const int row = lane / 4 + 8 * h;
          const float *p = d + 2 * h, *q = d + 4 + 2 * h;
          const int chunk = 2 * j + quad / 2;
          uint8_t* line = &to[i][row * kLineBytes + quad % 2 * 8];
          volatile float* first_pair = reinterpret_cast<float*>(line + (chunk ^ (row % 8)) * 16);
          volatile float* second_pair =
              reinterpret_cast<float*>(line + ((chunk + 2) ^ (row % 8)) * 16);
          first_pair[0] = p[0];
          first_pair[1] = p[1];
          second_pair[0] = q[0];
          second_pair[1] = q[1];
        }
      }
    }
  }
}

// One warp's 16 x kTileN accumulators to out, by the copy engine; `add`: to what is there.
template <typename T, typename Config>
__device__ __forceinline__ void copy_tile(const float (&acc)[Config::kTileN / 2],
                                          uint8_t (&staging)[Config::kTileN / 64][2048],
                                          const CUtensorMap& map, const Tile& tile, int first_row,
                                          int row_limit, int cols, bool add) {
  constexpr int line_cols = kLineBytes / sizeof(T), round = Config::kTileN / 64 * line_cols;
  const bool chosen = sm90::elect();  // the same one every time: it waits for what it sent
  const RaggedRows rows(first_row, row_limit);
#pragma unroll
  for (int first = 0; first < Config::kTileN; first += round) {
    if (chosen) sm90::store_wait<0>();
    __syncwarp();
    stage_tile<T, Config>(acc, staging, first);
    sm90::fence_shared_for_async();
    __syncwarp();
    if (chosen) {
#pragma unroll
      for (int i = 0; i < Config::kTileN / 64; ++i) {
        const int col = tile.col + first + i * line_cols;
        if (col >= cols) continue;
        if (add)
          sm90::add_4d(&map, staging[i], col, rows.c1, rows.c2, rows.kOrigin);
        else
          sm90::store_4d(&map, staging[i], col, rows.c1, rows.c2, rows.kOrigin);
      }
      sm90::store_commit();
    }
  }
}

// The same from registers, for an out that the copy engine cannot reach, or cannot add to with one
// rounding.
template <typename T, typename Config>
__device__ __forceinline__ void write_tile(const float (&acc)[Config::kTileN / 2], T* out,
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
      float x = acc[4 * j + 2 * h], y = acc[4 * j + 2 * h + 1];
      if (add) {
        x += static_cast<float>(line[col]);
        y += static_cast<float>(line[col + 1]);
      }
      line[col] = from_float<T>(x);
      line[col + 1] = from_float<T>(y);
    }
  }
}

template <typename T, typename Config>
__device__ __forceinline__ void store_tile(float (&acc)[Config::kTileN / 2],
                                           uint8_t (&staging)[Config::kTileN / 64][2048],
                                           const CUtensorMap& map, const Epilogue& epilogue,
                                           const GemmShape& shape, const Tile& tile, int row,
                                           bool overwrite) {
  if (!Config::kByDepth && epilogue.bias != nullptr)
    add_bias<T, Config>(acc,
                        static_cast<const T*>(epilogue.bias) + tile.group * epilogue.bias_stride,
                        tile.col, shape.cols);
  // All groups' matrices are one below the other.
  const int before = Config::kByDepth ? tile.group * shape.rows : 0;
  const int first = before + row, limit = before + tile.row_limit;
  if (epilogue.copied && (overwrite || sizeof(T) == 4))
    copy_tile<T, Config>(acc, staging, map, tile, first, limit, shape.cols, !overwrite);
  else
    write_tile<T, Config>(acc, static_cast<T*>(epilogue.out), tile, first, limit, shape.cols,
                          !overwrite);
}

// A number that the compiler knows where it is passed on.
template <int value>
struct Constant {
  __device__ constexpr operator int() const { return value; }
};

// Multiplies every tile of this block, 64 rows a warpgroup.
template <typename Config>
__device__ void consume(GemmShared<Config>& shared, const TensorMaps& maps,
                        const Epilogue& epilogue, const GemmShape& shape) {
  const int math_group = threadIdx.x / 128 - 1, warp = threadIdx.x / 32 - 4,
            lane = threadIdx.x % 32;
  const auto release = [&](int stage) {
    __syncwarp();  // the whole warp has read the stage's scales
    if (lane < kCluster) sm90::barrier_arrive_at(&shared.empty[stage], lane);
  };
  const bool overwrite =
      !epilogue.accumulate || (epilogue.overwrite != nullptr && *epilogue.overwrite);
  constexpr int count = Config::kTileN / 2;
  const WarpgroupOperands<Config> operands(shared, math_group);
  RingPosition<Config::kStages> ring;
  for (int number = 0;; ++number) {
    const Tile& tile = shared.tiles[number % kTileRing];
    sm90::barrier_wait(&shared.full[ring.stage], ring.parity);
    const int steps = tile.steps;
    if (steps < 0) break;
    if (steps == 0) {
      release(ring.stage);
      ring.advance();
      if (!overwrite) continue;  // an empty group adds nothing
    }
    if (tile.row + math_group * 64 >= tile.row_limit || tile.col >= shape.cols) {
      for (int step = 0; step < steps; ++step, ring.advance()) {
        sm90::barrier_wait(&shared.full[ring.stage], ring.parity);
        release(ring.stage);
      }
      continue;
    }

    float sum[count];
    const auto clear = [&] {
      const float zero = sm90::opaque_zero();
#pragma unroll
      for (int i = 0; i < count; ++i) sum[i] = zero;
    };
    if (steps == 0 || !Config::kBlocks) clear();
    if constexpr (Config::kFp8) {
      // Promotion: every 128 of the depth is summed by the tensor cores on its own, scaled, and
      // added in float32. The tensor cores keep about 14 bits of a sum in FP8; float32 keeps 24.
      //
      // One warpgroup's products run while the other one scales. Whatever the next step needs is
      // made ready while the products run: what a warpgroup does besides counts twice.
      const int scale_row =
          warp % 4 * 16 + lane / 4 + math_group * 64 + (Config::kByDepth ? 0 : tile.row % 4);
      const bool middle_is_first = tile.col % kTileM == 0;
      bool ready = true, fresh = true;
      int left = steps;
      float acc[count];
      const auto step_of = [&](auto stage) {
        if (!ready) sm90::barrier_wait(&shared.full[stage], ring.parity);
        sm90::pin(acc);
        operands.multiply(stage, acc, false);
        if (Config::kBlocks && fresh) clear();  // while the products run
        fresh = false;
        const int next = stage + 1 == Config::kStages ? 0 : stage + 1;
        if (next == 0) ring.parity ^= 1;
        const auto finish = [&] {
          ready = sm90::barrier_test(&shared.full[next], ring.parity);
          sm90::wgmma_wait<0>();
          sm90::pin(acc);
        };
        if constexpr (Config::kGroups) {
          finish();
          release(stage);
#pragma unroll
          for (int i = 0; i < count; ++i) sum[i] += acc[i];
        } else if constexpr (Config::kByDepth) {
          const auto& scales = shared.scales[stage];
          const float scale_0 = scales.a[scale_row], scale_1 = scales.a[scale_row + 8];
          constexpr int pairs = Config::kTileN / 8;
          constexpr int ahead = 8;  // scales on their way; with 5 or 12 registers spill
          float2 scale[pairs];
          const float2* of_columns = reinterpret_cast<const float2*>(scales.b) + lane % 4;
#pragma unroll
          for (int j = 0; j < ahead; ++j) scale[j] = of_columns[4 * j];
          finish();
#pragma unroll
          for (int j = 0; j < pairs; ++j) {
            if (j + ahead < pairs) scale[j + ahead] = of_columns[4 * (j + ahead)];
            sum[4 * j + 0] += scale_0 * (scale[j].x * acc[4 * j + 0]);
            sum[4 * j + 1] += scale_0 * (scale[j].y * acc[4 * j + 1]);
            sum[4 * j + 2] += scale_1 * (scale[j].x * acc[4 * j + 2]);
            sum[4 * j + 3] += scale_1 * (scale[j].y * acc[4 * j + 3]);
          }
          release(stage);
        } else {
          const auto& scales = shared.scales[stage];
          const float scale_0 = scales.a[scale_row], scale_1 = scales.a[scale_row + 8];
          const float2 weight = *reinterpret_cast<const float2*>(scales.b);
          const float middle = middle_is_first ? weight.x : weight.y;
          finish();
          release(stage);
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
        ring.stage = next;
      };
      // Whole rounds of the ring have their stages' addresses in the instructions: what else there
      // is to compute for a step costs time that the tensor cores do not get back.
#pragma unroll 1
      while (left > 0) {
        if (ring.stage == 0 && left >= Config::kStages) {
          do {
            step_of(Constant<0>());
            step_of(Constant<1>());
            step_of(Constant<2>());
            step_of(Constant<3>());
            left -= Config::kStages;
          } while (!Config::kByDepth && left >= Config::kStages);
        } else {
          step_of(ring.stage);
          --left;
        }
      }
    } else {
      // One stage's products stay in flight while the next is issued; a stage is given back when
      // the products of the one after it have been issued and its own are done.
      int previous = -1;
      bool ready = true;
#pragma unroll 1
      for (int step = 0; step < steps; ++step) {
        if (!ready) sm90::barrier_wait(&shared.full[ring.stage], ring.parity);
        sm90::pin(sum);
        operands.multiply(ring.stage, sum, true);
        const int stage = ring.stage;
        ring.advance();
        ready = sm90::barrier_test(&shared.full[ring.stage], ring.parity);
        sm90::wgmma_wait<1>();
        if (previous >= 0) release(previous);
        previous = stage;
      }
      sm90::wgmma_wait<0>();
      sm90::pin(sum);
      if (previous >= 0) release(previous);
    }

    if constexpr (Config::kGroups) {
      const float scale_a = epilogue.scale_a[tile.group], scale_b = epilogue.scale_b[tile.group];
#pragma unroll
      for (int i = 0; i < count; ++i) sum[i] = sum[i] * scale_a * scale_b;
    }
    auto& staging = shared.store[warp];
    const int first_row = tile.row + math_group * 64 + warp % 4 * kStoreRows;
    switch (epilogue.dtype) {
      case Output::kBFloat16:
        store_tile<__nv_bfloat16, Config>(sum, staging, maps.out, epilogue, shape, tile, first_row,
                                          overwrite);
        break;
      case Output::kHalf:
        store_tile<__half, Config>(sum, staging, maps.out, epilogue, shape, tile, first_row,
                                   overwrite);
        break;
      case Output::kFloat:
        store_tile<float, Config>(sum, staging, maps.out, epilogue, shape, tile, first_row,
                                  overwrite);
        break;
    }
  }
  if (sm90::elect()) sm90::store_wait<0>();  // shared memory is read until then
}

template <typename Config>
__global__ void __launch_bounds__(kThreads, 1) __cluster_dims__(kCluster)
    grouped_gemm_kernel(const __grid_constant__ TensorMaps maps, const int32_t* __restrict__ offs,
                        const WeightScale weight_scale, const Epilogue epilogue,
                        const GemmShape shape) {
  extern __shared__ __align__(1024) uint8_t raw[];
  auto& shared = *reinterpret_cast<GemmShared<Config>*>(raw);
  if (threadIdx.x == 0) {
    sm90::prefetch_tensor_map(&maps.a);
    sm90::prefetch_tensor_map(&maps.b);
    for (int s = 0; s < Config::kStages; ++s) {
      sm90::barrier_init(&shared.full[s], Config::kBlocks && !Config::kByDepth ? 2 : 1);
      sm90::barrier_init(&shared.empty[s], kMathWarps * kCluster);
    }
    sm90::fence_barrier_init();
  }
  if constexpr (Config::kByDepth) {
    load_groups<kThreads>(shared.groups, offs, shape.E, shape.T, TilesOf{kTileM});
  } else {
    for (int i = threadIdx.x; i < kZeroBytes / 16; i += kThreads)
      reinterpret_cast<uint4*>(shared.zeros)[i] = make_uint4(0, 0, 0, 0);
    sm90::fence_shared_for_async();
    const int cols = col_tiles<Config>(shape);
    load_groups<kThreads>(shared.groups, offs, shape.E, shape.T,
                          [cols](int rows) { return cluster_tiles(row_tiles(rows), cols); });
  }
  // No block copies into another, or arrives there, before its barriers stand.
  sm90::cluster_sync();

  if (threadIdx.x < 128) {
    sm90::give_registers<40>();
    if (threadIdx.x == 0) produce<Config>(shared, maps, shape);
    if constexpr (Config::kBlocks && !Config::kByDepth)
      if (threadIdx.x / 32 == 1) produce_weight_scales<Config>(shared, weight_scale, shape);
    if constexpr (!Config::kByDepth)
      if (threadIdx.x / 32 == 2 && sm90::elect()) zero_tail<Config>(shared, epilogue, shape);
  } else {
    sm90::take_registers<232>();
    consume<Config>(shared, maps, epilogue, shape);
  }
  __syncwarp();
  sm90::cluster_sync();  // nor leaves while another may still arrive at its barriers
}

}  // namespace grouped_linear::cuda
