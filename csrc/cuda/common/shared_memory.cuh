// SPDX-License-Identifier: Apache-2.0
// Accesses to shared memory by address, and copies to it from global memory that a thread starts and
// waits for later (cp.async).
#pragma once

#include <cstdint>

namespace grouped_linear::cuda {

__device__ __forceinline__ uint32_t smem_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// The same number, which the compiler keeps in a register: it would rather work it out again in
// every stage, a chain of instructions in front of the first load (nvcc 13.0).
__device__ __forceinline__ uint32_t kept(uint32_t number) {
  asm volatile("" : "+r"(number));
  return number;
}

__device__ __forceinline__ uint32_t ld_shared_uint(uint32_t address) {
  uint32_t value;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(value) : "r"(address));
  return value;
}
__device__ __forceinline__ float2 ld_shared_float2(uint32_t address) {
  float2 value;
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(value.x), "=f"(value.y) : "r"(address));
  return value;
}

// Four matrices of 8 rows of 16 bytes; lane i names row i % 8 of matrix i / 8.
template <bool transposed = false>
__device__ __forceinline__ void ldmatrix_x4(uint32_t* to, uint32_t from) {
  if constexpr (transposed)
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(from)
                 : "memory");
  else
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(from)
                 : "memory");
}

// Two products in bfloat16. Subnormal numbers stay what they are.
__device__ __forceinline__ uint32_t multiply_pairs(uint32_t a, uint32_t b) {
  uint32_t product;
#if __CUDA_ARCH__ >= 900
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(product) : "r"(a), "r"(b));
#else  // a * b - 0: 8.0 has no other multiplication
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(product) : "r"(a), "r"(b), "r"(0x80008000));
#endif
  return product;
}

// Starts a copy of 16 bytes, or of that many zeros, through L2 alone. Both addresses are aligned to
// 16 bytes. whole_line: L2 fetches 128 bytes.
template <bool whole_line = false>
__device__ __forceinline__ void cp_async_16(uint32_t to, const void* from, bool copies) {
  if constexpr (whole_line)
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from),
                 "r"(copies ? 16 : 0)
                 : "memory");
  else
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from),
                 "r"(copies ? 16 : 0)
                 : "memory");
}

// Commits the copies that this thread has started as one group.
__device__ __forceinline__ void cp_async_commit() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}

// Waits for all groups that this thread has committed but the last `in_flight`.
template <int in_flight = 0>
__device__ __forceinline__ void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(in_flight) : "memory");
}

}  // namespace grouped_linear::cuda
