// SPDX-License-Identifier: Apache-2.0
// The instructions of sm_80 that the portable kernels are made of.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "cuda/common/shared_memory.cuh"

namespace grouped_linear::cuda::sm80 {

// Starts a copy of 16 bytes, or of zeros where `bits & bit` is 0: in fewer instructions than
// cp_async_16, where many such bits are known before.
template <uint32_t bit>
__device__ __forceinline__ void cp_async_16_of_bits(uint32_t to, const void* from, uint32_t bits) {
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

// For memory that nobody writes. L2 fetches the whole line, for the stages that follow.
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
