// SPDX-License-Identifier: Apache-2.0
// SwiGLU and its gradient over rows of eight elements, and the unfused kernels. The fused passes of
// quantize/block_swiglu.cuh use the same functions.
//
// Bytes an element of h in bf16, unfused: SwiGLU reads 4 and writes 2; its gradient reads 6 and
// writes 6, with the weighted h. A thread computes eight elements of h, or the gradients of eight
// gates and their ups.
//
// Reaches (H200, 2026-11-24) of a copy's speed: h 0.95; with alpha, beta and a limit, where the
// arithmetic takes longer than the memory, 0.85. The gradient took 0.91 to 0.94 before it wrote h;
// since then it takes 1.21 to 1.26 of that time (H100, 2026-11-25), for 1.2 times the bytes.
#pragma once

#include "cuda/common/fragments.cuh"
#include "cuda/common/pdl.cuh"
#include "swiglu_math.h"

namespace grouped_linear::cuda {

// Calls run with the arithmetic of a form. It goes around a loop: a cubic term costs 8 operations an
// element of the gradient, as many as alpha, beta and a limit. Where a gradient is bound by
// arithmetic, forms without the term therefore have a loop of their own, though no kernel.
template <typename Run>
__device__ __forceinline__ void with_arithmetic(const PlainSwiglu& form, const Run& run) {
  run(form);
}
template <typename Run>
__device__ __forceinline__ void with_arithmetic(const SwigluForm& form, const Run& run) {
  if (form.cubic == 0)
    run(SwigluWithoutCubic{form});
  else
    run(SwigluForm{form});  // a copy: nvcc 13.0 spills where it is a reference
}

// result[c] = compute(c), rounded to Element.
template <typename Element, typename Compute>
__device__ __forceinline__ void compute_row(FragmentRow<Element>& result, const Compute& compute) {
  constexpr int per_word = Word<Element>::kElements;
#pragma unroll
  for (int w = 0; w < Fragment<Element>::kWords; ++w)
    result[w] = Word<Element>::from_floats(compute(w * per_word),
                                           per_word == 2 ? compute(w * per_word + 1) : 0.0f);
}

template <typename Element>
__device__ __forceinline__ void copy_row(FragmentRow<Element>& to,
                                         const FragmentRow<Element>& from) {
#pragma unroll
  for (int w = 0; w < Fragment<Element>::kWords; ++w) to[w] = from[w];
}

// Two rows that hold 16 neighbours, gate and up interleaved, become a row of each.
template <typename Element>
__device__ __forceinline__ void deinterleave(FragmentRow<Element>& gate, FragmentRow<Element>& up) {
  constexpr int kWords = Fragment<Element>::kWords;
  FragmentRow<Element> first, second;
  copy_row<Element>(first, gate);
  copy_row<Element>(second, up);
#pragma unroll
  for (int w = 0; w < kWords; ++w) {
    const auto& from = 2 * w < kWords ? first : second;
    const uint32_t even = from[2 * w % kWords], odd = from[(2 * w + 1) % kWords];
    constexpr bool pairs = sizeof(Element) == 2;
    gate[w] = pairs ? __byte_perm(even, odd, 0x5410) : even;
    up[w] = pairs ? __byte_perm(even, odd, 0x7632) : odd;
  }
}

// The inverse of deinterleave.
template <typename Element>
__device__ __forceinline__ void interleave(FragmentRow<Element>& gate, FragmentRow<Element>& up) {
  constexpr int kWords = Fragment<Element>::kWords;
  FragmentRow<Element> gates, ups;
  copy_row<Element>(gates, gate);
  copy_row<Element>(ups, up);
#pragma unroll
  for (int w = 0; w < kWords; ++w) {
    auto& to = 2 * w < kWords ? gate : up;
    constexpr bool pairs = sizeof(Element) == 2;
    to[2 * w % kWords] = pairs ? __byte_perm(gates[w], ups[w], 0x5410) : gates[w];
    to[(2 * w + 1) % kWords] = pairs ? __byte_perm(gates[w], ups[w], 0x7632) : ups[w];
  }
}

// A form of SwiGLU with the hardware's approximations of 2^x and 1 / x: 4 instructions for a sigmoid
// in place of 15. Its relative error is below 2^-17 for |x| <= 83, a thousandth of a rounding to
// bfloat16.
template <typename Form>
struct Approximate : Form {
  __device__ explicit Approximate(const Form& form) : Form(form) {}
  static __device__ __forceinline__ float sigmoid(float x) {
    float power, inverse;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(__fmul_rn(x, -0x1.715476p0f)));
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(__fadd_rn(power, 1.0f)));
    return inverse;
  }
};

// Replaces `gate` with finish(h). Where form.interleaved, `gate` and `up` hold 16 neighbours.
template <typename Element, typename Form, typename Finish>
__device__ __forceinline__ void swiglu_row(const Form& form, FragmentRow<Element>& gate,
                                           FragmentRow<Element>& up, const Finish& finish) {
  if (form.interleaved) deinterleave<Element>(gate, up);
  FragmentRow<Element> h;
  compute_row<Element>(h, [&](int c) {
    return finish(
        swiglu_of(form, Fragment<Element>::element(gate, c), Fragment<Element>::element(up, c)));
  });
  copy_row<Element>(gate, h);
}

// The numbers of a row of the expert layer's backward besides its elements.
struct WeightedRow {
  float weight;    // of the row's output in the sum over a token's experts
  float d_weight;  // the sum of dh * h so far

  // Takes part of dh and h, and returns the gradient by the unweighted h.
  __device__ __forceinline__ float gradient(float dh, float h) {
    d_weight = __fmaf_rn(dh, h, d_weight);
    return __fmul_rn(weight, dh);
  }
};

// Replaces `gate` with d_gate and `up` with d_up. h is weighted.
template <typename Element, typename Form>
__device__ __forceinline__ void swiglu_grad_row(const Form& form, WeightedRow& row,
                                                const FragmentRow<Element>& dh,
                                                FragmentRow<Element>& gate,
                                                FragmentRow<Element>& up, FragmentRow<Element>& h) {
  float d_gates[kFragmentSize], d_ups[kFragmentSize], hs[kFragmentSize];
#pragma unroll
  for (int c = 0; c < kFragmentSize; ++c) {
    const float g = Fragment<Element>::element(gate, c), u = Fragment<Element>::element(up, c);
    const float unweighted = swiglu_of(form, g, u);
    const float gradient = row.gradient(Fragment<Element>::element(dh, c), unweighted);
    d_gates[c] = swiglu_grad_gate(form, g, u, gradient);
    d_ups[c] = swiglu_grad_up(form, g, u, gradient);
    hs[c] = __fmul_rn(row.weight, unweighted);
  }
  compute_row<Element>(gate, [&](int c) { return d_gates[c]; });
  compute_row<Element>(up, [&](int c) { return d_ups[c]; });
  compute_row<Element>(h, [&](int c) { return hs[c]; });
}

// The column of gate_up where eight gates start, and how far their ups are. Where the two are
// interleaved, these are the two halves of 16 neighbours.
template <typename Form>
__device__ __forceinline__ int gate_column(const Form& form, int column) {
  return form.interleaved ? 2 * column : column;
}
template <typename Form>
__device__ __forceinline__ int up_offset(const Form& form, int K) {
  return form.interleaved ? kFragmentSize : K;
}

// On the host: calls run with the form, as PlainSwiglu where it is that one, whose kernels are
// faster.
template <typename Run>
void for_form(const SwigluForm& form, const Run& run) {
  if (form.is_plain())
    run(PlainSwiglu());
  else
    run(form);
}

constexpr int kSwigluThreads = 256;

// Calls each(t, column, in_group) for every eight columns of every row; in_group is false from the
// last group's end on. Threads step without a division: 64-bit divisions took longer than the
// memory.
template <typename Each>
__device__ __forceinline__ void for_each_fragment_row(const int32_t* offs, int E, int64_t T,
                                                      int columns, const Each& each) {
  const int end = last_row_end(offs, E, T);
  const uint32_t per_row = columns / kFragmentSize, step = gridDim.x * blockDim.x;
  const uint32_t first = blockIdx.x * blockDim.x + threadIdx.x;
  int64_t t = first / per_row;
  uint32_t i = first % per_row;
  for (; t < T; t += step / per_row) {
    each(t, static_cast<int>(i) * kFragmentSize, t < end);
    i += step % per_row;
    if (i >= per_row) {
      i -= per_row;
      ++t;
    }
  }
}

template <typename Element, typename Form>
__global__ void __launch_bounds__(kSwigluThreads)
    swiglu_kernel(const Element* gate_up, int64_t stride, bool vectorised, Form form,
                  const int32_t* offs, int E, int64_t T, int K, Element* h) {
  grid_dependency_wait();
  for_each_fragment_row(offs, E, T, K, [&](int64_t t, int column, bool in_group) {
    FragmentRow<Element> row = {}, up;
    if (in_group) {
      const Element* from = gate_up + t * stride + gate_column(form, column);
      Fragment<Element>::load_row(from, vectorised, row);
      Fragment<Element>::load_row(from + up_offset(form, K), vectorised, up);
      swiglu_row<Element>(form, row, up, [](float h) { return h; });
    }
    Fragment<Element>::store_row(row, h + t * K + column);
  });
}

// A warp takes a row, so that d_weight is one sum in a fixed order: every lane adds its elements,
// then the lanes are added in pairs.
template <typename Element, typename Form>
__global__ void __launch_bounds__(kSwigluThreads)
    swiglu_grad_kernel(const Element* dh, int64_t dh_stride, const Element* gate_up, int64_t stride,
                       bool vectorised, const float* weight, Form form, const int32_t* offs, int E,
                       int64_t T, int K, Element* d_gate_up, Element* h, float* d_weight) {
  grid_dependency_wait();
  constexpr int kWarps = kSwigluThreads / 32;
  const int end = last_row_end(offs, E, T), lane = threadIdx.x % 32;
  for (int64_t t = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32; t < T;
       t += static_cast<int64_t>(gridDim.x) * kWarps) {
    const bool in_group = t < end;
    WeightedRow row{in_group ? weight[t] : 0.0f, 0.0f};
    for (int column = lane * kFragmentSize; column < K; column += 32 * kFragmentSize) {
      FragmentRow<Element> gate = {}, up = {}, weighted = {};
      if (in_group) {
        FragmentRow<Element> d;
        const Element* from = gate_up + t * stride + gate_column(form, column);
        Fragment<Element>::load_row(dh + t * dh_stride + column, vectorised, d);
        Fragment<Element>::load_row(from, vectorised, gate);
        Fragment<Element>::load_row(from + up_offset(form, K), vectorised, up);
        if (form.interleaved) deinterleave<Element>(gate, up);
        swiglu_grad_row<Element>(form, row, d, gate, up, weighted);
        if (form.interleaved) interleave<Element>(gate, up);
      }
      Element* to = d_gate_up + 2 * t * K + gate_column(form, column);
      Fragment<Element>::store_row(gate, to);
      Fragment<Element>::store_row(up, to + up_offset(form, K));
      Fragment<Element>::store_row(weighted, h + t * K + column);
    }
    float sum = row.d_weight;
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2)
      sum = __fadd_rn(sum, __shfl_xor_sync(kFullWarp, sum, distance));
    if (lane == 0) d_weight[t] = sum;
  }
}

// Adds the partial sums [col blocks, T] of each row, from the first to the last. Rows of no group
// have no partial sums and get zero.
static __global__ void __launch_bounds__(kSwigluThreads)
    sum_partial_d_weight_kernel(const float* partial, int col_blocks, const int32_t* offs, int E,
                                int64_t T, float* d_weight) {
  grid_dependency_wait();
  const int end = last_row_end(offs, E, T);
  for (int64_t t = static_cast<int64_t>(blockIdx.x) * kSwigluThreads + threadIdx.x; t < T;
       t += static_cast<int64_t>(gridDim.x) * kSwigluThreads) {
    float sum = 0;
    if (t < end)
      for (int block = 0; block < col_blocks; ++block) sum = __fadd_rn(sum, partial[block * T + t]);
    d_weight[t] = sum;
  }
}

// Sets rows of `out` [T, columns] from the last group's end on to zero.
template <typename Element>
__global__ void __launch_bounds__(kSwigluThreads)
    zero_tail_kernel(const int32_t* offs, int E, int64_t T, int columns, Element* out) {
  grid_dependency_wait();
  const int end = last_row_end(offs, E, T);
  const int64_t per_row = columns / kFragmentSize, count = per_row * T;
  const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.x;
  const FragmentRow<Element> zeros = {};
  for (int64_t i = per_row * end + static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
       i < count; i += step)
    Fragment<Element>::store_row(zeros, out + i * kFragmentSize);
}

}  // namespace grouped_linear::cuda
