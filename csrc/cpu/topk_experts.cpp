// SPDX-License-Identifier: Apache-2.0
// The experts with the largest scores of each token, their weights, and the gradient by the logits.

#include <algorithm>
#include <cmath>
#include <numeric>
#include <vector>

#include "checks.h"
#include "cpu/rows.h"
#include "ops.h"
#include "routing_math.h"

namespace grouped_linear::cpu {
namespace {

// The sum of n values in the order of a warp, which has every 32nd in a lane.
template <typename Value>
float sum_by_lanes(int64_t n, const Value& value) {
  constexpr int lanes = 32;
  float sums[lanes] = {};
  for (int64_t i = 0; i < n; ++i) sums[i % lanes] += value(i);
  for (int half = lanes / 2; half > 0; half /= 2)
    for (int l = 0; l < half; ++l) sums[l] += sums[l + half];
  return sums[0];
}

// The logits of one token, and their scores.
class Scores {
 public:
  Scores(const Scoring& scoring, int64_t E) : scoring_(scoring), logits_(E) {}

  // divides: whether the scores of softmax are divided by their sum.
  void load(const Tensor& logits, int64_t t, bool divides) {
    load_row(row_of(logits, t), logits.scalar_type(), size(), logits_.data());
    max_ = 0, sum_ = 1;
    if (!scoring_.is_softmax()) return;
    max_ = logits_[0];
    for (const float logit : logits_)
      if (std::isnan(logit) || logit > max_) max_ = logit;
    if (divides) sum_ = sum();
  }
  int64_t size() const { return static_cast<int64_t>(logits_.size()); }
  float operator[](int64_t e) const { return scoring_.score(logits_[e], max_, sum_); }
  float logit(int64_t e) const { return logits_[e]; }
  float sum() const {
    return sum_by_lanes(size(), [&](int64_t e) { return (*this)[e]; });
  }

 private:
  Scoring scoring_;
  std::vector<float> logits_;
  float max_ = 0, sum_ = 1;
};

}  // namespace

std::tuple<Tensor, Tensor> topk_experts(const Tensor& logits_in, int64_t k,
                                        const std::optional<Tensor>& bias_in,
                                        const std::string& score_function, bool normalize,
                                        double scale) {
  const Scoring scoring =
      check_topk_experts(logits_in, k, bias_in, score_function, normalize, scale);
  const Tensor logits = with_dense_rows(logits_in);
  const std::optional<Tensor> bias_E = as_dense(bias_in);
  const float* bias = bias_E ? bias_E->const_data_ptr<float>() : nullptr;
  const int64_t T = logits.size(0), E = logits.size(1);
  const Tensor weights_Tk = new_tensor(logits, {T, k}, ScalarType::Float);
  const Tensor experts_Tk = new_tensor(logits, {T, k}, ScalarType::Long);
  auto* weights = weights_Tk.mutable_data_ptr<float>();
  auto* experts = experts_Tk.mutable_data_ptr<int64_t>();
  torch::stable::parallel_for(0, T, 1, [&](int64_t begin, int64_t end) {
    Scores scores(scoring, E);
    std::vector<float> by(E);  // experts are chosen by these
    std::vector<int64_t> order(E);
    // NaN comes first. Equal numbers are in the order of their experts.
    const auto before = [&](int64_t a, int64_t b) {
      const bool a_nan = std::isnan(by[a]), b_nan = std::isnan(by[b]);
      if (a_nan || b_nan) return a_nan && (!b_nan || a < b);
      return by[a] > by[b] || (by[a] == by[b] && a < b);
    };
    for (int64_t t = begin; t < end; ++t) {
      scores.load(logits, t, bias || !normalize);
      for (int64_t e = 0; e < E; ++e) by[e] = bias ? scores[e] + bias[e] : scores.logit(e);
      std::iota(order.begin(), order.end(), int64_t{0});
      std::partial_sort(order.begin(), order.begin() + k, order.end(), before);
      std::copy_n(order.begin(), k, experts + t * k);
      const float total = sum_by_lanes(k, [&](int64_t c) { return scores[order[c]]; });
      for (int64_t c = 0; c < k; ++c) weights[t * k + c] = scoring.weight(scores[order[c]], total);
    }
  });
  return {weights_Tk, experts_Tk};
}

Tensor topk_experts_grad(const Tensor& d_weights_in, const Tensor& logits_in,
                         const Tensor& experts_in, const std::string& score_function,
                         bool normalize, double scale) {
  const Scoring scoring = check_topk_experts_grad(d_weights_in, logits_in, experts_in,
                                                  score_function, normalize, scale);
  const Tensor d_weights = as_dense(d_weights_in), logits = with_dense_rows(logits_in);
  const int64_t T = logits.size(0), E = logits.size(1), k = experts_in.size(1);
  const std::vector<int64_t> experts = row_numbers(experts_in);
  for (int64_t i = 0; i < T * k; ++i)
    check(experts[i] >= 0 && experts[i] < E, "topk_experts_grad: experts must index the ", E,
          " experts of logits, got ", experts[i], " at row ", i / k);
  const Tensor d_logits = new_output(logits, {T, E}, logits.scalar_type());
  torch::stable::parallel_for(0, T, 1, [&](int64_t begin, int64_t end) {
    Scores scores(scoring, E);
    std::vector<float> row(E);
    for (int64_t t = begin; t < end; ++t) {
      bool dense = scoring.others_have_gradients();
      scores.load(logits, t, dense);
      const int64_t* chosen = experts.data() + t * k;
      const float* d_weight = d_weights.const_data_ptr<float>() + t * k;
      const float total = sum_by_lanes(k, [&](int64_t c) { return scores[chosen[c]]; });
      const float dot = sum_by_lanes(k, [&](int64_t c) { return d_weight[c] * scores[chosen[c]]; });
      float epsilon = kWeightEpsilon, dot_of_others = dot;
      if (scoring.epsilon_counts(total)) {
        epsilon = kWeightEpsilon * scores.sum();
        dot_of_others = scoring.dot_of_epsilon(total, dot, epsilon);
        dense = true;
      }
      for (int64_t e = 0; e < E; ++e)
        row[e] = dense ? scoring.gradient_of_others(scores[e], dot_of_others) : 0.0f;
      for (int64_t c = 0; c < k; ++c)
        row[chosen[c]] = scoring.gradient(scores[chosen[c]], d_weight[c], total, dot, epsilon);
      store_row(row.data(), E, logits.scalar_type(), row_of(d_logits, t));
    }
  });
  return d_logits;
}

}  // namespace grouped_linear::cpu
