// A step of Adam for one number of a weight. Where the weight is FP8 alone, AdamStep has the same
// bits on CPU and CUDA; where it has high-precision numbers, TorchAdamStep has torch's.
//
//   AdamW: w = w * (1 - lr * weight_decay);  Adam: g = g + weight_decay * w
//   m = beta1 * m + (1 - beta1) * g
//   v = beta2 * v + (1 - beta2) * g * g
//   w = w - lr / (1 - beta1^step) * m / (sqrt(v) / sqrt(1 - beta2^step) + eps)
//
// as torch's fused AdamW, in float32; the factors that follow from step are computed in float64.
#pragma once

#include "exact_math.h"

namespace grouped_linear {

// What a user chooses. Passed to kernels.
struct AdamOptions {
  double lr, beta1, beta2, weight_decay, eps;
  bool decoupled_weight_decay, maximize, stochastic_rounding;
};

// A step past the range of uint32 has no bias left to correct. NaN counts as 0.
GROUPED_LINEAR_DEVICE uint32_t counted(float step) {
  return step >= 4294967040.0f ? 0xffffffffu : step > 0 ? static_cast<uint32_t>(step) : 0;
}

// base^n by squaring: libraries' pow differ in the last bits.
GROUPED_LINEAR_DEVICE double power(double base, uint32_t n) {
  double result = 1;
  for (; n > 0; n >>= 1) {
    if (n & 1) result = exact::mul(result, base);
    base = exact::mul(base, base);
  }
  return result;
}

// Mixes 32 bits so that each depends on all (MurmurHash3's finalizer, but for its last step, which
// changes low bits only).
GROUPED_LINEAR_DEVICE uint32_t mixed(uint32_t h) {
  h = (h ^ (h >> 16)) * 0x85ebca6bu;
  return (h ^ (h >> 13)) * 0xc2b2ae35u;
}

// The constants of one step.
struct AdamStep {
  float beta1, beta2, new_beta1, new_beta2, decay, step_size, root, eps;
  uint32_t seed;  // of the noise
  bool decoupled_weight_decay, maximize;

  // step: 1 in the first step.
  GROUPED_LINEAR_DEVICE AdamStep(const AdamOptions& options, double lr, float step)
      : beta1(static_cast<float>(options.beta1)),
        beta2(static_cast<float>(options.beta2)),
        new_beta1(static_cast<float>(exact::one_minus(options.beta1))),
        new_beta2(static_cast<float>(exact::one_minus(options.beta2))),
        eps(static_cast<float>(options.eps)),
        decoupled_weight_decay(options.decoupled_weight_decay),
        maximize(options.maximize) {
    const uint32_t n = counted(step);
    decay = static_cast<float>(decoupled_weight_decay
                                   ? exact::one_minus(exact::mul(lr, options.weight_decay))
                                   : options.weight_decay);
    step_size = static_cast<float>(lr / exact::one_minus(power(options.beta1, n)));
    root = static_cast<float>(1 / ::sqrt(exact::one_minus(power(options.beta2, n))));
    seed = mixed(n + 0x9e3779b9u);
  }

  // What unscaled takes in place of a grad_scale, and a gradient divided by that.
  static GROUPED_LINEAR_DEVICE float prepared(float grad_scale) {
    return exact::div(1, grad_scale);
  }
  static GROUPED_LINEAR_DEVICE float unscaled(float g, float inverse) {
    return exact::mul(g, inverse);
  }

  // Updates m and v, and max_v where it is not null, and returns the new weight.
  GROUPED_LINEAR_DEVICE float update(float w, float g, float& m, float& v, float* max_v) const {
    using namespace exact;
    if (maximize) g = -g;
    if (decoupled_weight_decay)
      w = mul(w, decay);
    else
      g = fma(decay, w, g);
    m = fma(beta1, m, mul(new_beta1, g));
    v = fma(beta2, v, mul(mul(new_beta2, g), g));
    float largest = v;
    if (max_v) {
      // NaN stays, as in torch's maximum.
      largest = *max_v = *max_v >= v || *max_v != *max_v ? *max_v : v;
    }
    const float denominator = fma(exact::sqrt(largest), root, eps);
    constexpr float kLargest = 0x1p125f;  // infinity has no inverse here
    const float divisor = denominator > kLargest ? kLargest : denominator;
    return fma(-step_size, mul(m, inverse(divisor)), w);
  }

  // 20 random bits for the number w at a position of its expert. They follow from the step, the
  // position and the number, so processes that hold the same expert round alike, whatever other
  // experts they hold.
  GROUPED_LINEAR_DEVICE uint32_t noise(float w, uint32_t position) const {
    return mixed(exact::bits_of(w) ^ (position * 0x9e3779b9u + seed)) >> 12;
  }
};

// A step of torch's fused AdamW over a parameter in high precision, bit for bit as torch computes it
// on a GPU (aten/src/ATen/native/cuda/fused_adam_utils.cuh of torch 2.11 to 2.14): in float32, with
// FMA where torch's source says so, and where nvcc makes one of it. Adam, whose gradient is decayed,
// rounds like torch only where weight_decay is 0: there nvcc makes one or none by what follows.
struct TorchAdamStep {
  float beta1, beta2, decay, eps, step_size, root;
  bool decays, decoupled_weight_decay, maximize;

  // step: 1 in the first step.
  GROUPED_LINEAR_DEVICE TorchAdamStep(const AdamOptions& options, double lr, float step)
      : beta1(static_cast<float>(options.beta1)),
        beta2(static_cast<float>(options.beta2)),
        eps(static_cast<float>(options.eps)),
        decays(options.weight_decay != 0),
        decoupled_weight_decay(options.decoupled_weight_decay),
        maximize(options.maximize) {
    const auto rate = static_cast<float>(lr), decay_rate = static_cast<float>(options.weight_decay);
    decay = decoupled_weight_decay ? exact::mul(rate, decay_rate) : decay_rate;
    step_size = exact::div(rate, 1 - ::powf(beta1, step));
    root = exact::sqrt(1 - ::powf(beta2, step));
  }

  static GROUPED_LINEAR_DEVICE float prepared(float grad_scale) { return grad_scale; }
  static GROUPED_LINEAR_DEVICE float unscaled(float g, float grad_scale) {
    return exact::div(g, grad_scale);
  }

  // Updates m and v, and max_v where it is not null, and returns the new parameter.
  GROUPED_LINEAR_DEVICE float update(float p, float g, float& m, float& v, float* max_v) const {
    using namespace exact;
    if (maximize) g = -g;
    if (decays) {
      if (decoupled_weight_decay)
        p = fma(-decay, p, p);
      else
        g = fma(decay, p, g);
    }
    const float square = mul(g, g);
    m = fma(beta1, m, fma(-beta1, g, g));
    v = fma(beta2, v, fma(-beta2, square, square));
    float largest = v;
    if (max_v) largest = *max_v = *max_v < v ? v : *max_v;
    const float denominator = add(div(exact::sqrt(largest), root), eps);
    return add(p, -div(mul(step_size, m), denominator));
  }
};

// e4m3 of a product, rounded up with the probability that makes the expected value exact. A float32
// has 20 more bits of mantissa than an e4m3: 20 random bits are added to them, then they are cut
// off. Subnormal numbers have the spacing of the smallest normal ones, 2^-6, and are shifted up
// there to round. What exceeds 448 saturates; NaN and infinity become NaN.
GROUPED_LINEAR_DEVICE uint32_t to_e4m3_stochastically(float product, uint32_t noise) {
  constexpr float kSmallestNormal = 0x1p-6f;
  constexpr uint32_t kSmallestBits = 121u << 23, kDropped = 20, kBias = (127 - 7) << 3;
  const uint32_t bits = exact::bits_of(product), magnitude = bits & 0x7fffffff;
  const bool subnormal = magnitude < kSmallestBits;
  const uint32_t lifted =
      subnormal ? exact::bits_of(exact::add(exact::from_bits(magnitude), kSmallestNormal))
                : magnitude;
  uint32_t code = ((lifted + noise) >> kDropped) - kBias - (subnormal ? 8 : 0);
  code = code < 0x7e ? code : 0x7e;
  return magnitude >= 0x7f800000 ? 0x7f : code | ((bits >> 24) & 0x80);
}

}  // namespace grouped_linear
