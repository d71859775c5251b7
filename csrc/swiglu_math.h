// SPDX-License-Identifier: Apache-2.0
// SwiGLU in float32, with the same bits on CPU and CUDA: one sequence of operations, each rounded
// to nearest, and FMA only where it is written.
//
//   g = min(gate, limit), u = min(max(up, -limit), limit), sigmoid(x) = 1 / (1 + exp(-x))
//   h = g * sigmoid(alpha * (g + cubic * g^3)) * (u + beta)
//
// Plain SwiGLU (alpha 1, beta 0, no limit, cubic 0) is silu(gate) * up. The tanh form of GELU is a
// sigmoid too, for 0.5 * (1 + tanh(x)) = sigmoid(2 * x): alpha is 2 * sqrt(2 / pi) there, and cubic
// 0.044715.
//
// The relative error of sigmoid is below 2^-21 for |x| <= 83; x is clamped to that. A NaN, or an
// infinity without a limit, does not give a finite h. With a cubic term no finite gate gives a NaN,
// whatever overflows on the way; without one, a gate whose product with alpha overflows may, in its
// gradient.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>

#include "exact_math.h"

namespace grouped_linear {

// exp(-g), with g clamped to [-83, 83]
GROUPED_LINEAR_DEVICE float exp_of_minus(float g) {
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
  return from_bits(bits_of(p) + (bits_of(rounded) << 23));
}

// 1 + exp(-g)
GROUPED_LINEAR_DEVICE float one_plus_exp(float g) { return exact::add(exp_of_minus(g), 1.0f); }

// SwiGLU's forms: constants for the plain one, parameters for the others.
//   scaled_gate  what sigmoid is taken of
//   slope        the derivative by g of g * s
struct PlainSwiglu {
  static constexpr bool interleaved = false;
  GROUPED_LINEAR_DEVICE static float sigmoid(float x) { return exact::inverse(one_plus_exp(x)); }
  GROUPED_LINEAR_DEVICE static float product(float a, float b) { return exact::mul(a, b); }
  GROUPED_LINEAR_DEVICE float gate(float g) const { return g; }
  GROUPED_LINEAR_DEVICE float up(float u) const { return u; }
  GROUPED_LINEAR_DEVICE float scaled_gate(float g) const { return g; }
  GROUPED_LINEAR_DEVICE float slope(float s, float g) const {
    using namespace exact;
    return mul(s, fma(g, add(1.0f, -s), 1.0f));
  }
  GROUPED_LINEAR_DEVICE bool clamps_gate(float) const { return false; }
  GROUPED_LINEAR_DEVICE bool clamps_up(float) const { return false; }
};

// swiglu_form makes it.
struct SwigluForm {
  float alpha = 1, beta = 0, limit = std::numeric_limits<float>::infinity();
  bool interleaved = false;                               // gate and up are columns 2 c and 2 c + 1
  float cubic = 0, slope_cubic = 0;                       // times alpha, and times 3 * alpha
  float slope_limit = std::numeric_limits<float>::max();  // see swiglu_form

  GROUPED_LINEAR_DEVICE static float sigmoid(float x) { return exact::inverse(one_plus_exp(x)); }
  // +0 in place of -0, which a negative beta would make of the zeros past a group's end.
  GROUPED_LINEAR_DEVICE static float product(float a, float b) { return exact::fma(a, b, 0.0f); }
  GROUPED_LINEAR_DEVICE float gate(float g) const { return clamps_gate(g) ? limit : g; }
  GROUPED_LINEAR_DEVICE float up(float u) const {
    u = u > limit ? limit : u;
    return exact::add(u < -limit ? -limit : u, beta);
  }
  GROUPED_LINEAR_DEVICE float scaled_gate(float g) const { return scaled(g, cubic); }
  GROUPED_LINEAR_DEVICE float slope(float s, float g) const {
    using namespace exact;
    const float x = scaled(clamp(g, slope_limit), slope_cubic);
    const float one = fma(g, 0.0f, 1.0f);  // NaN for what is not finite, which the clamp hides
    return mul(s, fma(x, add(1.0f, -s), one));
  }
  // No gradient passes beyond the limit. At the limit it does.
  GROUPED_LINEAR_DEVICE bool clamps_gate(float g) const { return g > limit; }
  GROUPED_LINEAR_DEVICE bool clamps_up(float u) const { return u > limit || u < -limit; }

  bool is_plain() const {
    return alpha == 1 && beta == 0 && !interleaved && cubic == 0 &&
           limit == std::numeric_limits<float>::infinity();
  }

 private:
  // alpha * g + factor * g^3
  GROUPED_LINEAR_DEVICE float scaled(float g, float factor) const {
    using namespace exact;
    return mul(fma(mul(factor, g), g, alpha), g);
  }
};

// The same without a cubic term, in fewer operations: see with_arithmetic.
struct SwigluWithoutCubic : SwigluForm {
  GROUPED_LINEAR_DEVICE float scaled_gate(float g) const { return exact::mul(alpha, g); }
  GROUPED_LINEAR_DEVICE float slope(float s, float g) const {
    using namespace exact;
    return mul(s, fma(scaled_gate(g), add(1.0f, -s), 1.0f));
  }
};

// On the host. Each number is finite in float32; the limit is an infinity where there is none.
inline SwigluForm swiglu_form(double alpha, double beta, float limit, bool interleaved,
                              double cubic) {
  static constexpr double most = std::numeric_limits<float>::max();
  const auto rounded = [](double x) { return static_cast<float>(std::clamp(x, -most, most)); };
  SwigluForm form;
  form.alpha = rounded(alpha);
  form.beta = rounded(beta);
  form.limit = limit;
  form.interleaved = interleaved;
  form.cubic = rounded(alpha * cubic);
  form.slope_cubic = rounded(3 * alpha * cubic);
  // The slope of a larger gate is computed at slope_limit. From |alpha * cubic * g^3| = 83 on s is
  // constant, so that the slope is s but for 2^-111. Nothing may overflow: an infinity
  // times the zero of 1 - s is NaN.
  const double size = std::abs(alpha);
  if (size * cubic > 0)
    form.slope_limit = static_cast<float>(
        std::min(most / 2 / std::max(size, 1.0), std::cbrt(83 / (size * cubic))));
  return form;
}

// 1 / s, for the s of the functions below.
template <typename Form>
GROUPED_LINEAR_DEVICE float one_plus_exp(const Form& form, float gate) {
  return one_plus_exp(form.scaled_gate(form.gate(gate)));
}

// The functions below take s = sigmoid(alpha * (g + cubic * g^3)).
template <typename Form>
GROUPED_LINEAR_DEVICE float swiglu_with(const Form& form, float s, float gate, float up) {
  return form.product(exact::mul(form.gate(gate), s), form.up(up));
}

// The gradients of h, 0 beyond the limit:
//   d_up = dh * g * s
//   d_gate = dh * (u + beta) * s * (1 + alpha * (g + 3 * cubic * g^3) * (1 - s))
template <typename Form>
GROUPED_LINEAR_DEVICE float swiglu_grad_up_with(const Form& form, float s, float gate, float up,
                                                float dh) {
  const float d = form.product(dh, exact::mul(form.gate(gate), s));
  return form.clamps_up(up) ? 0.0f : d;
}
template <typename Form>
GROUPED_LINEAR_DEVICE float swiglu_grad_gate_with(const Form& form, float s, float gate, float up,
                                                  float dh) {
  const float d = form.product(exact::mul(dh, form.up(up)), form.slope(s, form.gate(gate)));
  return form.clamps_gate(gate) ? 0.0f : d;
}

template <typename Form>
GROUPED_LINEAR_DEVICE float sigmoid_of(const Form& form, float gate) {
  return form.sigmoid(form.scaled_gate(form.gate(gate)));
}
template <typename Form>
GROUPED_LINEAR_DEVICE float swiglu_of(const Form& form, float gate, float up) {
  return swiglu_with(form, sigmoid_of(form, gate), gate, up);
}
template <typename Form>
GROUPED_LINEAR_DEVICE float swiglu_grad_up(const Form& form, float gate, float up, float dh) {
  return swiglu_grad_up_with(form, sigmoid_of(form, gate), gate, up, dh);
}
template <typename Form>
GROUPED_LINEAR_DEVICE float swiglu_grad_gate(const Form& form, float gate, float up, float dh) {
  return swiglu_grad_gate_with(form, sigmoid_of(form, gate), gate, up, dh);
}

}  // namespace grouped_linear
