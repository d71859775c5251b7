// The stages of a tile in flight: kStages - 1 are loaded ahead, by all threads.
#pragma once

#include "cuda/common/cp_async.cuh"
#include "cuda/gemm/sm80/loader.cuh"
#include "cuda/gemm/sm80/shared_storage.cuh"

namespace grouped_linear::cuda::sm80 {

struct Operands {
  OperandView a, b;
  // FP8 with block scales, in elements. a: `scale_a_stride` between k-blocks. b: the same in a
  // K-grouped GEMM, else by its three strides.
  const float *scale_a, *scale_b;
  int64_t scale_a_stride;
  int64_t scale_b_group_stride, scale_b_row_stride, scale_b_k_stride;
};

// Loads a k-block's scales: a thread one of a's rows, another one of b's columns.
template <typename Config>
class ScaleLoader {
 public:
  __device__ __forceinline__ ScaleLoader(const Operands& operands, const WorkTile& tile, int cols) {
    static_assert(Config::kThreads == Config::kTileM + Config::kTileN);
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
      in_bounds_ = true;
    }
    if (Config::kKGrouped) from_ += tile.k_begin * stride_;
  }

  __device__ __forceinline__ void load(KBlockScales<Config>& to) {
    cp_async_float(smem_address(to.rows + threadIdx.x), from_, in_bounds_);
    from_ += stride_;
  }

 private:
  const float* from_;
  int64_t stride_;
  bool in_bounds_;
};

struct NoScales {
  template <typename... Arguments>
  __device__ __forceinline__ NoScales(const Arguments&...) {}
  template <typename Scales>
  __device__ __forceinline__ void load(Scales&) {}
};

template <typename Config>
class Pipeline {
 public:
  __device__ __forceinline__ Pipeline(SharedStorage<Config>& shared, const Operands& operands,
                                      const WorkTile& tile, const GemmShape& shape)
      : shared_(shared),
        a_(operands.a, 0, tile, tile.row, tile.row_end, shape.K),
        b_(operands.b, tile.group, tile, tile.col, shape.cols, shape.K),
        scales_(operands, tile, shape.cols),
        left_(tile.k_blocks * Config::kStagesPerKBlock) {
#pragma unroll
    for (int i = 0; i < Config::kStages - 1; ++i) load_next();
  }

  // Waits until the next stage is there, and starts to load the one after the last in flight. The
  // stage's address.
  __device__ __forceinline__ uint32_t next_stage() {
    cp_async_wait<Config::kStages - 2>();
    __syncthreads();
    const uint32_t stage = stage_address(read_);
    read_ = following(read_);
    load_next();
    return stage;
  }

  // Called once, before shared memory is used for something else.
  __device__ __forceinline__ void finish() {
    cp_async_wait<0>();
    __syncthreads();
  }

 private:
  static __device__ __forceinline__ int following(int stage) {
    return stage + 1 == Config::kStages ? 0 : stage + 1;
  }
  __device__ __forceinline__ uint32_t stage_address(int stage) const {
    return smem_address(shared_.stages) + stage * Config::kStageBytes;
  }

  __device__ __forceinline__ void load_next() {
    if (left_ > 0) {
      const bool second = Config::kStagesPerKBlock > 1 && left_ % Config::kStagesPerKBlock == 1;
      const uint32_t stage = stage_address(write_);
      a_.load(stage, second);
      b_.load(stage + Config::kABytes, second);
      if constexpr (Config::kBlockScaled)
        if (!second) {
          scales_.load(shared_.scales[scale_slot_]);
          scale_slot_ = (scale_slot_ + 1) % Config::kScaleSlots;
        }
      write_ = following(write_);
      --left_;
    }
    cp_async_commit();  // an empty group, too: groups are counted
  }

  SharedStorage<Config>& shared_;
  Loader<Config, Config::kTileM, Config::kAMajor> a_;
  Loader<Config, Config::kTileN, Config::kBMajor> b_;
  std::conditional_t<Config::kBlockScaled, ScaleLoader<Config>, NoScales> scales_;
  int left_, read_ = 0, write_ = 0, scale_slot_ = 0;
};

}  // namespace grouped_linear::cuda::sm80
