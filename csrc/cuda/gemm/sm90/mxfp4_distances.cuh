// The scales of a weight in MXFP4 as its GEMM in FP8 loads them: a pass before the GEMM writes their
// distances to the largest one of 128 x 128 elements.
//
// Bytes: a sixteenth of the codes' are read, and as many written.
#pragma once

#include "cuda/gemm/sm90/mxfp4_scales.cuh"

namespace grouped_linear::cuda::sm90 {

// The bytes of a distance's numbers, see PromotionBuffers.
constexpr uint32_t kNumberBytes = 8;

// Distances of scales to the largest one of their 128 x 128 elements, as offsets of their numbers:
// out [E, ceil(K / 128), stride] words, the bytes of a k-block of each column.
// blocks [E, ceil(N / 128), ceil(K / 128)]: the scales of the blocks' e4m3 numbers.
__global__ void __launch_bounds__(kScaleThreads)
    mxfp4_distances_kernel(const uint8_t* scale, const int32_t* offs, uint32_t* out, float* blocks,
                           int N, int stride, int row_bytes) {
  constexpr int words = kScaleBytesAtOnce / 4, warps = kScaleThreads / 32;
  static_assert(kScaleRows == 128, "a thread block has whole 128 x 128 blocks");
  __shared__ ScaleTile tile;
  grid_dependency_wait();
  const int64_t group = blockIdx.z;
  if (!has_rows(offs, group)) return;
  tile.load(scale, group, N, row_bytes);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int k_blocks = (row_bytes + 3) / 4, first = blockIdx.y * words;
  const int n = blockIdx.x * kScaleRows + 4 * lane;
  // A warp has a k-block, a lane four rows of it that follow one another.
#pragma unroll 1
  for (int word = warp; word < min(words, k_blocks - first); word += warps) {
    uint32_t of_row[4], largest = 0;
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      of_row[r] = tile.words[4 * lane + r][word];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const uint32_t s = of_row[r] >> 8 * i & 0xff;
        largest = max(largest, s == mxfp4::kNanScale ? 0 : s);
      }
    }
    largest = __reduce_max_sync(0xffffffff, largest);
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      uint32_t distances = 0;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const uint32_t s = of_row[r] >> 8 * i & 0xff;
        const bool inside = n + r < N && (first + word) * 4 + i < row_bytes;
        const uint32_t below = !inside                 ? 0
                               : s == mxfp4::kNanScale ? kNanBelow
                                                       : min(largest - s, kFarBelow);
        distances |= below * kNumberBytes << 8 * i;
      }
      of_row[r] = distances;
    }
    if (lane == 0)
      blocks[(group * gridDim.x + blockIdx.x) * k_blocks + first + word] =
          mxfp4::e4m3_scale(largest);
    if (n < stride)
      *reinterpret_cast<uint4*>(out + (group * k_blocks + first + word) * stride + n) =
          make_uint4(of_row[0], of_row[1], of_row[2], of_row[3]);
  }
}

}  // namespace grouped_linear::cuda::sm90
