// SPDX-License-Identifier: Apache-2.0
// A weight in MXFP4 as bfloat16, on its way to the tensor cores.
#pragma once

#include <cstdint>

#include "mxfp4_math.h"

namespace grouped_linear::cuda {

// Four of eight bytes, by selectors of four bits.
__device__ __forceinline__ uint32_t prmt(uint32_t a, uint32_t b, uint32_t selector) {
  uint32_t bytes;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(bytes) : "r"(a), "r"(b), "r"(selector));
  return bytes;
}

// Four of eight codes as bfloat16 without their scale: the lower bytes, and the upper ones.
template <int half>
__device__ __forceinline__ void decode_four(uint32_t codes, uint32_t& low, uint32_t& high) {
  const uint32_t selector = (codes & 0x77777777) >> 16 * half;
  // The codes' signs in the upper bits of bytes: those of odd codes are there.
  const uint32_t signs = prmt(codes << 4, codes, half == 0 ? 0x5140 : 0x7362) & 0x80808080;
  // The bytes of 0, 0.5, 1, 1.5, 2, 3, 4, 6.
  low = prmt(0xc0800000, 0xc0804000, selector);
  high = prmt(0x3f3f3f00, 0x40404040, selector) | signs;
}

// A scale's byte is the exponent of a bfloat16. 2^-127 is the only scale without an exponent, and NaN
// has a bit more than infinity: the same bit.
__device__ __forceinline__ uint32_t bfloat16_of_scale(uint32_t byte) {
  return byte << 7 | (byte == 0 || byte == mxfp4::kNanScale ? 0x40 : 0);
}

}  // namespace grouped_linear::cuda
