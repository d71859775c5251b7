// SPDX-License-Identifier: Apache-2.0
// The stages in flight: all threads load kStages - 1 of them ahead, across the ends of tiles. So
// the next tile's first stages arrive while a tile's outputs are written.
#pragma once

#include "cuda/common/shared_memory.cuh"
#include "cuda/gemm/sm80/loader.cuh"
#include "cuda/gemm/sm80/mxfp4_loader.cuh"
#include "cuda/gemm/sm80/shared_storage.cuh"
#include "cuda/gemm/sm80/tile_counter.cuh"

namespace grouped_linear::cuda::sm80 {

struct Operands {
  OperandView a, b;
  // FP8 with block scales, in elements. a: `scale_a_stride` between k-blocks. b: the same in a
  // K-grouped GEMM, else by its three strides.
  const float *scale_a, *scale_b;
  int64_t scale_a_stride;
  int64_t scale_b_group_stride, scale_b_row_stride, scale_b_k_stride;
};

struct Mxfp4Operands {
  OperandView a;
  Mxfp4View b;
};
template <typename Config>
using OperandsOf = std::conditional_t<Config::kDecodesB, Mxfp4Operands, Operands>;
template <typename Config>
using LoaderOfB = std::conditional_t<Config::kDecodesB, Mxfp4Loader<Config>,
                                     Loader<Config, Config::kTileN, Config::kBMajor>>;

// Loads a k-block's scales: a thread one of a's rows, another one of b's columns. Where all of b's
// columns have one scale, every other thread loads that.
template <typename Config>
class ScaleLoader {
 public:
  ScaleLoader() = default;
  __device__ __forceinline__ ScaleLoader(const Operands& operands, const WorkTile& tile, int cols) {
    static_assert(Config::kThreads >= Config::kTileM + (Config::kKGrouped ? Config::kTileN : 1));
    const int thread = threadIdx.x;
    const bool of_row = thread < Config::kTileM;
    const int at = of_row ? tile.row + thread : tile.col + thread - Config::kTileM;
    if (of_row) {
      from_ = operands.scale_a + at;
      stride_ = operands.scale_a_stride;
      in_bounds_ = at < tile.row_end;
    } else if (Config::kKGrouped) {
      from_ = operands.scale_b + at;
      stride_ = operands.scale_b_k_stride;
      in_bounds_ = at < cols;
    } else {
      from_ = operands.scale_b + tile.group * operands.scale_b_group_stride +
              tile.col / kScaleBlock * operands.scale_b_row_stride;
      stride_ = operands.scale_b_k_stride;
      in_bounds_ = tile.col < cols;  // the odd half of a pair may lie past the last column
    }
    if (Config::kKGrouped) {
      from_ += tile.k_begin * stride_;
      in_bounds_ = in_bounds_ && tile.k_blocks > 0;
    }
  }

  __device__ __forceinline__ void load_zeros() { in_bounds_ = false; }

  __device__ __forceinline__ void load(KBlockScales<Config>& to) {
    cp_async_float(smem_address(to.rows + threadIdx.x), from_, in_bounds_);
    from_ += stride_;
  }

 private:
  const float* from_ = nullptr;
  int64_t stride_ = 0;
  bool in_bounds_ = false;
};

// tile_order.cuh's indices of the groups that have tiles: all of them have.
struct EveryGroup {
  __device__ int operator[](int e) const { return e; }
};

template <typename Config>
class Pipeline {
 public:
  // All threads of the block. tiles: how many there are.
  __device__ __forceinline__ Pipeline(SharedStorage<Config>& shared,
                                      const OperandsOf<Config>& operands, const TileCounts& counts,
                                      const GemmShape& shape, const StampedTickets& tickets,
                                      int tiles)
      : shared_(shared),
        operands_(operands),
        counts_(counts),
        shape_(shape),
        counter_(tickets, tiles),
        tiles_(tiles),
        stages_(kept(smem_address(shared.stages))),
        read_(stages_),
        write_(stages_) {
    if (threadIdx.x == 0) {
      counter_.begin();
      shared.tile_numbers[0] = blockIdx.x;
    }
#pragma unroll 1
    for (int i = 0; i < Config::kStages - 1; ++i) {
      __syncthreads();
      prepare_load();
      load_next();
    }
    __syncthreads();
  }

  // The tile that is computed next; k_blocks = -1: there are no more.
  __device__ __forceinline__ const WorkTile& next_tile() {
    return shared_.tiles[computed_++ % kTileSlots];
  }

  // A tile without k-blocks takes those of one, which are zeros.
  static __device__ __forceinline__ int k_blocks(const WorkTile& tile) {
    return max(tile.k_blocks, 1);
  }

  // Waits until the next stage is there. Every thread has then read the one before it. Returns the
  // stage's address; past the last tile, any.
  __device__ __forceinline__ uint32_t next_stage() {
    cp_async_wait<Config::kStages - 2>();
    __syncthreads();
    const uint32_t stage = read_;
    read_ = following(read_);
    return stage;
  }

  // Called once for each stage before load_next, apart from it: it branches.
  __device__ __forceinline__ void prepare_load() {
    if (left_ == 0) begin_tile();
  }

  // Starts to load one more stage, where the one before the current one was. Past the last tile
  // these are zeros: no branch keeps the copies from being scheduled among the products.
  __device__ __forceinline__ void load_next() {
    const bool second = Config::kStagesPerKBlock > 1 && left_ % Config::kStagesPerKBlock != 0;
    a_.load(operands_.a, write_, second);
    b_.load(operands_.b, write_ + Config::kABytes, second);
    if constexpr (Config::kBlockScaled)
      if (!second) scales_.load(shared_.scales[scales_written_++ % kScaleSlots]);
    write_ = following(write_);
    --left_;
    cp_async_commit();
  }

  // The scales of the k-block of which all stages have been read.
  __device__ __forceinline__ const KBlockScales<Config>& scales() {
    return shared_.scales[scales_read_++ % kScaleSlots];
  }
  __device__ __forceinline__ void skip_scales(int k_blocks) { scales_read_ += k_blocks; }

 private:
  // The address of the stage after one.
  __device__ __forceinline__ uint32_t following(uint32_t stage) const {
    constexpr uint32_t bytes = Config::kStageBytes;
    return stage == stages_ + (Config::kStages - 1) * bytes ? stages_ : stage + bytes;
  }

  // The next tile to load. Its number was announced when the tile before it began: there is a
  // barrier in between, as every tile has a stage.
  __device__ __forceinline__ void begin_tile() {
    const int number = shared_.tile_numbers[begun_ % 2];
    WorkTile tile;
    if (number < tiles_) {
      tile = tile_of<Config>(number / 2, number % 2, shared_.groups, EveryGroup(), counts_, shape_);
      a_.begin_tile(operands_.a, 0, tile, tile.row, tile.row_end, shape_.K);
      b_.begin_tile(operands_.b, tile.group, tile, tile.col, shape_.cols, shape_.K);
      if constexpr (Config::kBlockScaled) scales_ = {operands_, tile, shape_.cols};
      left_ = k_blocks(tile) * Config::kStagesPerKBlock;
    } else {
      tile.k_blocks = -1;
      a_.load_zeros();
      b_.load_zeros();
      if constexpr (Config::kBlockScaled) scales_.load_zeros();
      left_ = -1;
    }
    if (threadIdx.x == 0) {
      shared_.tiles[begun_ % kTileSlots] = tile;
      if (left_ > 0) shared_.tile_numbers[(begun_ + 1) % 2] = counter_.next();
    }
    ++begun_;
  }

  SharedStorage<Config>& shared_;
  const OperandsOf<Config>& operands_;
  const TileCounts& counts_;
  const GemmShape& shape_;
  TileCounter counter_;
  Loader<Config, Config::kTileM, Config::kAMajor> a_;
  LoaderOfB<Config> b_;
  ScaleLoader<Config> scales_;
  int tiles_, left_ = 0;            // stages of the tile to load; less: there are no more tiles
  uint32_t stages_, read_, write_;  // addresses
  uint32_t begun_ = 0, computed_ = 0, scales_written_ = 0, scales_read_ = 0;
};

}  // namespace grouped_linear::cuda::sm80
