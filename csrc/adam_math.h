// SPDX-License-Identifier: Apache-2.0
// A step of Adam for one number of a weight, in float32, with the bits of torch's fused AdamW on a GPU.
//
//   AdamW: w = w * (1 - lr * weight_decay);  Adam: g = g + weight_decay * w
//   m = beta1 * m + (1 - beta1) * g
//   v = beta2 * v + (1 - beta2) * g * g
//   w = w - lr / (1 - beta1^step) * m / (sqrt(v) / sqrt(1 - beta2^step) + eps)
#pragma once

#include "exact_math.h"

namespace grouped_linear {

// A user's options, which kernels receive.
struct AdamOptions {
  double lr, beta1, beta2, weight_decay, eps;
  bool decoupled_weight_decay, maximize;
};

// A step of torch's fused AdamW over a parameter in high precision, bit for bit as torch computes it
// on a GPU (aten/src/ATen/native/cuda/fused_adam_utils.cuh of torch 2.11 to 2.14): in float32, with
// FMA where torch's source says so, and where nvcc makes one of it. Adam, whose gradient is decayed,
// rounds like torch only where weight_decay is 0: there nvcc makes one or none by what follows.
struct AdamStep {
  float beta1, beta2, decay, eps, step_size, root;
  bool decays, decoupled_weight_decay, maximize;

  // step: 1 in the first step.
  GROUPED_LINEAR_DEVICE AdamStep(const AdamOptions& options, double lr, float step)
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

}  // namespace grouped_linear
