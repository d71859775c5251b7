// The main loops: k-blocks of a warp's part of a tile, by mma.
#pragma once

#include "cuda/gemm/sm80/fp8_mma.cuh"
#include "cuda/gemm/sm80/pipeline.cuh"

namespace grouped_linear::cuda::sm80 {

template <typename Config>
__device__ __forceinline__ void clear(Accumulators<Config>& accum) {
#pragma unroll
  for (int i = 0; i < Config::kWarpM / 16; ++i)
#pragma unroll
    for (int j = 0; j < Config::kWarpN / 8; ++j)
#pragma unroll
      for (int k = 0; k < 4; ++k) accum[i][j][k] = 0;
}

// What ldmatrix reads for a product of 32 bytes of K: 16 rows of a, or of b, each.
template <typename Config>
struct RawFragments {
  uint32_t a[Config::kWarpM / 16][4], b[Config::kWarpN / 16][4];
};

// A warp's part of a tile. Fragments of the next product, of the next stage or tile too, are read
// while one is computed.
template <typename Config>
class WarpTile {
 public:
  __device__ __forceinline__ WarpTile(Pipeline<Config>& pipeline, const MmaThread& thread)
      : pipeline_(pipeline),
        thread_(thread),
        read_a_(thread.lane, thread.row),
        read_b_(thread.lane, thread.col) {
    begin_stage();
  }

  // accum = so many k-blocks of a @ b.T, in 16 bits.
  __device__ __forceinline__ void multiply_16bit(int k_blocks, Accumulators<Config>& accum) {
    using T = typename Config::A;
    const auto multiply = [&](const RawFragments<Config>& from) {
#pragma unroll
      for (int j = 0; j < Config::kWarpN / 16; ++j)
#pragma unroll
        for (int i = 0; i < Config::kWarpM / 16; ++i) {
          mma_16bit<T>(accum[i][2 * j], from.a[i], from.b[j][0], from.b[j][1], accum[i][2 * j]);
          mma_16bit<T>(accum[i][2 * j + 1], from.a[i], from.b[j][2], from.b[j][3],
                       accum[i][2 * j + 1]);
        }
    };
    clear<Config>(accum);
#pragma unroll 1
    for (int k_block = 0; k_block < k_blocks; ++k_block) compute_stage(multiply, multiply);
  }

  // The same in FP8. Every k-block of 128 is summed by the tensor cores in a partial accumulator,
  // which is scaled and added to the accumulator in float32: see sm90/mainloop_fp8.cuh.
  __device__ __forceinline__ void multiply_fp8(int k_blocks, Accumulators<Config>& accum) {
    using A = typename Config::A;
    using B = typename Config::B;
    Accumulators<Config> partial;
    const auto multiply = [&](const RawFragments<Config>& from, bool first) {
      Fp8FragmentA<A> a[Config::kWarpM / 16];
#pragma unroll
      for (int i = 0; i < Config::kWarpM / 16; ++i) a[i].set(from.a[i]);
#pragma unroll
      for (int j = 0; j < Config::kWarpN / 16; ++j) {
        Fp8FragmentsB<B> b;
        b.set(from.b[j]);
#pragma unroll
        for (int i = 0; i < Config::kWarpM / 16; ++i) {
          mma_fp8<A, B>(partial[i][2 * j], a[i], b, 0, first);
          mma_fp8<A, B>(partial[i][2 * j + 1], a[i], b, 1, first);
        }
      }
    };
    const auto add = [&](const RawFragments<Config>& from) { multiply(from, false); };
    clear<Config>(accum);
#pragma unroll 1
    for (int k_block = 0; k_block < k_blocks; ++k_block) {
      compute_stage([&](const RawFragments<Config>& from) { multiply(from, true); }, add);
#pragma unroll
      for (int stage = 1; stage < Config::kStagesPerKBlock; ++stage) compute_stage(add, add);
      promote(partial, accum);
    }
  }

  // Takes part in loading a tile in which this warp has no outputs.
  __device__ __forceinline__ void skip(int k_blocks) {
#pragma unroll 1
    for (int stage = 0; stage < k_blocks * Config::kStagesPerKBlock; ++stage) {
      pipeline_.prepare_load();
      pipeline_.load_next();
      begin_stage();
    }
    if constexpr (Config::kBlockScaled) pipeline_.skip_scales(k_blocks);
  }

 private:
  __device__ __forceinline__ void read(RawFragments<Config>& to, int k) const {
#pragma unroll
    for (int i = 0; i < Config::kWarpM / 16; ++i) read_a_.read(to.a[i], stage_, i, k);
#pragma unroll
    for (int j = 0; j < Config::kWarpN / 16; ++j)
      read_b_.read(to.b[j], stage_ + Config::kABytes, j, k);
  }

  __device__ __forceinline__ void begin_stage() {
    stage_ = pipeline_.next_stage();
    read(first_, 0);
  }

  // Multiplies the stage's two halves, and reads the first half of the next stage.
  template <typename MultiplyFirst, typename Multiply>
  __device__ __forceinline__ void compute_stage(const MultiplyFirst& multiply_first,
                                                const Multiply& multiply) {
    pipeline_.prepare_load();
    RawFragments<Config> second;
    read(second, 1);
    pipeline_.load_next();
    multiply_first(first_);
    begin_stage();
    multiply(second);
  }

  // accum += the scaled partial accumulators of a k-block
  __device__ __forceinline__ void promote(const Accumulators<Config>& partial,
                                          Accumulators<Config>& accum) {
    constexpr float factor = kFp8Factor<typename Config::A> * kFp8Factor<typename Config::B>;
    constexpr int row_parts = Config::kWarpM / 16, col_parts = Config::kWarpN / 8;
    if constexpr (Config::kBlockScaled) {
      const auto& scales = pipeline_.scales();
      const float* rows = scales.rows + thread_.row + thread_.lane / 4;
      const float block_scale = Config::kScale1x128 ? 1.0f : scales.columns[0];
      float row_scales[row_parts][2];
#pragma unroll
      for (int i = 0; i < row_parts; ++i)
#pragma unroll
        for (int h = 0; h < 2; ++h) row_scales[i][h] = rows[16 * i + 8 * h] * block_scale;
#pragma unroll
      for (int j = 0; j < col_parts; ++j) {
        float2 column = make_float2(1, 1);
        if constexpr (Config::kScale1x128)
          column = *reinterpret_cast<const float2*>(
              &scales.columns[thread_.col + 8 * j + 2 * (thread_.lane % 4)]);
#pragma unroll
        for (int i = 0; i < row_parts; ++i)
#pragma unroll
          for (int k = 0; k < 4; ++k)
            accum[i][j][k] += row_scales[i][k / 2] *
                              ((k % 2 == 0 ? column.x : column.y) * (partial[i][j][k] * factor));
      }
    } else {
#pragma unroll
      for (int i = 0; i < row_parts; ++i)
#pragma unroll
        for (int j = 0; j < col_parts; ++j)
#pragma unroll
          for (int k = 0; k < 4; ++k) accum[i][j][k] += partial[i][j][k] * factor;
    }
  }

  Pipeline<Config>& pipeline_;
  MmaThread thread_;
  FragmentReader<Config::kAMajor, true> read_a_;
  FragmentReader<Config::kBMajor, false> read_b_;
  uint32_t stage_;
  RawFragments<Config> first_;  // of the current stage
};

}  // namespace grouped_linear::cuda::sm80
