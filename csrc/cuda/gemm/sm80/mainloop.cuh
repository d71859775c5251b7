// SPDX-License-Identifier: Apache-2.0
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

// ldmatrix reads 16 rows of a, or of b, each, for a step: the products of 32 bytes of K. Where
// FP8 is made fp16 by integer operations there are registers for the first 16 rows of b alone; the
// others are read one after the other (H100, 2026-11: elsewhere that costs 8 to 13%).
template <typename Config>
struct RawFragments {
  static constexpr bool kAllOfB = !Config::kFp8 || kFp8Math != Fp8Math::kBits;
  static constexpr int kOfB = kAllOfB ? Config::kWarpN / 16 : 1;
  uint32_t a[Config::kWarpM / 16][4], b[kOfB][4];
};

// The tensor cores' sum in the operands' own unit: see kFp8Factor.
template <typename Config>
__device__ __forceinline__ float partial_sum(float accumulated) {
  return accumulated * (kFp8Factor<typename Config::A> * kFp8Factor<typename Config::B>);
}

// How partial accumulators are added: by the scales of their k-block. Where all columns of a warp
// have one scale, as those of 128 features often do, a row's scale is multiplied by it beforehand.
template <typename Config>
class Promotion {
 public:
  __device__ __forceinline__ Promotion(const KBlockScales<Config>& scales,
                                       const MmaThread& thread) {
    const float* rows = scales.rows + thread.row + thread.lane / 4;
    float block_scale = scales.columns[Config::kScale1x128 ? thread.col : 0];
    if constexpr (Config::kScale1x128) {
      static_assert(Config::kWarpN == 2 * 32, "two columns a lane");
      const float2 two = ld_shared_float2(smem_address(scales.columns + thread.col) +
                                          sizeof(float2) * thread.lane);
      shared_ = __all_sync(~0u, two.x == block_scale && two.y == block_scale);
      if (!shared_) block_scale = 1;
    }
#pragma unroll
    for (int i = 0; i < Config::kWarpM / 16; ++i)
#pragma unroll
      for (int h = 0; h < 2; ++h) row_scales_[i][h] = rows[16 * i + 8 * h] * block_scale;
    if constexpr (Config::kScale1x128)
      columns_ = smem_address(scales.columns + thread.col + 2 * (thread.lane % 4));
  }

  __device__ __forceinline__ void add(const Accumulators<Config>& partial,
                                      Accumulators<Config>& accum) const {
    if (!Config::kScale1x128 || shared_)
      add_columns<false>(partial, accum);
    else
      add_columns<true>(partial, accum);
  }

 private:
  template <bool has_column_scales>
  __device__ __forceinline__ void add_columns(const Accumulators<Config>& partial,
                                              Accumulators<Config>& accum) const {
#pragma unroll
    for (int j = 0; j < Config::kWarpN / 8; ++j) {
      float2 column = make_float2(1, 1);
      if constexpr (has_column_scales) column = ld_shared_float2(columns_ + 8 * sizeof(float) * j);
#pragma unroll
      for (int i = 0; i < Config::kWarpM / 16; ++i)
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          float value = partial_sum<Config>(partial[i][j][k]);
          if constexpr (has_column_scales) value *= k % 2 == 0 ? column.x : column.y;
          accum[i][j][k] += row_scales_[i][k / 2] * value;
        }
    }
  }

  float row_scales_[Config::kWarpM / 16][2];
  uint32_t columns_ = 0;
  bool shared_ = true;
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
    for (int k_block = 0; k_block < k_blocks; ++k_block) {
      pipeline_.prepare_load();
      RawFragments<Config> odd;
#pragma unroll
      for (int step = 0; step < kSteps; step += 2) {
        if (Config::kDecodesB && step == 0) pipeline_.load_next();  // takes registers
        read(odd, step + 1);
        if (!Config::kDecodesB && step == 0) pipeline_.load_next();
        multiply(even_);
        read_after(step + 1);
        multiply(odd);
      }
    }
  }

  // The same in FP8. Every k-block of 128 is summed by the tensor cores in a partial accumulator,
  // which is scaled and added to the accumulator in float32: see sm90/mainloop_fp8.cuh.
  __device__ __forceinline__ void multiply_fp8(int k_blocks, Accumulators<Config>& accum) {
    using A = typename Config::A;
    using B = typename Config::B;
    Accumulators<Config> partial;
    clear<Config>(accum);
    clear<Config>(partial);
    constexpr bool all_of_b = RawFragments<Config>::kAllOfB;
    constexpr int b_fragments = Config::kWarpN / 16;
    // Multiplies a step. read_next: reads the next one.
    const auto multiply = [&](const RawFragments<Config>& from, int step, bool first,
                              const auto& read_next) {
      const uint32_t stage = stage_;
      if (all_of_b) read_next();
      Fp8FragmentA<A> a[Config::kWarpM / 16];
#pragma unroll
      for (int i = 0; i < Config::kWarpM / 16; ++i) a[i].set(from.a[i]);
      uint32_t words[b_fragments][4];
#pragma unroll
      for (int i = 0; i < RawFragments<Config>::kOfB; ++i)
#pragma unroll
        for (int word = 0; word < 4; ++word) words[i][word] = from.b[i][word];
#pragma unroll
      for (int j = 0; j < 2 * b_fragments; ++j) {
        if (!all_of_b && j % 2 == 0) {
          if (j / 2 + 1 < b_fragments)
            read_b_.read(words[j / 2 + 1], stage + Config::kABytes, j / 2 + 1, step);
          else
            read_next();
        }
        Fp8FragmentB<B> b;
        b.set(words[j / 2][j % 2 * 2], words[j / 2][j % 2 * 2 + 1]);
#pragma unroll
        for (int i = 0; i < Config::kWarpM / 16; ++i) mma_fp8<A, B>(partial[i][j], a[i], b, first);
      }
    };
#pragma unroll 1
    for (int k_block = 0; k_block < k_blocks; ++k_block) {
#pragma unroll
      for (int i = 0; i < Config::kStagesPerKBlock; ++i) {
        pipeline_.prepare_load();
        RawFragments<Config> odd;
        pipeline_.load_next();
#pragma unroll
        for (int step = 0; step < kSteps; step += 2) {
          multiply(even_, step, i + step == 0, [&] { read(odd, step + 1); });
          multiply(odd, step + 1, false, [&] { read_after(step + 1); });
        }
      }
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
  static constexpr int kSteps = Config::kStageLine / 32;
  static_assert(kSteps % 2 == 0);

  __device__ __forceinline__ void read(RawFragments<Config>& to, int step) const {
#pragma unroll
    for (int i = 0; i < Config::kWarpM / 16; ++i) read_a_.read(to.a[i], stage_, i, step);
#pragma unroll
    for (int j = 0; j < RawFragments<Config>::kOfB; ++j)
      read_b_.read(to.b[j], stage_ + Config::kABytes, j, step);
  }

  __device__ __forceinline__ void promote(const Accumulators<Config>& partial,
                                          Accumulators<Config>& accum) {
    if constexpr (Config::kBlockScaled) {
      Promotion<Config>(pipeline_.scales(), thread_).add(partial, accum);
    } else {
#pragma unroll
      for (int i = 0; i < Config::kWarpM / 16; ++i)
#pragma unroll
        for (int j = 0; j < Config::kWarpN / 8; ++j)
#pragma unroll
          for (int k = 0; k < 4; ++k) accum[i][j][k] += partial_sum<Config>(partial[i][j][k]);
    }
  }

  // Reads the even step after an odd one.
  __device__ __forceinline__ void read_after(int step) {
    if (step + 1 < kSteps)
      read(even_, step + 1);
    else
      begin_stage();
  }
  __device__ __forceinline__ void begin_stage() {
    stage_ = pipeline_.next_stage();
    read(even_, 0);
  }

  Pipeline<Config>& pipeline_;
  MmaThread thread_;
  FragmentReader<Config, Config::kAMajor, true> read_a_;
  FragmentReader<Config, Config::kBMajor, false> read_b_;
  uint32_t stage_;
  RawFragments<Config> even_;  // of the current stage: at first step 0
};

}  // namespace grouped_linear::cuda::sm80
