// SPDX-License-Identifier: Apache-2.0
// What the kernels do for ptxas alone. Each function changes no value; it changes which
// instructions or registers ptxas chooses. All were seen with nvcc 13.0 (ptxas 13.0.88) for sm_90a.
// With another compiler, remove one, run tests/test_machine_code.py and measure before trusting it.
//
// Two more of this kind cannot be functions and stand where they apply: the order of members in
// SharedStorage (smem_layout.cuh), and that no producer thread schedules (scheduler.cuh). Code like
// that before the producer's loop makes ptxas take the loop for divergent, and move every TMA's
// operands to uniform registers (32 more R2UR a k-block).
#pragma once

#include <cstdint>

#include "cuda/gemm/sm90/ptx.cuh"

namespace grouped_linear::cuda::sm90 {

// An integer that is known at compile time where it is passed to a generic lambda, like CuTe's Int.
template <int value>
struct Int {
  __device__ constexpr operator int() const { return value; }
};

// Keeps the compiler from moving uses of an accumulator across a wgmma wait or fence. wgmma writes
// its registers asynchronously, which the compiler does not know: without this it copies them, and
// ptxas serialises the wgmma (C7514).
template <int count>
__device__ __forceinline__ void fence_operand(float (&d)[count]) {
#pragma unroll
  for (int i = 0; i < count; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

// A shared memory address that stays in a register. In a long loop the compiler computes it anew
// for every use otherwise.
__device__ __forceinline__ uint32_t kept_smem_address(const void* pointer) {
  return kept(smem_address(pointer));
}

// A zero whose value the compiler does not know. It clears accumulators two at a time in register
// pairs otherwise, and spills other registers for it.
__device__ __forceinline__ float opaque_zero() {
  float zero;
  asm volatile("mov.f32 %0, 0f00000000;" : "=f"(zero));
  return zero;
}

template <int count>
__device__ __forceinline__ void clear_accumulator(float (&accum)[count]) {
  const float zero = opaque_zero();
#pragma unroll
  for (int i = 0; i < count; ++i) accum[i] = zero;
}

// Zero, computed so that ptxas does not know that all lanes agree. A sum with it stays in an
// ordinary register. In a uniform register it would displace others, which are then moved to
// accumulators' registers (1% of a K-grouped FP8 GEMM, H200, 2026-11).
__device__ __forceinline__ uint32_t divergent_zero() {
  uint32_t lane;
  asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane));
  return lane / 32;
}

// threadIdx.x, read anew. For rare code: a register that holds it through the main loop is one too
// many.
__device__ __forceinline__ int reread_thread_index() {
  int index;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(index));
  return index;
}

// Which of a thread's accumulators belongs to partial accumulator i. Partial accumulators lie in
// pairs of registers, an even one and the next. If an accumulator lies in the same half of its
// pair, the promotion's FFMA reads three operands from one register bank and waits (H200, 2026-11:
// 6% of an FP8 GEMM where half of them wait). So some accumulators are kept in the other half of
// their pair. ptxas chooses which; tests/test_machine_code.py counts the FFMAs that wait.
template <typename Config>
__device__ constexpr int accumulator_of(int i) {
  const bool swapped = Config::kScale128x128 || (Config::kScale1x128 && (i < 60 || i / 4 % 2 == 0));
  return swapped ? i ^ 1 : i;
}

}  // namespace grouped_linear::cuda::sm90
