// SwiGLU in float32, the same bits on CPU and CUDA: one sequence of operations, each rounded to
// nearest, with FMA exactly where it is written.
//
//   sigmoid(g) = 1 / (1 + exp(-g)), silu(g) = g * sigmoid(g), h = silu(g) * up
//
// Errors of sigmoid: below 2^-21 relative for |g| <= 83, where exp(-g) is kept from there on. An
// infinite or NaN gate does not give a finite h.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#ifdef __CUDACC__
#define GROUPED_LINEAR_DEVICE __host__ __device__ __forceinline__
#else
#define GROUPED_LINEAR_DEVICE inline
#endif

namespace grouped_linear {
namespace exact {

// A CPU without FMA instructions computes fma in software, slowly and with the same bits. nvcc
// would contract a product and a sum; the CPU build is told not to.
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
GROUPED_LINEAR_DEVICE float clamp(float x, float limit) {
#ifdef __CUDA_ARCH__
  return fminf(fmaxf(x, -limit), limit);
#else
  x = x > -limit ? x : -limit;  // NaN to -limit, as fmaxf does
  return x < limit ? x : limit;
#endif
}
GROUPED_LINEAR_DEVICE uint32_t bits_of(float value) {
#ifdef __CUDA_ARCH__
  return __float_as_uint(value);
#else
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits;
#endif
}
GROUPED_LINEAR_DEVICE float from_bits(uint32_t bits) {
#ifdef __CUDA_ARCH__
  return __uint_as_float(bits);
#else
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
#endif
}

}  // namespace exact

// 1 + exp(-g)
GROUPED_LINEAR_DEVICE float one_plus_exp(float g) {
  using namespace exact;
  // exp(-g) = 2^n * exp(r) with |r| <= log(2) / 2. Adding 1.5 * 2^23 rounds to an integer, which is
  // then in the low bits.
  constexpr float kRound = 0x1.8p23f, kLog2e = 0x1.715476p0f, kLog2 = 0x1.62e43p-1f;
  const float x = clamp(g, 83.0f);
  const float rounded = fma(x, -kLog2e, kRound);
  const float r = fma(add(rounded, -kRound), -kLog2, -x);
  // exp(r) within 2^-23: the polynomial of degree 5 with the smallest relative error, 1 at 0.
  float p = fma(0x1.0f9f6cp-7f, r, 0x1.573acep-5f);
  p = fma(p, r, 0x1.555a82p-3f);
  p = fma(p, r, 0x1.fffdc4p-2f);
  p = fma(p, r, 0x1.fffff6p-1f);
  p = fma(p, r, 1.0f);
  return add(from_bits(bits_of(p) + (bits_of(rounded) << 23)), 1.0f);
}

// 1 / x, correctly rounded, for 1 <= x < 2^126. The GPU's approximation is near enough for one step of
// Newton's method to give just that: seen for every such x (H200), without what a division does for
// the others.
GROUPED_LINEAR_DEVICE float inverse(float x) {
#ifdef __CUDA_ARCH__
  float r;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
  return exact::fma(r, exact::fma(-x, r, 1.0f), r);
#else
  return 1.0f / x;
#endif
}

GROUPED_LINEAR_DEVICE float sigmoid(float g) { return inverse(one_plus_exp(g)); }

// What follows takes s = sigmoid(gate).
GROUPED_LINEAR_DEVICE float swiglu_with(float s, float gate, float up) {
  return exact::mul(exact::mul(gate, s), up);
}

// The gradients of h = silu(gate) * up:
//   d_up = dh * silu(gate)
//   d_gate = dh * up * sigmoid(gate) * (1 + gate * (1 - sigmoid(gate)))
GROUPED_LINEAR_DEVICE float swiglu_grad_up_with(float s, float gate, float dh) {
  return exact::mul(dh, exact::mul(gate, s));
}
GROUPED_LINEAR_DEVICE float swiglu_grad_gate_with(float s, float gate, float dh, float up) {
  using namespace exact;
  const float slope = mul(s, fma(gate, add(1.0f, -s), 1.0f));
  return mul(mul(dh, up), slope);
}

GROUPED_LINEAR_DEVICE float swiglu_of(float gate, float up) {
  return swiglu_with(sigmoid(gate), gate, up);
}
GROUPED_LINEAR_DEVICE float swiglu_grad_up(float dh, float gate) {
  return swiglu_grad_up_with(sigmoid(gate), gate, dh);
}
GROUPED_LINEAR_DEVICE float swiglu_grad_gate(float dh, float gate, float up) {
  return swiglu_grad_gate_with(sigmoid(gate), gate, dh, up);
}

}  // namespace grouped_linear
