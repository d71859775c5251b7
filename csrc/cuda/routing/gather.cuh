// Sums and products of gathered rows.
//
// Bytes of T tokens with C rows each, H elements of bf16: a sum reads 2 T C H and writes 2 T H, products
// read as much and write 4 T C. 4096 x 8 rows of 7168: 0.53 GB, 124 us at the 4.27 TB/s of a copy.
// Reaches (H200, 2026-11-21): 131 us either. Threads that keep to one token, blocks of 128 to 896 threads
// and 4 instead of 8 rows ahead were the same within 3%.
#pragma once

#include "cuda/common/pdl.cuh"
#include "cuda/quantize/block_scale.cuh"

namespace grouped_linear::cuda {

constexpr int kGatherThreads = 256;

// Rows of y [R, H], R >= 1, by their numbers; what is out of range is clamped into it. Rows are
// aligned to 16 bytes.
template <typename Element, typename Index>
struct GatheredOf {
  static constexpr int kPiece = 16 / sizeof(Element);  // elements that are read at once
  const Element* y;
  int64_t stride, R;
  const Index* rows;

  __device__ __forceinline__ const uint4* row(int64_t i) const {
    const int64_t r = rows[i];
    return reinterpret_cast<const uint4*>(y + min(max(r, int64_t{0}), R - 1) * stride);
  }
};

template <typename Element>
__device__ __forceinline__ void to_floats(uint4 piece, float (&values)[16 / sizeof(Element)]) {
  constexpr int per_word = Word<Element>::kElements;
  const uint32_t words[4] = {piece.x, piece.y, piece.z, piece.w};
#pragma unroll
  for (int w = 0; w < 4; ++w) {
    if constexpr (per_word == 1) {
      values[w] = __uint_as_float(words[w]);
    } else {
      values[2 * w] = Format<Element>::to_float(words[w] & 0xffff);
      values[2 * w + 1] = Format<Element>::to_float(words[w] >> 16);
    }
  }
}

// out[t] = the sum over c of weight[t, c] * y[rows[t, c]], from the first c to the last. A thread has
// 16 bytes of a row of out.
template <typename Element, typename Index>
__global__ void __launch_bounds__(kGatherThreads)
    gather_sum_kernel(GatheredOf<Element, Index> gathered, const float* weight, int64_t T, int C,
                      int H, uint4* out) {
  grid_dependency_wait();
  constexpr int piece = GatheredOf<Element, Index>::kPiece, ahead = 8;
  constexpr int per_word = Word<Element>::kElements;
  const int pieces = H / piece;
  const int64_t number = int64_t{blockIdx.x} * kGatherThreads + threadIdx.x;
  const int64_t t = number / pieces;
  const int at = static_cast<int>(number % pieces);
  if (t >= T) return;
  float sum[piece] = {};
  for (int first = 0; first < C; first += ahead) {
    uint4 rows[ahead];
    float weights[ahead];
#pragma unroll
    for (int i = 0; i < ahead; ++i)
      if (first + i < C) {
        const int64_t choice = t * C + first + i;
        rows[i] = gathered.row(choice)[at];
        weights[i] = weight ? weight[choice] : 1.0f;
      }
#pragma unroll
    for (int i = 0; i < ahead; ++i)
      if (first + i < C) {
        float values[piece];
        to_floats<Element>(rows[i], values);
#pragma unroll
        for (int v = 0; v < piece; ++v)
          sum[v] = __fadd_rn(sum[v], __fmul_rn(weights[i], values[v]));
      }
  }
  uint32_t words[4];
#pragma unroll
  for (int w = 0; w < 4; ++w)
    words[w] =
        Patch<Element>::word_of(sum[w * per_word], per_word == 2 ? sum[w * per_word + 1] : 0);
  out[number] = make_uint4(words[0], words[1], words[2], words[3]);
}

// out[t, c] = a[t] . y[rows[t, c]]: a warp each.
template <typename Element, typename Index>
__global__ void __launch_bounds__(kGatherThreads)
    gather_dot_kernel(const Element* a, int64_t a_stride, GatheredOf<Element, Index> gathered,
                      int64_t products, int C, int H, float* out) {
  grid_dependency_wait();
  constexpr int piece = GatheredOf<Element, Index>::kPiece;
  const int64_t number = (int64_t{blockIdx.x} * kGatherThreads + threadIdx.x) / 32;
  const int lane = threadIdx.x % 32, pieces = H / piece;
  if (number >= products) return;
  const auto* own = reinterpret_cast<const uint4*>(a + number / C * a_stride);
  const uint4* row = gathered.row(number);
  float sum = 0;
#pragma unroll 4
  for (int at = lane; at < pieces; at += 32) {
    float x[piece], y[piece];
    to_floats<Element>(own[at], x);
    to_floats<Element>(row[at], y);
#pragma unroll
    for (int v = 0; v < piece; ++v) sum = __fmaf_rn(x[v], y[v], sum);
  }
#pragma unroll
  for (int half = 16; half > 0; half /= 2) sum += __shfl_xor_sync(kFullWarp, sum, half);
  if (lane == 0) out[number] = sum;
}

}  // namespace grouped_linear::cuda
