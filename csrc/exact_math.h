// SPDX-License-Identifier: Apache-2.0
// Arithmetic with the same bits on CPU and CUDA: each operation is rounded to nearest, and FMA is
// only where it is written.
#pragma once

#include <cmath>
#include <cstdint>

#ifdef __CUDACC__
#define GROUPED_LINEAR_DEVICE __host__ __device__ __forceinline__
#else
#define GROUPED_LINEAR_DEVICE inline
#endif

namespace grouped_linear::exact {

// A CPU without FMA instructions computes fma in software, slowly and with the same bits. The
// intrinsics keep nvcc from contracting a product and a sum; the CPU build uses -ffp-contract=off.
GROUPED_LINEAR_DEVICE float fma(float a, float b, float c) {
#ifdef __CUDA_ARCH__
  return __fmaf_rn(a, b, c);
#else
  return std::fma(a, b, c);
#endif
}
GROUPED_LINEAR_DEVICE float mul(float a, float b) {
#ifdef __CUDA_ARCH__
  return __fmul_rn(a, b);
#else
  return a * b;
#endif
}
GROUPED_LINEAR_DEVICE float add(float a, float b) {
#ifdef __CUDA_ARCH__
  return __fadd_rn(a, b);
#else
  return a + b;
#endif
}
GROUPED_LINEAR_DEVICE float div(float a, float b) {
#ifdef __CUDA_ARCH__
  return __fdiv_rn(a, b);
#else
  return a / b;
#endif
}
GROUPED_LINEAR_DEVICE float clamp(float x, float limit) {
#ifdef __CUDA_ARCH__
  return fminf(fmaxf(x, -limit), limit);
#else
  x = x > -limit ? x : -limit;  // NaN to -limit, as fmaxf does
  return x < limit ? x : limit;
#endif
}
// NaN where x is.
GROUPED_LINEAR_DEVICE float min(float x, float limit) {
#ifdef __CUDA_ARCH__
  float result;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(x), "f"(limit));
  return result;
#else
  return x > limit ? limit : x;
#endif
}
GROUPED_LINEAR_DEVICE uint32_t bits_of(float value) { return __builtin_bit_cast(uint32_t, value); }
GROUPED_LINEAR_DEVICE float from_bits(uint32_t bits) { return __builtin_bit_cast(float, bits); }
// 1 / x, correctly rounded, for 2^-126 <= x < 2^126. On a GPU, one step of Newton's method from the
// hardware's approximation is correctly rounded for every mantissa (tested for all 1 <= x < 2^126
// on an H200), and cheaper than a division, which handles every other x.
GROUPED_LINEAR_DEVICE float inverse(float x) {
#ifdef __CUDA_ARCH__
  float r;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
  return fma(r, fma(-x, r, 1.0f), r);
#else
  return 1.0f / x;
#endif
}

// Correctly rounded, for every x. On a GPU: what nvcc makes of __fsqrt_rn for x >= 2^-101, where it
// is one step of Newton's method. Smaller x are scaled there, without the function call that nvcc
// has for them: a call in a loop spills registers.
GROUPED_LINEAR_DEVICE float sqrt(float x) {
#ifdef __CUDA_ARCH__
  const bool small = x < 0x1p-64f;
  const float scaled = small ? __fmul_rn(x, 0x1p64f) : x;
  float r;
  asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(scaled));
  const float root = __fmul_rn(scaled, r);
  const float better = fma(fma(-root, root, scaled), __fmul_rn(r, 0.5f), root);
  const float result = small ? __fmul_rn(better, 0x1p-32f) : better;
  return x == 0 || x == __int_as_float(0x7f800000) ? x : result;
#else
  return std::sqrt(x);
#endif
}

}  // namespace grouped_linear::exact
