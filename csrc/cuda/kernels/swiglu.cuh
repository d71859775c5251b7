// SwiGLU and its gradient, unfused, and what the fused forms share with them. Bytes an element of
// bf16: 4 read and 2 written of h, 3 and 2 of d_gate_up. A thread computes eight neighbours.
#pragma once

#include "../../swiglu.h"
#include "block_scale.cuh"
#include "overlap.cuh"

namespace grouped_linear::cuda {

// Eight elements, as words of Element.
template <typename Element>
using Eight = uint32_t[Patch<Element>::kWords];

// result[c] = compute(c), rounded to Element.
template <typename Element, typename Compute>
__device__ __forceinline__ void for_eight(Eight<Element>& result, const Compute& compute) {
  constexpr int kPair = Word<Element>::kElements;
#pragma unroll
  for (int w = 0; w < Patch<Element>::kWords; ++w)
    result[w] =
        Patch<Element>::word_of(compute(w * kPair), kPair == 2 ? compute(w * kPair + 1) : 0.0f);
}

// In place of gate.
template <typename Element>
__device__ __forceinline__ void swiglu_of_eight(Eight<Element>& gate, const Eight<Element>& up) {
  Eight<Element> h;
  for_eight<Element>(h, [&](int c) {
    return swiglu_of(Patch<Element>::element(gate, c), Patch<Element>::element(up, c));
  });
#pragma unroll
  for (int w = 0; w < Patch<Element>::kWords; ++w) gate[w] = h[w];
}

// d_gate, or d_up, in place of gate.
template <typename Element>
__device__ __forceinline__ void swiglu_grad_of_eight(bool of_gate, const Eight<Element>& dh,
                                                     Eight<Element>& gate,
                                                     const Eight<Element>& up) {
  Eight<Element> d;
  for_eight<Element>(d, [&](int c) {
    const float gradient = Patch<Element>::element(dh, c), g = Patch<Element>::element(gate, c);
    return of_gate ? swiglu_grad_gate(gradient, g, Patch<Element>::element(up, c))
                   : swiglu_grad_up(gradient, g);
  });
#pragma unroll
  for (int w = 0; w < Patch<Element>::kWords; ++w) gate[w] = d[w];
}

// d_gate in place of gate, and d_up. Both have the bits of swiglu_grad_of_eight.
template <typename Element>
__device__ __forceinline__ void swiglu_grads_of_eight(const Eight<Element>& dh,
                                                      Eight<Element>& gate,
                                                      const Eight<Element>& up,
                                                      Eight<Element>& d_up) {
  float d_gates[kPatch], d_ups[kPatch];
#pragma unroll
  for (int c = 0; c < kPatch; ++c) {
    const float gradient = Patch<Element>::element(dh, c), g = Patch<Element>::element(gate, c);
    d_gates[c] = swiglu_grad_gate(gradient, g, Patch<Element>::element(up, c));
    d_ups[c] = swiglu_grad_up(gradient, g);
  }
  for_eight<Element>(gate, [&](int c) { return d_gates[c]; });
  for_eight<Element>(d_up, [&](int c) { return d_ups[c]; });
}

constexpr int kSwigluThreads = 256;

// The end of the last group: the largest of offs, inside [0, T]. By all threads of the block.
__device__ __forceinline__ int last_row_end_of_block(const int32_t* offs, int E, int64_t T) {
  __shared__ int largest;
  if (threadIdx.x == 0) largest = 0;
  __syncthreads();
  int end = 0;
  for (int e = threadIdx.x; e < E; e += blockDim.x)
    end = max(end, static_cast<int>(min(int64_t{offs[e]}, T)));
  end = __reduce_max_sync(kFullWarp, end);
  if (threadIdx.x % 32 == 0) atomicMax(&largest, end);
  __syncthreads();
  return largest;
}

// compute(t, column, words) for eight elements at a time of `out` [T, columns]; zero past the last
// group.
template <typename Element, typename Compute>
__device__ __forceinline__ void for_eights(const int32_t* offs, int E, int64_t T, int columns,
                                           Element* out, const Compute& compute) {
  const int end = last_row_end_of_block(offs, E, T);
  const int64_t pieces = columns / kPatch, count = pieces * T;
  const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.x;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < count;
       i += step) {
    const int64_t t = i / pieces;
    const int column = static_cast<int>(i % pieces) * kPatch;
    Eight<Element> words = {};
    if (t < end) compute(t, column, words);
    Patch<Element>::store_words(words, out + i * kPatch);
  }
}

template <typename Element>
__global__ void __launch_bounds__(kSwigluThreads)
    swiglu_kernel(const Element* gate_up, int64_t stride, bool vectorised, const int32_t* offs,
                  int E, int64_t T, int K, Element* h) {
  start_after_previous();
  for_eights(offs, E, T, K, h, [&](int64_t t, int column, Eight<Element>& words) {
    Eight<Element> up;
    Patch<Element>::load_words(gate_up + t * stride + column, vectorised, words);
    Patch<Element>::load_words(gate_up + t * stride + K + column, vectorised, up);
    swiglu_of_eight<Element>(words, up);
  });
}

template <typename Element>
__global__ void __launch_bounds__(kSwigluThreads)
    swiglu_grad_kernel(const Element* dh, int64_t dh_stride, const Element* gate_up, int64_t stride,
                       bool vectorised, const int32_t* offs, int E, int64_t T, int K,
                       Element* d_gate_up) {
  start_after_previous();
  for_eights(offs, E, T, 2 * K, d_gate_up, [&](int64_t t, int column, Eight<Element>& words) {
    const bool of_gate = column < K;  // K is a multiple of 16: eight neighbours are of one half
    const int k = of_gate ? column : column - K;
    Eight<Element> d, up = {};
    Patch<Element>::load_words(dh + t * dh_stride + k, vectorised, d);
    Patch<Element>::load_words(gate_up + t * stride + k, vectorised, words);
    if (of_gate) Patch<Element>::load_words(gate_up + t * stride + K + k, vectorised, up);
    swiglu_grad_of_eight<Element>(of_gate, d, words, up);
  });
}

// Rows of `out` [T, columns] at and past the last group's end become zero.
template <typename Element>
__global__ void __launch_bounds__(kSwigluThreads)
    zero_tail_kernel(const int32_t* offs, int E, int64_t T, int columns, Element* out) {
  start_after_previous();
  const int end = last_row_end_of_block(offs, E, T);
  const int64_t pieces = columns / kPatch, count = pieces * T;
  const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.x;
  const Eight<Element> zeros = {};
  for (int64_t i = pieces * end + static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
       i < count; i += step)
    Patch<Element>::store_words(zeros, out + i * kPatch);
}

}  // namespace grouped_linear::cuda
