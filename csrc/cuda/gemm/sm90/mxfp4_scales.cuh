// SPDX-License-Identifier: Apache-2.0
// The scales of a weight in MXFP4, [E, N, K / 32] bytes, as its GEMM loads them. Their rows are no
// multiple of TMA's 16 bytes as a rule. A pass before the GEMM writes them as bfloat16, in another order.
//
// Bytes: a sixteenth of the codes' are read, and twice as many written.
#pragma once

#include "cuda/common/pdl.cuh"
#include "cuda/gemm/mxfp4_bf16.cuh"

namespace grouped_linear::cuda::sm90 {

constexpr int kScaleRows = 128, kScaleBytesAtOnce = 128, kScaleThreads = 256;

// K-major: pairs of neighbours along K, [E, ceil(K / 64), N] words. MN-major: [E, K / 32, N].
template <bool k_major>
__global__ void __launch_bounds__(kScaleThreads)
    mxfp4_scales_kernel(const uint8_t* scale, const int32_t* offs, void* out, int N, int stride,
                        int row_bytes) {
  __shared__ uint32_t tile[kScaleRows][kScaleBytesAtOnce / 4 + 1];
  grid_dependency_wait();
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int first_row = blockIdx.x * kScaleRows, first_byte = blockIdx.y * kScaleBytesAtOnce;
  const int64_t group = blockIdx.z;
  if (offs[group] <= (group == 0 ? 0 : offs[group - 1])) return;  // it has no rows
#pragma unroll 4
  for (int row = warp; row < kScaleRows; row += kScaleThreads / 32) {
    const int64_t at = (group * N + first_row + row) * row_bytes + first_byte;
#pragma unroll
    for (int byte = lane; byte < kScaleBytesAtOnce; byte += 32) {
      const bool inside = first_row + row < N && first_byte + byte < row_bytes;
      reinterpret_cast<uint8_t*>(tile[row])[byte] = inside ? scale[at + byte] : 0;
    }
  }
  __syncthreads();
  const int row = threadIdx.x % kScaleRows;
  if (first_row + row >= N) return;
  constexpr int item = k_major ? 2 : 1;
  const int items = (row_bytes + item - 1) / item, first = first_byte / item;
#pragma unroll 4
  for (int i = threadIdx.x / kScaleRows; i < kScaleBytesAtOnce / item;
       i += kScaleThreads / kScaleRows) {
    if (first + i >= items) return;
    const int64_t to = (group * items + first + i) * stride + first_row + row;
    const uint32_t bytes = tile[row][i * item / 4] >> i * item % 4 * 8;
    const uint32_t first_scale = bfloat16_of_scale(bytes & 0xff);
    if constexpr (k_major)
      static_cast<uint32_t*>(out)[to] = first_scale | bfloat16_of_scale(bytes >> 8 & 0xff) << 16;
    else
      static_cast<uint16_t*>(out)[to] = static_cast<uint16_t>(first_scale);
  }
}

}  // namespace grouped_linear::cuda::sm90
