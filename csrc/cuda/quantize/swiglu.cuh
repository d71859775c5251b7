// SwiGLU and its gradient, unfused, and what the fused forms share with them. Bytes an element of
// bf16: 4 read and 2 written of h, 3 and 2 of d_gate_up. A thread computes eight of h, or the gradients
// of eight gates and their ups.
//
// Reaches (H200, 2026-11-24) of a copy's speed: h 0.95, its gradient 0.91 to 0.94. With alpha, beta and a
// limit, which take the multiprocessors longer than the memory: 0.85 and 0.83.
#pragma once

#include "cuda/common/pdl.cuh"
#include "cuda/quantize/block_scale.cuh"
#include "swiglu_math.h"

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

template <typename Element>
__device__ __forceinline__ void copy_eight(Eight<Element>& to, const Eight<Element>& from) {
#pragma unroll
  for (int w = 0; w < Patch<Element>::kWords; ++w) to[w] = from[w];
}

// Sixteen neighbours in which gate and up take turns, into eight of each.
template <typename Element>
__device__ __forceinline__ void part_turns(Eight<Element>& gate, Eight<Element>& up) {
  constexpr int kWords = Patch<Element>::kWords;
  Eight<Element> first, second;
  copy_eight<Element>(first, gate);
  copy_eight<Element>(second, up);
#pragma unroll
  for (int w = 0; w < kWords; ++w) {
    const auto& from = 2 * w < kWords ? first : second;
    const uint32_t even = from[2 * w % kWords], odd = from[(2 * w + 1) % kWords];
    constexpr bool pairs = sizeof(Element) == 2;
    gate[w] = pairs ? __byte_perm(even, odd, 0x5410) : even;
    up[w] = pairs ? __byte_perm(even, odd, 0x7632) : odd;
  }
}

// And back.
template <typename Element>
__device__ __forceinline__ void take_turns(Eight<Element>& gate, Eight<Element>& up) {
  constexpr int kWords = Patch<Element>::kWords;
  Eight<Element> gates, ups;
  copy_eight<Element>(gates, gate);
  copy_eight<Element>(ups, up);
#pragma unroll
  for (int w = 0; w < kWords; ++w) {
    auto& to = 2 * w < kWords ? gate : up;
    constexpr bool pairs = sizeof(Element) == 2;
    to[2 * w % kWords] = pairs ? __byte_perm(gates[w], ups[w], 0x5410) : gates[w];
    to[(2 * w + 1) % kWords] = pairs ? __byte_perm(gates[w], ups[w], 0x7632) : ups[w];
  }
}

// In place of gate. Where they take turns, `gate` and `up` are sixteen neighbours.
template <typename Element, typename Form>
__device__ __forceinline__ void swiglu_of_eight(const Form& form, Eight<Element>& gate,
                                                Eight<Element>& up) {
  if (form.interleaved) part_turns<Element>(gate, up);
  Eight<Element> h;
  for_eight<Element>(h, [&](int c) {
    return swiglu_of(form, Patch<Element>::element(gate, c), Patch<Element>::element(up, c));
  });
  copy_eight<Element>(gate, h);
}

// d_gate, or d_up, in place of gate.
template <typename Element, typename Form>
__device__ __forceinline__ void swiglu_grad_of_eight(const Form& form, bool of_gate,
                                                     const Eight<Element>& dh, Eight<Element>& gate,
                                                     const Eight<Element>& up) {
  Eight<Element> d;
  for_eight<Element>(d, [&](int c) {
    const float g = Patch<Element>::element(gate, c), u = Patch<Element>::element(up, c);
    const float gradient = Patch<Element>::element(dh, c);
    return of_gate ? swiglu_grad_gate(form, g, u, gradient) : swiglu_grad_up(form, g, u, gradient);
  });
  copy_eight<Element>(gate, d);
}

// d_gate in place of gate, and d_up. Both have the bits of swiglu_grad_of_eight.
template <typename Element, typename Form>
__device__ __forceinline__ void swiglu_grads_of_eight(const Form& form, const Eight<Element>& dh,
                                                      Eight<Element>& gate,
                                                      const Eight<Element>& up,
                                                      Eight<Element>& d_up) {
  float d_gates[kPatch], d_ups[kPatch];
#pragma unroll
  for (int c = 0; c < kPatch; ++c) {
    const float g = Patch<Element>::element(gate, c), u = Patch<Element>::element(up, c);
    const float gradient = Patch<Element>::element(dh, c);
    d_gates[c] = swiglu_grad_gate(form, g, u, gradient);
    d_ups[c] = swiglu_grad_up(form, g, u, gradient);
  }
  for_eight<Element>(gate, [&](int c) { return d_gates[c]; });
  for_eight<Element>(d_up, [&](int c) { return d_ups[c]; });
}

// Both in place of four gates and ups that take turns. dh: eight neighbours, of which the first half or
// the second belongs to them.
template <typename Element, typename Form>
__device__ __forceinline__ void swiglu_grads_of_turns(const Form& form, bool second_half,
                                                      const Eight<Element>& dh,
                                                      Eight<Element>& gate_up) {
  constexpr int kHalf = Patch<Element>::kWords / 2;
  Eight<Element> half = {};
  float d[kPatch];
#pragma unroll
  for (int w = 0; w < kHalf; ++w) half[w] = second_half ? dh[w + kHalf] : dh[w];
#pragma unroll
  for (int c = 0; c < kPatch; c += 2) {
    const float g = Patch<Element>::element(gate_up, c);
    const float u = Patch<Element>::element(gate_up, c + 1);
    const float gradient = Patch<Element>::element(half, c / 2);
    d[c] = swiglu_grad_gate(form, g, u, gradient);
    d[c + 1] = swiglu_grad_up(form, g, u, gradient);
  }
  for_eight<Element>(gate_up, [&](int c) { return d[c]; });
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

// each(t, column, live) for every eight of a row's columns; live: before the last group's end. Threads
// step through them without dividing anew: 64-bit divisions took longer than the memory.
template <typename Each>
__device__ __forceinline__ void for_eights(const int32_t* offs, int E, int64_t T, int columns,
                                           const Each& each) {
  const int end = last_row_end_of_block(offs, E, T);
  const uint32_t pieces = columns / kPatch, step = gridDim.x * blockDim.x;
  const uint32_t first = blockIdx.x * blockDim.x + threadIdx.x;
  int64_t t = first / pieces;
  uint32_t piece = first % pieces;
  for (; t < T; t += step / pieces) {
    each(t, static_cast<int>(piece) * kPatch, t < end);
    piece += step % pieces;
    if (piece >= pieces) {
      piece -= pieces;
      ++t;
    }
  }
}

// Where eight of gate are in a row, and the eight of up beside them; in turns, two eights of both.
template <typename Form>
__device__ __forceinline__ int of_gate(const Form& form, int column) {
  return form.interleaved ? 2 * column : column;
}
template <typename Form>
__device__ __forceinline__ int to_up(const Form& form, int K) {
  return form.interleaved ? kPatch : K;
}

template <typename Element, typename Form>
__global__ void __launch_bounds__(kSwigluThreads)
    swiglu_kernel(const Element* gate_up, int64_t stride, bool vectorised, Form form,
                  const int32_t* offs, int E, int64_t T, int K, Element* h) {
  grid_dependency_wait();
  for_eights(offs, E, T, K, [&](int64_t t, int column, bool live) {
    Eight<Element> words = {}, up;
    if (live) {
      const Element* from = gate_up + t * stride + of_gate(form, column);
      Patch<Element>::load_words(from, vectorised, words);
      Patch<Element>::load_words(from + to_up(form, K), vectorised, up);
      swiglu_of_eight<Element>(form, words, up);
    }
    Patch<Element>::store_words(words, h + t * K + column);
  });
}

template <typename Element, typename Form>
__global__ void __launch_bounds__(kSwigluThreads)
    swiglu_grad_kernel(const Element* dh, int64_t dh_stride, const Element* gate_up, int64_t stride,
                       bool vectorised, Form form, const int32_t* offs, int E, int64_t T, int K,
                       Element* d_gate_up) {
  grid_dependency_wait();
  for_eights(offs, E, T, K, [&](int64_t t, int column, bool live) {
    Eight<Element> gate = {}, up = {};
    if (live) {
      Eight<Element> d, d_up;
      const Element* from = gate_up + t * stride + of_gate(form, column);
      Patch<Element>::load_words(dh + t * dh_stride + column, vectorised, d);
      Patch<Element>::load_words(from, vectorised, gate);
      Patch<Element>::load_words(from + to_up(form, K), vectorised, up);
      if (form.interleaved) part_turns<Element>(gate, up);
      swiglu_grads_of_eight<Element>(form, d, gate, up, d_up);
      copy_eight<Element>(up, d_up);
      if (form.interleaved) take_turns<Element>(gate, up);
    }
    Element* to = d_gate_up + 2 * t * K + of_gate(form, column);
    Patch<Element>::store_words(gate, to);
    Patch<Element>::store_words(up, to + to_up(form, K));
  });
}

// Rows of `out` [T, columns] at and past the last group's end become zero.
template <typename Element>
__global__ void __launch_bounds__(kSwigluThreads)
    zero_tail_kernel(const int32_t* offs, int E, int64_t T, int columns, Element* out) {
  grid_dependency_wait();
  const int end = last_row_end_of_block(offs, E, T);
  const int64_t pieces = columns / kPatch, count = pieces * T;
  const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.x;
  const Eight<Element> zeros = {};
  for (int64_t i = pieces * end + static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
       i < count; i += step)
    Patch<Element>::store_words(zeros, out + i * kPatch);
}

}  // namespace grouped_linear::cuda
