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

// accum = so many k-blocks of a @ b.T, in 16 bits. works: whether this warp has outputs.
template <typename Config>
__device__ __forceinline__ void mainloop_16bit(Pipeline<Config>& pipeline, const MmaThread& thread,
                                               int k_blocks, bool works,
                                               Accumulators<Config>& accum) {
  const FragmentReader<Config::kAMajor, true> read_a(thread.lane, thread.row);
  const FragmentReader<Config::kBMajor, false> read_b(thread.lane, thread.col);
  constexpr int row_parts = Config::kWarpM / 16, col_parts = Config::kWarpN / 8;
  clear<Config>(accum);
#pragma unroll 1
  for (int k_block = 0; k_block < k_blocks; ++k_block) {
    const uint32_t stage = pipeline.next_stage();
    if (!works) continue;
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      uint32_t a[row_parts][4];
#pragma unroll
      for (int i = 0; i < row_parts; ++i) read_a.read(a[i], stage, i, k);
#pragma unroll
      for (int j = 0; j < col_parts; j += 2) {
        uint32_t b[4];
        read_b.read(b, stage + Config::kABytes, j / 2, k);
#pragma unroll
        for (int i = 0; i < row_parts; ++i) {
          mma_16bit<typename Config::A>(accum[i][j], a[i], b[0], b[1], accum[i][j]);
          mma_16bit<typename Config::A>(accum[i][j + 1], a[i], b[2], b[3], accum[i][j + 1]);
        }
      }
    }
  }
}

// The same in FP8. Every k-block of 128 is summed by the tensor cores in a partial accumulator,
// which is scaled and added to the accumulator in float32: see sm90/mainloop_fp8.cuh.
template <typename Config>
__device__ __forceinline__ void mainloop_fp8(Pipeline<Config>& pipeline, const MmaThread& thread,
                                             int k_blocks, bool works,
                                             Accumulators<Config>& accum) {
  using A = typename Config::A;
  using B = typename Config::B;
  const FragmentReader<Major::kK, true> read_a(thread.lane, thread.row);
  const FragmentReader<Major::kK, false> read_b(thread.lane, thread.col);
  constexpr int row_parts = Config::kWarpM / 16, col_parts = Config::kWarpN / 8;
  clear<Config>(accum);
#pragma unroll 1
  for (int k_block = 0; k_block < k_blocks; ++k_block) {
    float partial[row_parts][col_parts][4];
#pragma unroll
    for (int half = 0; half < Config::kStagesPerKBlock; ++half) {
      const uint32_t stage = pipeline.next_stage();
      if (!works) continue;
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        const bool first = half == 0 && k == 0;
        Fp8FragmentA<A> a[row_parts];
#pragma unroll
        for (int i = 0; i < row_parts; ++i) {
          uint32_t words[4];
          read_a.read(words, stage, i, k);
          a[i].set(words);
        }
#pragma unroll
        for (int j = 0; j < col_parts; j += 2) {
          uint32_t words[4];
          read_b.read(words, stage + Config::kABytes, j / 2, k);
          Fp8FragmentsB<B> b;
          b.set(words);
#pragma unroll
          for (int i = 0; i < row_parts; ++i) {
            mma_fp8<A, B>(partial[i][j], a[i], b, 0, first);
            mma_fp8<A, B>(partial[i][j + 1], a[i], b, 1, first);
          }
        }
      }
    }
    constexpr float factor = kFp8Factor<A> * kFp8Factor<B>;
    if constexpr (Config::kBlockScaled) {
      // Also where this warp has no outputs: it counts k-blocks.
      const auto& scales = pipeline.scales();
      const float* rows = scales.rows + thread.row + thread.lane / 4;
      float row_scales[row_parts][2];
      const float block_scale = Config::kScale1x128 ? 1.0f : scales.columns[0];
#pragma unroll
      for (int i = 0; i < row_parts; ++i)
#pragma unroll
        for (int h = 0; h < 2; ++h) row_scales[i][h] = rows[16 * i + 8 * h] * block_scale;
#pragma unroll
      for (int j = 0; j < col_parts; ++j) {
        float2 column = make_float2(1, 1);
        if constexpr (Config::kScale1x128)
          column = *reinterpret_cast<const float2*>(
              &scales.columns[thread.col + 8 * j + 2 * (thread.lane % 4)]);
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
}

}  // namespace grouped_linear::cuda::sm80
