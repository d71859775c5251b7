// SPDX-License-Identifier: Apache-2.0
// Scores of experts, and the weights of the chosen ones, with the same bits on CPU and CUDA: each
// operation is rounded to nearest, and sums over experts are 32 sums, of every 32nd, and a tree.
#pragma once

#include "exact_math.h"
#include "swiglu_math.h"

namespace grouped_linear {

enum class ScoreFunction { kNone, kSoftmax, kSigmoid };

// An addend that keeps a sum of weights from being zero: DeepSeek-V3's.
constexpr float kWeightEpsilon = 1e-20f;

// How weights follow from the logits l of a token's experts. Its scores s are
//   none     l[e]
//   softmax  exp(l[e] - max) / the sum over all experts
//   sigmoid  1 / (1 + exp(-l[e]))
// and a chosen one's weight is scale * s, with `normalize` scale * s / (the sum of the chosen +
// epsilon). There softmax's sum cancels but for epsilon: undivided scores, and epsilon times the
// sum. Where the largest logit is among the chosen, epsilon vanishes in float32. With a
// bias it may not be.
struct Scoring {
  ScoreFunction function = ScoreFunction::kNone;
  bool normalize = false;
  float scale = 1;

  GROUPED_LINEAR_DEVICE bool is_softmax() const { return function == ScoreFunction::kSoftmax; }

  // The score of a logit. max and sum: of softmax; a sum of 1 leaves it undivided. A NaN stays one.
  GROUPED_LINEAR_DEVICE float score(float logit, float max, float sum) const {
    using namespace exact;
    constexpr float kFarthest = 83.0f;  // exp(-83) is 1e-36: what is farther away has no weight
    if (function == ScoreFunction::kSoftmax) {
      const float below = add(max, -logit);
      const float exp = below <= kFarthest ? exp_of_minus(below) : below > kFarthest ? 0.0f : below;
      return div(exp, sum);
    }
    if (function == ScoreFunction::kSigmoid)
      return logit >= -kFarthest ? inverse(one_plus_exp(logit)) : logit < -kFarthest ? 0.0f : logit;
    return logit;
  }

  // The weight of a score. total: the sum of the chosen ones' scores.
  GROUPED_LINEAR_DEVICE float weight(float score, float total) const {
    using namespace exact;
    return mul(normalize ? div(score, add(total, kWeightEpsilon)) : score, scale);
  }

  // Whether epsilon counts beside the total of undivided scores. Above, 1024 epsilon are less than
  // half of a total's last bit.
  GROUPED_LINEAR_DEVICE bool epsilon_counts(float total) const {
    return is_softmax() && normalize && total < 0x1p-30f;
  }

  // The gradient by a chosen expert's logit. s: its score; d_weight: the gradient by its weight;
  // total, dot: sums of s and of d_weight * s, over the chosen ones. Undivided scores of softmax
  // where weights are normalized, and then epsilon times their sum where it counts.
  GROUPED_LINEAR_DEVICE float gradient(float s, float d_weight, float total, float dot,
                                       float epsilon) const {
    using namespace exact;
    float d_score = mul(scale, d_weight);
    if (normalize) {
      const float sum = add(total, epsilon);
      d_score = div(mul(scale, add(d_weight, -div(dot, sum))), sum);
    } else if (function == ScoreFunction::kSoftmax) {
      d_score = mul(scale, add(d_weight, -dot));
    }
    if (function == ScoreFunction::kSoftmax) return mul(d_score, s);
    if (function == ScoreFunction::kSigmoid) return mul(d_score, mul(s, add(1.0f, -s)));
    return d_score;
  }
  // The same by the logit of an expert that was not chosen: softmax's sum has it, too, and with it
  // epsilon times the sum. dot: the dot product of the chosen ones' scores and gradients, or
  // dot_of_epsilon.
  GROUPED_LINEAR_DEVICE float gradient_of_others(float s, float dot) const {
    return exact::mul(exact::mul(scale, -dot), s);
  }
  GROUPED_LINEAR_DEVICE float dot_of_epsilon(float total, float dot, float epsilon) const {
    const float sum = exact::add(total, epsilon);
    return exact::mul(exact::div(dot, sum), exact::div(kWeightEpsilon, sum));
  }
  GROUPED_LINEAR_DEVICE bool others_have_gradients() const {
    return function == ScoreFunction::kSoftmax && !normalize;
  }
};

}  // namespace grouped_linear
