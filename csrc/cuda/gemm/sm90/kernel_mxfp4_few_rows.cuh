// SPDX-License-Identifier: Apache-2.0
// The M-grouped GEMM in BF16 of a K-major weight in MXFP4 whose groups have few rows, as in
// generation: out[t, n] = sum_k a[t, k] * w[e, n, k].
//
// The packed bytes of the weight bound it, so every warp streams its own: a tile is 16 columns of
// out, which are 16 rows of the weight over all of K, and up to 16 rows of a group. Codes and scales
// go through a private ring of cp.async as they are stored. The weight is the first operand of
// mma.m16n8k16, a row of a is a column of the second one.
//
// A block's warps have neighbouring tiles of the same rows, a wave of tiles. Those rows of a lie in
// shared memory in the order of mma's registers. Where all of K has room there, they stay for all of
// the block's waves of these rows, and no warp waits for another. Otherwise they are a ring through
// which all warps go together.
//
//   role     warps     waits for                            signals
//   math     0 to 15   its own copies, ordered[slot]        empty[slot], after the last use
//   loader   16        empty[slot]                          loaded[slot]
//   orderer  17        loaded[slot]                         ordered[slot]
//
// Floor: the packed bytes at the speed of memory, 12 bytes a cycle of each SM. A warp decodes 256
// codes with some 30 instructions, a scheduler has 44 cycles for them. Reached: 0.68, 0.65 and 0.71
// of a copy of as many bytes for 1, 8 and 64 tokens. Instructions limit it: a scheduler issues
// 0.6 a cycle (docs/notes/mxfp4.md).
//
// K is summed in one accumulator, 16 numbers at a time, as wgmma does it: a row has the bits that
// kernel_mxfp4.cuh gives it. Inside of the 16 any order will do, for a tensor core aligns all 16
// products to the largest one before it adds them.
#pragma once

#include "cuda/common/groups.cuh"
#include "cuda/common/pdl.cuh"
#include "cuda/common/row_numbers.cuh"
#include "cuda/common/shared_memory.cuh"
#include "cuda/gemm/epilogue_math.cuh"
#include "cuda/gemm/mxfp4_bf16.cuh"
#include "cuda/gemm/sm80/ptx.cuh"
#include "cuda/gemm/sm90/config.h"
#include "cuda/gemm/sm90/ptx.cuh"

namespace grouped_linear::cuda::sm90::mxfp4_few_rows {

constexpr int kMathWarps = 16, kThreads = 32 * (kMathWarps + 2);
constexpr int kTileRows = 16, kTileCols = 16;
constexpr int kPieceRows = 8;    // of a: the columns of one mma
constexpr int kStageBlocks = 8;  // a stage has so many scale blocks along K
constexpr int kStageK = kStageBlocks * static_cast<int>(kMxBlock);
constexpr int kStages = 3;
// A row's scales begin anywhere. Two aligned pieces of 16 bytes hold those of two stages.
constexpr int kScaleBytes = 32, kScaleStages = 2, kScaleSlots = 3;
constexpr int kRowSlots = 24;  // pieces of a, of a stage each: 16 rows of K = 3072

struct SharedStorage {
  GroupTable groups;
  // The loader writes eight lines of a. In mma's order a lane has 16 bytes of each block.
  uint4 rows[kRowSlots][kStageBlocks][32];
  // Piece i of 16 bytes of line j is at i ^ j % 8, so that those of eight lines lie in different
  // banks.
  alignas(128) uint8_t codes[kMathWarps][kStages][kTileCols][kStageK / 2];
  uint8_t scales[kMathWarps][kScaleSlots][kTileCols][kScaleBytes];
  uint64_t loaded[kRowSlots], ordered[kRowSlots], empty[kRowSlots];
};

static_assert(sizeof(SharedStorage) <= kMaxSharedBytes);

struct Operands {
  const uint16_t* a;  // [T, K] bfloat16, or more rows or fewer, of which `rows` are gathered
  int64_t a_stride;
  RowNumbers rows;
  const uint8_t* codes;  // [E, N, K / 2]
  int64_t group_stride, row_stride;
  const uint8_t* scales;  // [E, N, K / 32], dense
  // A second product, a_low [T, r] @ b_low [E, r, N] by its strides; r is 0 if there is none.
  const uint16_t *a_low, *b_low;
  int64_t a_low_stride, b_low_group_stride, b_low_col_stride, b_low_r_stride;
  int r;
};

__device__ __forceinline__ int ceil_div(int a, int b) { return (a + b - 1) / b; }

// A block's tiles, in waves. Tiles of a group are numbered by columns, with more than 16 rows by
// kMathWarps columns at a time, so that the weight's bytes are in L2 for the next 16 rows.
class Waves {
 public:
  __device__ Waves(const GroupTable& groups, const GemmShape& shape)
      : groups_(groups), shape_(shape) {
    const int64_t tiles = groups.tile_end[shape.E - 1];
    first_ = tile_ = static_cast<int>(tiles * blockIdx.x / gridDim.x);
    end_ = static_cast<int>(tiles * (blockIdx.x + 1) / gridDim.x);
    enter_group();
  }

  __device__ bool more() const { return tile_ < end_; }
  __device__ void advance() {
    first = last;
    tile_ += count_;
    if (tile_ < group_end_)
      enter_wave();
    else
      enter_group();
  }
  __device__ bool has_tile(int warp) const { return number(warp) < count_; }
  __device__ int tile_col(int warp) const { return (col_ + number(warp)) * kTileCols; }
  __device__ int row_end() const { return min(row + kTileRows, group_row_end_); }
  __device__ int pieces() const { return row_end() - row > kPieceRows ? 2 : 1; }

  int group, row;
  bool first = true, last;  // of the waves that find the same rows of a in shared memory

 private:
  // Warps take the block's tiles in turn, from group to group.
  __device__ int number(int warp) const {
    const int n = warp - turn_;
    return n < 0 ? n + kMathWarps : n;
  }
  __device__ void enter_group() {
    if (!more()) return;
    group = groups_.group_of_tile(tile_, shape_.E);
    group_end_ = min(end_, groups_.tile_end[group]);
    group_row_end_ = groups_.row_end[group];
    enter_wave();
  }
  __device__ void enter_wave() {
    const int row_begin = groups_.row_begin(group), number = tile_ - groups_.tile_begin(group);
    const int row_tiles = ceil_div(group_row_end_ - row_begin, kTileRows);
    row = row_begin, col_ = number;
    int room = kMathWarps;
    if (row_tiles > 1) {
      const int wave = number / (row_tiles * kMathWarps), rest = number % (row_tiles * kMathWarps);
      const int width = min(kMathWarps, shape_.cols / kTileCols - wave * kMathWarps);
      row += rest / width * kTileRows;
      col_ = wave * kMathWarps + rest % width;
      room = width - rest % width;
    }
    count_ = min(room, group_end_ - tile_);
    turn_ = (tile_ - first_) % kMathWarps;
    last = row_tiles > 1 || tile_ + count_ == group_end_ ||
           ceil_div(shape_.K, kStageK) * pieces() > kRowSlots;
  }

  const GroupTable& groups_;
  const GemmShape& shape_;
  int tile_, first_, end_, group_end_, group_row_end_, col_, count_, turn_;
};

struct RowSlot {
  int slot = 0;
  uint32_t phase = 0;
  __device__ void advance() {
    if (++slot < kRowSlots) return;
    slot = 0;
    phase ^= 1;
  }
};

// By one warp: copies rows of a.
__device__ void load_rows(SharedStorage& shared, const Operands& in, const GemmShape& shape,
                          Waves waves) {
  const int lane = threadIdx.x % 32;
  RowSlot at;
#pragma unroll 1
  for (; waves.more(); waves.advance()) {
    if (!waves.first) continue;
    int64_t own[kTileRows / kPieceRows];  // where this lane's rows of both pieces are
#pragma unroll
    for (int i = 0; i < kTileRows / kPieceRows; ++i) {
      const int row = waves.row + i * kPieceRows + lane % kPieceRows;
      own[i] = row < waves.row_end() ? in.rows.row(row) * in.a_stride : 0;
    }
#pragma unroll 1
    for (int k = 0; k < shape.K; k += kStageK) {
      const uint32_t bytes = 2 * min(shape.K - k, kStageK);
#pragma unroll 1
      for (int row = waves.row; row < waves.row_end(); row += kPieceRows, at.advance()) {
        const int rows = min(waves.row_end() - row, kPieceRows);
        uint64_t* loaded = &shared.loaded[at.slot];
        mbarrier_wait(&shared.empty[at.slot], at.phase ^ 1);
        fence_proxy_async();  // the slot was written by ordinary stores
        if (lane == 0) mbarrier_arrive_expect_tx(loaded, rows * bytes);
        __syncwarp();
        if (lane < rows)
          bulk_load(shared.rows[at.slot][lane], in.a + (row == waves.row ? own[0] : own[1]) + k,
                    bytes, loaded);
      }
    }
  }
}

// By one warp: brings a slot into mma's order. A lane of mma has elements 4 (lane % 4) to 4 (lane %
// 4) + 3 of each 16 along K, those two first that are low nibbles in a weight.
__device__ void order_rows(SharedStorage& shared, const GemmShape& shape, Waves waves) {
  const int lane = threadIdx.x % 32, part = lane % 4;
  RowSlot at;
#pragma unroll 1
  for (; waves.more(); waves.advance()) {
    if (!waves.first) continue;
    const int slots = ceil_div(shape.K, kStageK) * waves.pieces();
#pragma unroll 1
    for (int i = 0; i < slots; ++i, at.advance()) {
      auto& slot = shared.rows[at.slot];
      uint4 x[kStageBlocks];
      mbarrier_wait(&shared.loaded[at.slot], at.phase);
#pragma unroll
      for (int block = 0; block < kStageBlocks; ++block)
        x[block] = slot[lane / 4][4 * block + part];
      __syncwarp();
#pragma unroll
      for (int block = 0; block < kStageBlocks; ++block) {
        // Eight elements: of half a step of 16 along K, for two lanes.
        uint2* to = reinterpret_cast<uint2*>(&slot[block][lane / 4 * 4 + part % 2 * 2]) + part / 2;
        const uint4 v = x[block];
        to[0] = make_uint2(prmt(v.x, v.y, 0x5410), prmt(v.x, v.y, 0x7632));
        to[2] = make_uint2(prmt(v.z, v.w, 0x5410), prmt(v.z, v.w, 0x7632));
      }
      __syncwarp();
      if (lane < kArrivingLanes) mbarrier_arrive(&shared.ordered[at.slot]);
    }
  }
}

__device__ __forceinline__ void copy_codes(uint32_t to, const uint8_t* from) {
  asm volatile("cp.async.cg.shared.global.L2::256B [%0], [%1], 16;" ::"r"(to), "l"(from)
               : "memory");
}
// Through L1: the next stage's scales are in the same sectors.
__device__ __forceinline__ void copy_scales(uint32_t to, const uint8_t* from) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}

// The copies of a math warp's tiles, kStages ahead, one group of them a stage.
class WeightLoader {
 public:
  __device__ WeightLoader(SharedStorage& shared, const Operands& in, const GemmShape& shape,
                          const Waves& waves)
      : in_(in),
        cols_(shape.cols),
        blocks_(shape.K / static_cast<int>(kMxBlock)),
        waves_(waves),
        to_scales_(smem_address(
            &shared.scales[threadIdx.x / 32][0][threadIdx.x % 32 / 2][threadIdx.x % 2 * 16])) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    to_codes_ = smem_address(&shared.codes[warp][0][lane / 8][(lane % 8 ^ lane / 8) * 16]);
    begin_tile();
  }

  // Into a stage that no lane reads any more.
  __device__ __forceinline__ void load(int stage) {
    if (waves_.more()) {
      constexpr int line = sizeof(SharedStorage::codes[0][0][0]);
      const int lane = threadIdx.x % 32, blocks = blocks_ - block_;
      if (lane % 8 < blocks) {
        const uint32_t to = to_codes_ + stage * (kTileCols * line);
        // Pieces of lines that are four apart are four apart.
#pragma unroll
        for (int i = 0; i < 4; ++i)
          copy_codes((i % 2 == 0 ? to : to ^ 64) + 4 * i * line, codes_ + 4 * i * in_.row_stride);
      }
      if (block_ % (kScaleStages * kStageBlocks) == 0) {
        const int past = static_cast<int>(scale_ % 16), piece = lane % 2 * 16;
        if (piece < past + blocks)
          copy_scales(to_scales_ + scale_slot_ * (kTileCols * kScaleBytes),
                      in_.scales + (scale_ - past) + piece);
        scale_slot_ = scale_slot_ + 1 == kScaleSlots ? 0 : scale_slot_ + 1;
        scale_ += kScaleStages * kStageBlocks;
      }
      codes_ += kStageK / 2;
      block_ += kStageBlocks;
      if (block_ >= blocks_) {
        waves_.advance();
        begin_tile();
      }
    }
    cp_async_commit();
  }

 private:
  __device__ __forceinline__ void begin_tile() {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    while (waves_.more() && !waves_.has_tile(warp)) waves_.advance();
    if (!waves_.more()) return;
    const int col = waves_.tile_col(warp);
    block_ = 0;
    codes_ = in_.codes + waves_.group * in_.group_stride + (col + lane / 8) * in_.row_stride +
             lane % 8 * 16;
    scale_ = (int64_t{waves_.group} * cols_ + col + lane / 2) * blocks_;
  }

  const Operands& in_;
  const int cols_, blocks_;
  Waves waves_;
  uint32_t to_codes_, to_scales_;
  int block_, scale_slot_ = 0;
  const uint8_t* codes_;
  int64_t scale_;
};

// Four codes of each of two rows, as mma's first operand: bfloat16 numbers that are 2^-126 of the
// codes' numbers. A code's exponent and mantissa bits stand where bfloat16 has its lowest exponent
// bits and its highest mantissa bit, so that 0.5 is a subnormal number as it is in E2M1.
//
// codes: from the lowest byte on, the first row's k 0 and 1, the second one's, then k 2 and 3.
__device__ __forceinline__ void decode(uint32_t codes, uint32_t (&to)[4]) {
  // The product has a code at its sign and at its exponent, and no carry.
  constexpr uint32_t low = 0x000f000f, high = 0x00f000f0, kept = 0x81c081c0;
  const uint32_t second = codes >> 8;
  to[0] = (codes & low) * 0x1040 & kept;
  to[1] = (second & low) * 0x1040 & kept;
  to[2] = (codes & high) * 0x104 & kept;
  to[3] = (second & high) * 0x104 & kept;
}

__device__ __forceinline__ bool any_above_128(uint32_t bytes) {
  return (((bytes & 0x7f7f7f7f) + 0x7f7f7f7f) & bytes & 0x80808080) != 0;
}

// A scale as bfloat16, twice.
__device__ __forceinline__ uint32_t scale_pair(uint32_t byte) {
  return bfloat16_of_scale(byte) * 0x10001;
}

// A tile's sums.
template <int pieces>
class Accumulators {
 public:
  __device__ __forceinline__ Accumulators() {
#pragma unroll
    for (int i = 0; i < pieces; ++i)
#pragma unroll
      for (int j = 0; j < 4; ++j) sums_[i][j] = 0;
  }

  // Of one stage. codes and the scales are those of the thread's rows lane / 4 and 8 below. is_large:
  // whether a scale is above 2, which has no business in a model's weight.
  __device__ __forceinline__ void multiply(uint32_t codes, const uint8_t* first_scales,
                                           const uint8_t* second_scales,
                                           const uint4* const (&rows)[pieces], int blocks,
                                           bool is_large) {
    if (blocks >= kStageBlocks && !is_large) {
#pragma unroll
      for (int block = 0; block < kStageBlocks; ++block) {
        // 2^126 times 2^(scale - 127).
        const uint32_t first = first_scales[block] * 0x800080u + 0x3f003f00,
                       second = second_scales[block] * 0x800080u + 0x3f003f00;
        multiply_block(codes, rows, block, [&](uint32_t (&w)[4]) {
#pragma unroll
          for (int i = 0; i < 4; ++i) w[i] = multiply_pairs(w[i], i % 2 == 0 ? first : second);
        });
      }
    } else {
#pragma unroll 1
      for (int block = 0; block < min(blocks, kStageBlocks); ++block) {
        const uint32_t first = scale_pair(first_scales[block]),
                       second = scale_pair(second_scales[block]);
        multiply_block(codes, rows, block, [&](uint32_t (&w)[4]) {
          constexpr uint32_t two_to_126 = 0x7e807e80;
#pragma unroll
          for (int i = 0; i < 4; ++i)
            w[i] = multiply_pairs(multiply_pairs(w[i], two_to_126), i % 2 == 0 ? first : second);
        });
      }
    }
  }

  __device__ __forceinline__ void multiply_low_rank(const Operands& in, const Waves& waves,
                                                    int tile_col) {
    const int lane = threadIdx.x % 32, k0 = lane % 4 * 4;
    const uint16_t* b = in.b_low + waves.group * in.b_low_group_stride +
                        (tile_col + lane / 4) * in.b_low_col_stride;
#pragma unroll 1
    for (int k = k0; k < in.r; k += 16) {
      uint32_t w[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const uint16_t* from =
            b + i % 2 * 8 * in.b_low_col_stride + (k + i / 2 * 2) * in.b_low_r_stride;
        w[i] = from[0] | static_cast<uint32_t>(from[in.b_low_r_stride]) << 16;
      }
#pragma unroll
      for (int i = 0; i < pieces; ++i) {
        // Rows past the end give sums that are not stored.
        const int row = min(waves.row + i * kPieceRows + lane / 4, waves.row_end() - 1);
        const uint2 x = *reinterpret_cast<const uint2*>(in.a_low + row * in.a_low_stride + k);
        sm80::mma_16bit<__nv_bfloat16>(sums_[i], w, x.x, x.y, sums_[i]);
      }
    }
  }

  __device__ __forceinline__ void store(const EpilogueArguments& epilogue, int cols,
                                        const Waves& waves, int tile_col) const {
    with_output_type(epilogue.type, [&, cols, tile_col]<typename T>() {
      store<T>(epilogue, cols, waves, tile_col);
    });
  }

 private:
  // A thread takes two of eight bytes of a row's codes.
  template <typename Scale>
  __device__ __forceinline__ void multiply_block(uint32_t codes, const uint4* const (&rows)[pieces],
                                                 int block, const Scale& scale) {
    constexpr int eight_lines = 8 * sizeof(SharedStorage::codes[0][0][0]);
    const uint32_t at = codes ^ block * 16;
    const uint32_t selector = threadIdx.x % 2 == 0 ? 0x5140 : 0x7362;
    uint32_t w[2][4];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint32_t from = at + half * 8;
      decode(prmt(ld_shared_uint(from), ld_shared_uint(from + eight_lines), selector), w[half]);
      scale(w[half]);
    }
#pragma unroll
    for (int i = 0; i < pieces; ++i) {
      const uint4 x = rows[i][block * 32];
      sm80::mma_16bit<__nv_bfloat16>(sums_[i], w[0], x.x, x.y, sums_[i]);
      sm80::mma_16bit<__nv_bfloat16>(sums_[i], w[1], x.z, x.w, sums_[i]);
    }
  }

  template <typename T>
  __device__ __forceinline__ void store(const EpilogueArguments& epilogue, int cols,
                                        const Waves& waves, int tile_col) const {
    const int lane = threadIdx.x % 32, col = tile_col + lane / 4;
    float bias[2] = {0, 0};
    if (epilogue.bias != nullptr) {
      const T* from = static_cast<const T*>(epilogue.bias) + waves.group * epilogue.bias_stride;
      bias[0] = static_cast<float>(from[col]), bias[1] = static_cast<float>(from[col + 8]);
    }
#pragma unroll
    for (int i = 0; i < pieces; ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int row = waves.row + i * kPieceRows + lane % 4 * 2 + j % 2;
        T* to = static_cast<T*>(epilogue.out) + int64_t{row} * cols + col + j / 2 * 8;
        const float sum = sums_[i][j];
        if (row < waves.row_end())
          *to = from_float<T>(epilogue.bias != nullptr ? sum + bias[j / 2] : sum);
      }
    }
  }

  float sums_[pieces][4];
};

// By each math warp.
__device__ void multiply_tiles(SharedStorage& shared, const Operands& in,
                               const EpilogueArguments& epilogue, const GemmShape& shape,
                               Waves waves) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int blocks = shape.K / static_cast<int>(kMxBlock), row_stages = ceil_div(shape.K, kStageK);
  WeightLoader loader(shared, in, shape, waves);
#pragma unroll 1
  for (int stage = 0; stage < kStages; ++stage) loader.load(stage);
  const auto release = [&](int slot) {
    __syncwarp();
    if (lane < kArrivingLanes) mbarrier_arrive(&shared.empty[slot]);
  };
  // Block 0 of this thread's lines; lines eight apart are swizzled alike.
  const uint32_t words =
      smem_address(&shared.codes[warp][0][lane / 4][lane / 4 * 16 + lane / 2 % 2 * 4]);
  RowSlot rows_begin;
  int stage = 0, scale_slot = 0;
#pragma unroll 1
  for (; waves.more(); waves.advance()) {
    RowSlot at = rows_begin;
    if (!waves.has_tile(warp)) {
      if (!waves.last) continue;
#pragma unroll 1
      for (int i = 0; i < row_stages * waves.pieces(); ++i, at.advance()) {
        mbarrier_wait(&shared.ordered[at.slot], at.phase);
        release(at.slot);
      }
      rows_begin = at;
      continue;
    }
    const auto multiply = [&]<int pieces>() {
      Accumulators<pieces> sums;
      const uint8_t *first_scales = nullptr, *second_scales = nullptr;
      bool is_large = false;
#pragma unroll 1
      for (int block = 0; block < blocks; block += kStageBlocks) {
        cp_async_wait<kStages - 1>();
        __syncwarp();
        if (block % (kScaleStages * kStageBlocks) == 0) {
          // Bytes of neighbours do no harm.
          const auto& scales = shared.scales[warp][scale_slot];
          const uint4 bytes = *reinterpret_cast<const uint4*>(&scales[lane / 2][lane % 2 * 16]);
          is_large = __any_sync(kFullWarp, any_above_128(bytes.x) || any_above_128(bytes.y) ||
                                               any_above_128(bytes.z) || any_above_128(bytes.w));
          const int past = lane / 4 * blocks + block;
          first_scales = &scales[lane / 4][past % 16];
          second_scales = &scales[lane / 4 + 8][(past + 8 * blocks) % 16];
          scale_slot = scale_slot + 1 == kScaleSlots ? 0 : scale_slot + 1;
        }
        int slots[pieces];
        const uint4* rows[pieces];
#pragma unroll
        for (int i = 0; i < pieces; ++i, at.advance()) {
          mbarrier_wait(&shared.ordered[at.slot], at.phase);
          slots[i] = at.slot;
          rows[i] = &shared.rows[at.slot][0][lane];
        }
        sums.multiply(words + stage * sizeof(shared.codes[0][0]), first_scales, second_scales, rows,
                      blocks - block, is_large);
        first_scales += kStageBlocks, second_scales += kStageBlocks;
        __syncwarp();
        if (waves.last) {
#pragma unroll
          for (int i = 0; i < pieces; ++i)
            if (lane < kArrivingLanes) mbarrier_arrive(&shared.empty[slots[i]]);
        }
        loader.load(stage);
        stage = stage + 1 == kStages ? 0 : stage + 1;
      }
      const int col = waves.tile_col(warp);
      sums.multiply_low_rank(in, waves, col);
      sums.store(epilogue, shape.cols, waves, col);
    };
    if (waves.pieces() == 1)
      multiply.template operator()<1>();
    else
      multiply.template operator()<2>();
    if (waves.last) rows_begin = at;
  }
}

__global__ void __launch_bounds__(kThreads, 1)
    mxfp4_few_rows_kernel(const __grid_constant__ Operands in, const int32_t* offs,
                          const __grid_constant__ EpilogueArguments epilogue,
                          const __grid_constant__ GemmShape shape) {
  extern __shared__ __align__(128) uint8_t raw[];
  auto& shared = *reinterpret_cast<SharedStorage*>(raw);
  if (threadIdx.x < kRowSlots) {
    mbarrier_init(&shared.loaded[threadIdx.x], 1);
    mbarrier_init(&shared.ordered[threadIdx.x], kArrivingLanes);
    mbarrier_init(&shared.empty[threadIdx.x], kMathWarps * kArrivingLanes);
    fence_mbarrier_init();
  }
  // Pieces that no copy fills are looked at all the same.
  for (int i = threadIdx.x; i < static_cast<int>(sizeof(shared.scales)) / 16; i += kThreads)
    reinterpret_cast<uint4*>(shared.scales)[i] = make_uint4(0, 0, 0, 0);
  grid_dependency_wait();
  const int col_tiles = shape.cols / kTileCols;
  load_groups<kThreads>(shared.groups, offs, shape.E, shape.T,
                        [col_tiles](int rows) { return ceil_div(rows, kTileRows) * col_tiles; });
  zero_tail_rows(epilogue, shared.groups, shape);
  const Waves waves(shared.groups, shape);
  switch (threadIdx.x / 32) {
    case kMathWarps: return load_rows(shared, in, shape, waves);
    case kMathWarps + 1: return order_rows(shared, shape, waves);
    default: return multiply_tiles(shared, in, epilogue, shape, waves);
  }
}

}  // namespace grouped_linear::cuda::sm90::mxfp4_few_rows
