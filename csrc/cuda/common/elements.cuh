// SPDX-License-Identifier: Apache-2.0
// The bits of bf16, fp16 and float32, one at a time and as 32-bit words.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace grouped_linear::cuda {

// Magnitudes of floats are ordered as integers, and from kInfinity up they are not finite.
template <typename Element>
struct Format;

template <>
struct Format<__nv_bfloat16> {
  using Bits = uint16_t;
  static constexpr uint32_t kInfinity = 0x7f80;
  static __device__ __forceinline__ float to_float(uint32_t bits) {
    return __uint_as_float(bits << 16);
  }
  static __device__ __forceinline__ uint32_t from_floats(float low, float high) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    return *reinterpret_cast<const uint32_t*>(&pair);
  }
};

template <>
struct Format<__half> {
  using Bits = uint16_t;
  static constexpr uint32_t kInfinity = 0x7c00;
  static __device__ __forceinline__ float to_float(uint32_t bits) {
    return __half2float(__ushort_as_half(static_cast<unsigned short>(bits)));
  }
  static __device__ __forceinline__ uint32_t from_floats(float low, float high) {
    const __half2 pair = __floats2half2_rn(low, high);
    return *reinterpret_cast<const uint32_t*>(&pair);
  }
};

template <>
struct Format<float> {
  using Bits = uint32_t;
  static constexpr uint32_t kInfinity = 0x7f800000;
  static __device__ __forceinline__ float to_float(uint32_t bits) { return __uint_as_float(bits); }
};

// A 32-bit word of elements: two of a 16-bit format, or one float32.
template <typename Element>
struct Word {
  static constexpr int kElements = 4 / sizeof(Element);
  static constexpr uint32_t kMagnitudes = kElements == 2 ? 0x7fff7fff : 0x7fffffff;

  // The bits of element i; i is a constant of an unrolled loop.
  static __device__ __forceinline__ uint32_t bits(uint32_t word, int i) {
    if constexpr (kElements == 1)
      return word;
    else
      return i == 0 ? word & 0xffff : word >> 16;
  }
  // Rounded to nearest even. float32 has no second element.
  static __device__ __forceinline__ uint32_t from_floats(float first, float second) {
    if constexpr (kElements == 1)
      return __float_as_uint(first);
    else
      return Format<Element>::from_floats(first, second);
  }

  static __device__ __forceinline__ uint32_t max(uint32_t a, uint32_t b) {
    if constexpr (kElements == 2)
      return __vmaxu2(a, b);
    else
      return ::max(a, b);
  }
  static __device__ __forceinline__ uint32_t largest(uint32_t word) {
    if constexpr (kElements == 2)
      return ::max(word & 0xffff, word >> 16);
    else
      return word;
  }
  // All ones over every magnitude that is not finite.
  static __device__ __forceinline__ uint32_t not_finite(uint32_t magnitudes) {
    constexpr uint32_t infinity = Format<Element>::kInfinity;
    if constexpr (kElements == 2)
      return __vcmpgeu2(magnitudes, infinity | infinity << 16);
    else
      return magnitudes >= infinity ? 0xffffffff : 0;
  }
};

}  // namespace grouped_linear::cuda
