// SPDX-License-Identifier: Apache-2.0
// Scales and conversions of FP8.
//
// They give the bits of cpu/tile.cpp and cpu/numerics.h: every operation is IEEE, rounds to
// nearest, keeps subnormals and is never contracted into an FMA.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <cstdint>
#include <type_traits>

namespace grouped_linear::cuda {

struct ScaleRule {
  float amax_epsilon;
  bool power_of_two;
};

// A block is multiplied by `factor` to quantize it and by `scale` to dequantize it.
struct BlockScale {
  float factor, scale;
};

// fp8_max is 1.75 times a power of two, in e4m3 and in e5m2.
__device__ __forceinline__ BlockScale block_scale(float amax, ScaleRule rule,
                                                  float fp8_max = 448.0f) {
  amax = fmaxf(amax, rule.amax_epsilon);
  if (amax == 0) return {1, 1};
  if (rule.power_of_two) {
    // The exponent of fp8_max / amax, without a division. It is at most 126, so that 1 / factor is
    // a normal number; a subnormal amax reaches that bound.
    const uint32_t bits = __float_as_uint(amax), mantissa = 0x7fffff;
    const uint32_t top = (__float_as_uint(fp8_max) >> 23) + 127;
    const uint32_t exponent = min(top - (bits >> 23) - ((bits & mantissa) > 0x600000), 253u);
    return {__uint_as_float(exponent << 23), __uint_as_float((254 - exponent) << 23)};
  }
  const float factor = fminf(__fdiv_rn(fp8_max, amax), 0x1p126f);
  return {factor, __fdiv_rn(1.0f, factor)};
}

// Four FP8 numbers, the first in the lowest byte. NaN becomes 0x7f. Infinity saturates like any
// other number: callers turn it into NaN before (Fragment::find_amax) or patch its byte after.
template <__nv_fp8_interpretation_t format = __NV_E4M3>
__device__ __forceinline__ uint32_t to_fp8x4(float a, float b, float c, float d) {
  const uint32_t low = __nv_cvt_float2_to_fp8x2(make_float2(a, b), __NV_SATFINITE, format);
  const uint32_t high = __nv_cvt_float2_to_fp8x2(make_float2(c, d), __NV_SATFINITE, format);
  return low | high << 16;
}

template <__nv_fp8_interpretation_t format = __NV_E4M3>
__device__ __forceinline__ uint2 to_fp8x8(const float (&p)[8]) {
  return make_uint2(to_fp8x4<format>(p[0], p[1], p[2], p[3]),
                    to_fp8x4<format>(p[4], p[5], p[6], p[7]));
}

// The two e4m3 numbers in the low 16 bits, exactly: every e4m3 number is an fp16 number.
__device__ __forceinline__ float2 from_e4m3x2(uint32_t bytes) {
  return __half22float2(
      __nv_cvt_fp8x2_to_halfraw2(static_cast<__nv_fp8x2_storage_t>(bytes & 0xffff), __NV_E4M3));
}

// The bits of a dequantized number. NaN has one encoding, the CPU's.
template <typename Output>
__device__ __forceinline__ uint32_t dequantized_bits(float value) {
  if constexpr (sizeof(Output) == 4)
    return value != value ? 0x7fc00000 : __float_as_uint(value);
  else if constexpr (std::is_same_v<Output, __half>)
    return value != value ? 0x7e00 : __half_as_ushort(__float2half_rn(value));
  else
    return value != value ? 0x7fc0 : __bfloat16_as_ushort(__float2bfloat16_rn(value));
}

}  // namespace grouped_linear::cuda
