// SPDX-License-Identifier: Apache-2.0
// Weighted sums of gathered rows, dot products with them, and rows scattered.
//
// Bytes of T tokens with C rows each, H elements of bf16: a sum reads 2 T C H and writes 2 T H; dot
// products read as much and write 4 T C. 4096 x 8 rows of 7168: 0.53 GB, 124 us at the 4.27 TB/s of
// a copy. Reaches (H200, 2026-11-21): 131 us, both. Threads that keep to one token, thread blocks
// of 128 to 896 threads, and 4 instead of 8 rows in flight were the same within 3%.
#pragma once

#include "cuda/common/elements.cuh"
#include "cuda/common/groups.cuh"
#include "cuda/common/pdl.cuh"

namespace grouped_linear::cuda {

constexpr int kGatherThreads = 256;

// Rows of y [R, H], R >= 1, by index. Indices out of range are clamped into it. Rows are aligned to
// 16 bytes.
template <typename Element>
struct RowGather {
  static constexpr int kVectorElements = 16 / sizeof(Element);
  const Element* y;
  int64_t stride, R;
  const int32_t* rows;

  __device__ __forceinline__ const uint4* row(int64_t i) const {
    const int64_t r = rows[i];
    return reinterpret_cast<const uint4*>(y + min(max(r, int64_t{0}), R - 1) * stride);
  }
};

template <typename Element>
__device__ __forceinline__ void to_floats(uint4 vector, float (&values)[16 / sizeof(Element)]) {
  constexpr int per_word = Word<Element>::kElements;
  const uint32_t words[4] = {vector.x, vector.y, vector.z, vector.w};
#pragma unroll
  for (int w = 0; w < 4; ++w)
#pragma unroll
    for (int i = 0; i < per_word; ++i)
      values[w * per_word + i] = Format<Element>::to_float(Word<Element>::bits(words[w], i));
}

// out[t] = the sum over c of weight[t, c] * y[rows[t, c]], from the first c to the last. Rows from
// *end on add nothing, if it is given. A thread computes 16 bytes of a row of out.
template <typename Element>
__global__ void __launch_bounds__(kGatherThreads)
    gather_sum_kernel(RowGather<Element> gathered, const float* weight, const int32_t* end,
                      int64_t T, int C, int H, uint4* out) {
  grid_dependency_wait();
  constexpr int kElements = RowGather<Element>::kVectorElements, kRowsInFlight = 8;
  constexpr int per_word = Word<Element>::kElements;
  const int per_row = H / kElements;
  const int64_t number = int64_t{blockIdx.x} * kGatherThreads + threadIdx.x;
  const int64_t t = number / per_row;
  const int at = static_cast<int>(number % per_row);
  if (t >= T) return;
  const int64_t rows_end = end ? *end : INT64_MAX;
  float sum[kElements] = {};
  for (int first = 0; first < C; first += kRowsInFlight) {
    uint4 rows[kRowsInFlight];
    float weights[kRowsInFlight];
    bool adds[kRowsInFlight];
#pragma unroll
    for (int i = 0; i < kRowsInFlight; ++i) {
      const int64_t choice = t * C + first + i;
      adds[i] = first + i < C && gathered.rows[choice] < rows_end;
      if (adds[i]) {
        rows[i] = gathered.row(choice)[at];
        weights[i] = weight ? weight[choice] : 1.0f;
      }
    }
#pragma unroll
    for (int i = 0; i < kRowsInFlight; ++i)
      if (adds[i]) {
        float values[kElements];
        to_floats<Element>(rows[i], values);
#pragma unroll
        for (int v = 0; v < kElements; ++v)
          sum[v] = __fadd_rn(sum[v], __fmul_rn(weights[i], values[v]));
      }
  }
  uint32_t words[4];
#pragma unroll
  for (int w = 0; w < 4; ++w)
    words[w] =
        Word<Element>::from_floats(sum[w * per_word], per_word == 2 ? sum[w * per_word + 1] : 0);
  out[number] = make_uint4(words[0], words[1], words[2], words[3]);
}

// out[t, c] = a[t] . y[rows[t, c]], one warp each.
template <typename Element>
__global__ void __launch_bounds__(kGatherThreads)
    gather_dot_kernel(const Element* a, int64_t a_stride, RowGather<Element> gathered,
                      int64_t products, int C, int H, float* out) {
  grid_dependency_wait();
  constexpr int kElements = RowGather<Element>::kVectorElements;
  const int64_t number = (int64_t{blockIdx.x} * kGatherThreads + threadIdx.x) / 32;
  const int lane = threadIdx.x % 32, per_row = H / kElements;
  if (number >= products) return;
  const auto* own = reinterpret_cast<const uint4*>(a + number / C * a_stride);
  const uint4* row = gathered.row(number);
  float sum = 0;
#pragma unroll 4
  for (int at = lane; at < per_row; at += 32) {
    float x[kElements], y[kElements];
    to_floats<Element>(own[at], x);
    to_floats<Element>(row[at], y);
#pragma unroll
    for (int v = 0; v < kElements; ++v) sum = __fmaf_rn(x[v], y[v], sum);
  }
#pragma unroll
  for (int half = 16; half > 0; half /= 2) sum += __shfl_xor_sync(kFullWarp, sum, half);
  if (lane == 0) out[number] = sum;
}

// out[rows[t, c]] = x[t]. A thread copies 16 bytes of a row of x, which is read once. Numbers out
// of range are clamped.
static __global__ void __launch_bounds__(kGatherThreads)
    scatter_rows_kernel(const uint4* x, int64_t stride, const int32_t* rows, int64_t T, int C,
                        int per_row, int64_t R, uint4* out) {
  grid_dependency_wait();
  const int64_t number = int64_t{blockIdx.x} * kGatherThreads + threadIdx.x;
  const int64_t t = number / per_row;
  const int at = static_cast<int>(number % per_row);
  if (t >= T) return;
  const uint4 vector = x[t * stride + at];
  constexpr int kAtOnce = 8;  // row numbers that are loaded before the first store
  for (int first = 0; first < C; first += kAtOnce) {
    int64_t to[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i)
      if (first + i < C) to[i] = min(max(int64_t{rows[t * C + first + i]}, int64_t{0}), R - 1);
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i)
      if (first + i < C) out[to[i] * per_row + at] = vector;
  }
}

}  // namespace grouped_linear::cuda
