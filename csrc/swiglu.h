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
  // exp(-g) = 2^n * 2^f with f in [-1/2, 1/2]. Adding 1.5 * 2^23 rounds to an integer, which is
  // then in the low bits; log2(e) is split in two, so that f keeps its bits.
  constexpr float kRound = 0x1.8p23f, kLog2eHigh = 0x1.715476p0f, kLog2eLow = 0x1.4ae0cp-26f;
  const float x = clamp(g, 83.0f);
  const float rounded = fma(x, -kLog2eHigh, kRound);
  const float n = add(rounded, -kRound);
  const float f = fma(x, -kLog2eLow, fma(x, -kLog2eHigh, -n));
  // 2^f within 2^-23: the polynomial of degree 5 with the smallest relative error, 1 at 0.
  float p = fma(0x1.5bb9e6p-10f, f, 0x1.3cea8cp-7f);
  p = fma(p, f, 0x1.c6b754p-5f);
  p = fma(p, f, 0x1.ebf9bcp-3f);
  p = fma(p, f, 0x1.62e42ap-1f);
  p = fma(p, f, 1.0f);
  return add(from_bits(bits_of(p) + (bits_of(rounded) << 23)), 1.0f);
}

// 1 / x by Newton's method: errors 5%, 0.3%, 7e-6, 6e-8. Division takes longer.
GROUPED_LINEAR_DEVICE float inverse(float x) {
  using namespace exact;
  float r = from_bits(0x7ef311c3u - bits_of(x));
  r = fma(r, fma(-x, r, 1.0f), r);
  r = fma(r, fma(-x, r, 1.0f), r);
  return fma(r, fma(-x, r, 1.0f), r);
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
