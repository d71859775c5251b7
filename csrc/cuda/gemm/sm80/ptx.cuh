// SPDX-License-Identifier: Apache-2.0
// The instructions of sm_80 that the portable kernels are made of.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

namespace grouped_linear::cuda::sm80 {

__device__ __forceinline__ uint32_t smem_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// The same number, which the compiler keeps in a register: it would rather work it out again in
// every stage, a chain of instructions in front of the first load (nvcc 13.0).
__device__ __forceinline__ uint32_t kept(uint32_t number) {
  asm volatile("" : "+r"(number));
  return number;
}

// Starts a copy of 16 bytes to an address in shared memory; of zeros where `bits & bit` is 0.
template <uint32_t bit>
__device__ __forceinline__ void cp_async_16(uint32_t to, const void* from, uint32_t bits) {
  asm volatile(
      "{\n"
      ".reg .pred zeros;\n"
      ".reg .b32 masked;\n"
      "and.b32 masked, %2, %3;\n"
      "setp.eq.u32 zeros, masked, 0;\n"
      "cp.async.cg.shared.global.L2::128B [%0], [%1], 16, zeros;\n"
      "}\n" ::"r"(to),
      "l"(from), "r"(bits), "n"(bit)
      : "memory");
}

// The same of one float.
__device__ __forceinline__ void cp_async_float(uint32_t to, const float* from, bool in_bounds) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to), "l"(from),
               "r"(in_bounds ? 4 : 0)
               : "memory");
}

__device__ __forceinline__ float2 ld_shared_float2(uint32_t from) {
  float2 value;
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(value.x), "=f"(value.y) : "r"(from));
  return value;
}

// Of memory that nobody writes. L2 fetches the whole line, for the stages that follow.
__device__ __forceinline__ uint4 ld_global_16(const uint4* from) {
  uint4 v;
  asm volatile("ld.global.nc.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(from));
  return v;
}

__device__ __forceinline__ void st_shared_16(uint32_t to, const uint32_t (&words)[4]) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(words[0]), "r"(words[1]),
               "r"(words[2]), "r"(words[3])
               : "memory");
}

// Two products in bfloat16, a * b - 0: 8.0 has no other multiplication. Subnormal numbers stay what
// they are.
__device__ __forceinline__ uint32_t multiply_pairs(uint32_t a, uint32_t b) {
  uint32_t product;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(product) : "r"(a), "r"(b), "r"(0x80008000));
  return product;
}

// Four matrices of 8 rows of 16 bytes; lane i names row i % 8 of matrix i / 8.
template <bool transposed = false>
__device__ __forceinline__ void ldmatrix_x4(uint32_t (&to)[4], uint32_t from) {
  if constexpr (transposed)
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(from));
  else
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(from));
}

#define GROUPED_LINEAR_MMA(shape, a_type, b_type)                                           \
  asm("mma.sync.aligned." shape ".row.col.f32." a_type "." b_type                           \
      ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%10, %11, %12, %13};"            \
      : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])                                      \
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(c[0]), "f"(c[1]), \
        "f"(c[2]), "f"(c[3]))

// d = a @ b.T + c. a: 16 rows, b: 8 rows, both of 16 elements.
template <typename T>
__device__ __forceinline__ void mma_16bit(float (&d)[4], const uint32_t (&a)[4], uint32_t b0,
                                          uint32_t b1, const float (&c)[4]) {
  if constexpr (std::is_same_v<T, __half>)
    GROUPED_LINEAR_MMA("m16n8k16", "f16", "f16");
  else
    GROUPED_LINEAR_MMA("m16n8k16", "bf16", "bf16");
}

}  // namespace grouped_linear::cuda::sm80
