// SPDX-License-Identifier: Apache-2.0
// M-grouped GEMMs in BF16, and in FP8 with scales of blocks, whose groups have few rows, as in
// generation: out[t, n] = sum_k a[t, k] * b[e, n, k].
//
// The bytes of b bound it, so b streams through every block once: a tile is 64 columns of out, which
// are 64 rows of b over all of K, and up to 32 rows of a group. b is wgmma's first operand, rows of a
// lie along its N. A stage has a line of 128 bytes of each. TMA loads b; a's rows, which may be
// gathered, come by cp.async: a box of TMA for each row took 75 cycles a row of one warp.
//
//   role      warps   waits for       signals
//   math      0 to 3  full[stage]     empty[stage]
//   weight    4       empty[stage]    full[stage]
//   rows      5       empty[stage]    full[stage], each lane
//
// Floor: the bytes of b of groups with rows at the speed of memory, 15 to 19 bytes a cycle of each
// multiprocessor. Eight stages of a block are 8.4 MB on their way in all, and 16 took as long. Two
// blocks share a multiprocessor, so that one waits while the other multiplies: with 16 rows a group
// they take 0.83 and 0.76 of one block's time in BF16 and FP8, with 1 to 5 rows 0.90 to 1.00. Reached
// (H200, 2026-11): 4.0 TB/s with 64 tokens of Qwen3-30B, of the 4.2 that a copy reaches.
// docs/notes/small_problems.md
//
// Bits are those of kernel.cuh: the same products in the same order, wgmma by wgmma, and in FP8 the
// same promotion. Which operand is wgmma's first does not matter (swapped.cuh).
#pragma once

#include "cuda/common/pdl.cuh"
#include "cuda/common/row_numbers.cuh"
#include "cuda/gemm/epilogue_math.cuh"
#include "cuda/gemm/sm90/codegen.cuh"
#include "cuda/gemm/sm90/params.cuh"
#include "cuda/gemm/sm90/smem_layout.cuh"
#include "cuda/gemm/sm90/wgmma.cuh"
#include "cuda/swiglu/swiglu.cuh"

namespace grouped_linear::cuda::sm90::few_rows {

constexpr int kTileRows = 32, kTileCols = kWgmmaM;
constexpr int kStages = 8;
constexpr int kBlocks = 2;  // of a multiprocessor
constexpr int kMathWarps = 4, kThreads = 32 * (kMathWarps + 2);

struct SharedStorage {
  alignas(1024) uint8_t b[kStages][kTileCols * kSwizzleBytes];
  alignas(1024) uint8_t a[kStages][kTileRows * kSwizzleBytes];
  float row_scales[kStages][kTileRows];  // FP8: of a's rows, and of the tile's columns of b
  float block_scale[kStages];
  uint64_t full[kStages], empty[kStages];
  GroupTable groups;
};

static_assert(kBlocks * (sizeof(SharedStorage) + 1024) <= 228 * 1024,
              "blocks find room on a multiprocessor");

struct Operands {
  // 64 columns of out and a line of 128 bytes. Gated: 8 columns of gate, the same of up, and so on.
  CUtensorMap b;
  const void* a;
  int64_t a_stride;  // elements between rows
  RowNumbers rows;   // of a
  const float* scale_a;
  int64_t scale_a_stride;  // between blocks of K
  Scale128x128View scale_b;
};

// The sums are stored as they are, or SwiGLU of them.
struct Linear {};
template <typename Form>
struct Gated {
  void* h;  // [T, F]
  bool keep_gate_up;
  Form form;
};

// A tile's columns are numbered by columns of h where it is gated.
template <typename Work>
constexpr int kWorkCols = std::is_same_v<Work, Linear> ? kTileCols : kTileCols / 2;

struct Tile {
  int group, row, rows, col;
};

// Tiles of a group are numbered by columns, and by rows among those of equal columns, so that b's
// bytes are in L2 for the next rows.
template <int cols>
__device__ __forceinline__ Tile tile_of(int number, const GroupTable& groups, int E) {
  Tile tile;
  tile.group = groups.group_of_tile(number, E);
  const int begin = groups.row_begin(tile.group), end = groups.row_end[tile.group];
  const int row_tiles = (end - begin + kTileRows - 1) / kTileRows;
  int of_group = number - groups.tile_begin(tile.group);
  tile.row = begin, tile.col = of_group * cols;
  if (row_tiles > 1) {
    tile.row += of_group % row_tiles * kTileRows;
    tile.col = of_group / row_tiles * cols;
  }
  tile.rows = min(end - tile.row, kTileRows);
  return tile;
}

// By one warp: the weight.
template <typename T, typename Work>
__device__ __forceinline__ void load_weight(SharedStorage& shared, const Operands& in,
                                            const GemmShape& shape) {
  constexpr int kTileK = kSwizzleBytes / sizeof(T);
  const int tiles = shared.groups.tile_end[shape.E - 1];
  PipelineState<kStages> state;
#pragma unroll 1
  for (int number = blockIdx.x; number < tiles; number += gridDim.x) {
    const Tile tile = tile_of<kWorkCols<Work>>(number, shared.groups, shape.E);
#pragma unroll 1
    for (int k = 0; k < shape.K; k += kTileK, state.advance()) {
      uint64_t* full = &shared.full[state.stage];
      mbarrier_wait(&shared.empty[state.stage], state.phase ^ 1);
      mbarrier_arrive_expect_tx(full, sizeof(shared.b[0]));
      if constexpr (std::is_same_v<Work, Linear>)
        tma_load_3d(shared.b[state.stage], &in.b, full, 0, k, tile.col, tile.group);
      else
        tma_load_5d(shared.b[state.stage], &in.b, full, k, 0, 0, tile.col / 8, tile.group);
    }
  }
}

// By one warp: rows of a, 16 bytes a lane, and scales. Lanes 8 i to 8 i + 7 have every fourth row.
template <typename T, typename Work>
__device__ __forceinline__ void load_rows(SharedStorage& shared, const Operands& in,
                                          const GemmShape& shape) {
  constexpr int kTileK = kSwizzleBytes / sizeof(T), kRowsAtOnce = 4;
  constexpr bool fp8 = sizeof(T) == 1;
  const int lane = threadIdx.x % 32, piece = lane % 8, first = lane / 8;
  const int tiles = shared.groups.tile_end[shape.E - 1];
  PipelineState<kStages> state;
#pragma unroll 1
  for (int number = blockIdx.x; number < tiles; number += gridDim.x) {
    const Tile tile = tile_of<kWorkCols<Work>>(number, shared.groups, shape.E);
    const T* from[kTileRows / kRowsAtOnce];
#pragma unroll
    for (int i = 0; i < kTileRows / kRowsAtOnce; ++i) {
      const int row = min(kRowsAtOnce * i + first, tile.rows - 1);
      from[i] = static_cast<const T*>(in.a) + in.rows.row(tile.row + row) * in.a_stride;
    }
    const float* row_scales = in.scale_a;
    if (fp8) row_scales += in.rows.row(tile.row + min(lane, tile.rows - 1));
    const float* block_scales = in.scale_b.scale + tile.group * in.scale_b.group_stride +
                                tile.col / kScaleBlock * in.scale_b.row_stride;
#pragma unroll 1
    for (int k = 0; k < shape.K; k += kTileK, state.advance()) {
      const int stage = state.stage, at = k + piece * (kTileK / 8);
      const uint32_t to = smem_address(shared.a[stage]);
      mbarrier_wait(&shared.empty[stage], state.phase ^ 1);
#pragma unroll
      for (int i = 0; i < kTileRows / kRowsAtOnce; ++i) {
        const int row = kRowsAtOnce * i + first;
        if (kRowsAtOnce * i >= tile.rows) break;
        if (row < tile.rows)
          cp_async_16<true>(to + row * kSwizzleBytes + (piece ^ row % 8) * 16,
                            from[i] + (at < shape.K ? at : 0), at < shape.K);
      }
      if constexpr (fp8) {
        if (lane < tile.rows)
          cp_async_4(smem_address(&shared.row_scales[stage][lane]),
                     row_scales + k / kScaleBlock * in.scale_a_stride);
        if (lane == 0)
          cp_async_4(smem_address(&shared.block_scale[stage]),
                     block_scales + k / kScaleBlock * in.scale_b.k_stride);
      }
      cp_async_arrive(&shared.full[stage]);
    }
  }
}

// A math thread's sums of a tile: d[4 j + 2 h + i] is of column 16 warp + lane / 4 + 8 h and of row
// 8 j + 2 (lane % 4) + i.
template <typename T, int rows>
__device__ __forceinline__ void multiply(SharedStorage& shared, PipelineState<kStages>& state,
                                         uint32_t first_b, uint32_t first_a, int K,
                                         float (&sums)[rows / 2]) {
  constexpr int kTileK = kSwizzleBytes / sizeof(T), kWgmmaK = 32 / sizeof(T);
  constexpr bool fp8 = sizeof(T) == 1;
  const int lane = threadIdx.x % 32;
  const auto issue = [&](int stage, float (&d)[rows / 2], bool add) {
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < kTileK / kWgmmaK; ++step) {
      const uint64_t b =
          smem_descriptor(first_b + stage * sizeof(shared.b[0]) / 16 + 2 * step, 8 * kSwizzleBytes);
      const uint64_t a =
          smem_descriptor(first_a + stage * sizeof(shared.a[0]) / 16 + 2 * step, 8 * kSwizzleBytes);
      wgmma<T, T, rows, Major::kK, Major::kK>(d, b, a, add || step > 0);
    }
    wgmma_commit();
  };
  const auto release = [&](int stage) {
    __syncwarp();
    if (lane < kArrivingLanes) mbarrier_arrive(&shared.empty[stage]);
  };
  clear_accumulator(sums);
  if constexpr (fp8) {
    float partial[rows / 2];
#pragma unroll 1
    for (int k = 0; k < K; k += kTileK, state.advance()) {
      const int stage = state.stage;
      mbarrier_wait(&shared.full[stage], state.phase);
      fence_proxy_async();  // rows of a are ordinary writes
      fence_operand(partial);
      issue(stage, partial, false);
      const float block = shared.block_scale[stage];
      float scales[rows / 4];
#pragma unroll
      for (int i = 0; i < rows / 4; ++i)
        scales[i] =
            __fmul_rn(shared.row_scales[stage][8 * (i / 2) + 2 * (lane % 4) + i % 2], block);
      fence_operand(scales);
      wgmma_wait<0>();
      fence_operand(partial);
      release(stage);
#pragma unroll
      for (int i = 0; i < rows / 2; ++i)
        sums[i] = __fmaf_rn(scales[i / 4 * 2 + i % 2], partial[i], sums[i]);
    }
  } else {
    int previous = -1;
#pragma unroll 1
    for (int k = 0; k < K; k += kTileK, state.advance()) {
      mbarrier_wait(&shared.full[state.stage], state.phase);
      fence_proxy_async();  // rows of a are ordinary writes
      fence_operand(sums);
      issue(state.stage, sums, true);
      wgmma_wait<1>();
      if (previous >= 0) release(previous);
      previous = state.stage;
    }
    wgmma_wait<0>();
    fence_operand(sums);
    release(previous);
  }
}

// Calls visit(row, d) for the thread's rows of the tile: d[0] and d[1] are of a column and of the one
// eight further on.
template <int rows, typename Visit>
__device__ __forceinline__ void each_row(const float (&sums)[rows / 2], const Tile& tile,
                                         const Visit& visit) {
#pragma unroll
  for (int i = 0; i < rows / 4; ++i) {
    const int row = 8 * (i / 2) + 2 * (threadIdx.x % 4) + i % 2, at = i / 2 * 4 + i % 2;
    const float d[2] = {sums[at], sums[at + 2]};
    if (row < tile.rows) visit(int64_t{tile.row + row}, d);
  }
}

template <typename Out, int rows>
__device__ __forceinline__ void store(const float (&sums)[rows / 2],
                                      const EpilogueArguments& epilogue, const GemmShape& shape,
                                      const Tile& tile) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int col = tile.col + 16 * warp + lane / 4;
  if (col >= shape.cols) return;  // columns come in sixteens
  float bias[2] = {0, 0};
  if (epilogue.bias != nullptr) {
    const Out* from = static_cast<const Out*>(epilogue.bias) + tile.group * epilogue.bias_stride;
    bias[0] = static_cast<float>(from[col]), bias[1] = static_cast<float>(from[col + 8]);
  }
  each_row<rows>(sums, tile, [&](int64_t row, const float (&d)[2]) {
    Out* to = static_cast<Out*>(epilogue.out) + row * shape.cols + col;
#pragma unroll
    for (int h = 0; h < 2; ++h)
      to[8 * h] = from_float<Out>(epilogue.bias != nullptr ? d[h] + bias[h] : d[h]);
  });
}

template <typename T, int rows>
__device__ __forceinline__ void finish(const float (&sums)[rows / 2], const Linear&,
                                       const EpilogueArguments& epilogue, const GemmShape& shape,
                                       const Tile& tile) {
  with_output_type(epilogue.type,
                   [&]<typename Out>() { store<Out, rows>(sums, epilogue, shape, tile); });
}

template <typename T, int rows, typename Form>
__device__ __forceinline__ void finish(const float (&sums)[rows / 2], const Gated<Form>& gated,
                                       const EpilogueArguments& epilogue, const GemmShape& shape,
                                       const Tile& tile) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, F = shape.cols / 2;
  const int col = tile.col + 8 * warp + lane / 4;
  float bias[2] = {0, 0};
  if (epilogue.bias != nullptr) {
    const T* from = static_cast<const T*>(epilogue.bias) + tile.group * epilogue.bias_stride;
    bias[0] = static_cast<float>(from[col]), bias[1] = static_cast<float>(from[F + col]);
  }
  const Approximate<Form> form(gated.form);
  each_row<rows>(sums, tile, [&](int64_t row, const float (&d)[2]) {
    const bool has_bias = epilogue.bias != nullptr;
    const T gate = from_float<T>(has_bias ? d[0] + bias[0] : d[0]);
    const T up = from_float<T>(has_bias ? d[1] + bias[1] : d[1]);
    if (gated.keep_gate_up) {
      T* to = static_cast<T*>(epilogue.out) + row * shape.cols + col;
      to[0] = gate, to[F] = up;
    }
    static_cast<T*>(gated.h)[row * F + col] =
        from_float<T>(swiglu_of(form, static_cast<float>(gate), static_cast<float>(up)));
  });
}

template <typename T, typename Work>
__device__ __forceinline__ void compute_tiles(SharedStorage& shared, const Work& work,
                                              const EpilogueArguments& epilogue,
                                              const GemmShape& shape) {
  const uint32_t first_b = __shfl_sync(kFullWarp, smem_descriptor_low(shared.b[0], 16), 0);
  const uint32_t first_a = __shfl_sync(kFullWarp, smem_descriptor_low(shared.a[0], 16), 0);
  const int tiles = shared.groups.tile_end[shape.E - 1];
  PipelineState<kStages> state;
#pragma unroll 1
  for (int number = blockIdx.x; number < tiles; number += gridDim.x) {
    const Tile tile = tile_of<kWorkCols<Work>>(number, shared.groups, shape.E);
    const auto with = [&]<int rows>() {
      float sums[rows / 2];
      multiply<T, rows>(shared, state, first_b, first_a, shape.K, sums);
      finish<T, rows>(sums, work, epilogue, shape, tile);
    };
    if (tile.rows <= 16)
      with.template operator()<16>();
    else
      with.template operator()<32>();
  }
}

// Zeros past the last group: of what is written, and of nothing else.
__device__ __forceinline__ void zero_tail(const Linear&, const EpilogueArguments& epilogue,
                                          const GroupTable& groups, const GemmShape& shape) {
  zero_tail_rows(epilogue, groups, shape);
}
template <typename Form>
__device__ __forceinline__ void zero_tail(const Gated<Form>& gated,
                                          const EpilogueArguments& epilogue,
                                          const GroupTable& groups, const GemmShape& shape) {
  EpilogueArguments of_h = epilogue;
  of_h.out = gated.h, of_h.aligned = true;
  GemmShape shape_of_h = shape;
  shape_of_h.cols /= 2;
  zero_tail_rows(of_h, groups, shape_of_h);
  if (gated.keep_gate_up) zero_tail_rows(epilogue, groups, shape);
}

template <typename T, typename Work>
__global__ void __launch_bounds__(kThreads, kBlocks)
    few_rows_kernel(const __grid_constant__ Operands in, const int32_t* offs,
                    const __grid_constant__ Work work,
                    const __grid_constant__ EpilogueArguments epilogue,
                    const __grid_constant__ GemmShape shape) {
  extern __shared__ __align__(1024) uint8_t raw[];
  auto& shared = *reinterpret_cast<SharedStorage*>(raw);
  if (threadIdx.x == 0) {
    prefetch_tensor_map(&in.b);
    for (int stage = 0; stage < kStages; ++stage) {
      mbarrier_init(&shared.full[stage], 33);
      mbarrier_init(&shared.empty[stage], kMathWarps * kArrivingLanes);
    }
    fence_mbarrier_init();
  }
  grid_dependency_wait();
  const int col_tiles = (shape.cols + kTileCols - 1) / kTileCols;
  load_groups<kThreads>(shared.groups, offs, shape.E, shape.T, [col_tiles](int rows) {
    return (rows + kTileRows - 1) / kTileRows * col_tiles;
  });
  zero_tail(work, epilogue, shared.groups, shape);
  const int warp = threadIdx.x / 32;
  if (warp == kMathWarps) {
    if (elect_one()) load_weight<T, Work>(shared, in, shape);
  } else if (warp == kMathWarps + 1) {
    load_rows<T, Work>(shared, in, shape);
  } else {
    compute_tiles<T>(shared, work, epilogue, shape);
  }
}

}  // namespace grouped_linear::cuda::sm90::few_rows
