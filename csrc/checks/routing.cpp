// SPDX-License-Identifier: Apache-2.0
// The rules of the ops that sort, gather and count rows.

#include <cmath>
#include <limits>

#include "checks.h"
#include "checks/rules.h"
#include "routing_math.h"

namespace grouped_linear {
namespace {

// y [R, H], of which rows [T, C] are gathered.
void check_gathered(const char* op, const Tensor& y, const Tensor& rows) {
  check_dim(op, "y", y, 2);
  check_activation(op, "y", y.scalar_type());
  check_features(op, "H", y.size(1));
  check_rows(op, rows, 2, "y", y);
}

// logits [T, E], of which k of each token are chosen.
Scoring checked_scoring(const char* op, const Tensor& logits, int64_t k,
                        const std::string& score_function, bool normalize, double scale) {
  check_dim(op, "logits", logits, 2);
  check_activation(op, "logits", logits.scalar_type());
  check_groups(op, logits.size(1));
  check(k >= 1 && k <= logits.size(1), op, ": k must be between 1 and E, which is ", logits.size(1),
        ", got ", k);
  check_count(op, "logits", "rows", logits.size(0));
  const bool softmax = score_function == "softmax", sigmoid = score_function == "sigmoid";
  check(softmax || sigmoid || score_function == "none", op,
        ": score_function must be none, softmax or sigmoid, got ", score_function);
  check(std::isfinite(static_cast<float>(scale)), op, ": scaling_factor must be finite, got ",
        scale);
  const ScoreFunction function = softmax   ? ScoreFunction::kSoftmax
                                 : sigmoid ? ScoreFunction::kSigmoid
                                           : ScoreFunction::kNone;
  return {function, normalize, static_cast<float>(scale)};
}

}  // namespace

void check_splits_to_offsets(const Tensor& m_splits, int64_t num_rows, int64_t alignment,
                             int64_t stride, ScalarType dtype) {
  const char* op = "splits_to_offsets";
  check_dim(op, "m_splits", m_splits, 1);
  check_integer(op, "m_splits", m_splits.scalar_type());
  check_groups(op, m_splits.size(0));
  check_integer(op, "out_dtype", dtype);
  check(num_rows >= 0, op, ": num_rows must not be negative, got ", num_rows);
  check(alignment >= 1, op, ": alignment must be positive, got ", alignment);
  check(stride >= 1, op, ": stride must be positive, got ", stride);
  const int64_t largest = dtype == ScalarType::Int ? std::numeric_limits<int32_t>::max()
                                                   : std::numeric_limits<int64_t>::max();
  check(num_rows <= largest / stride, op, ": num_rows * stride does not fit in ", name_of(dtype),
        ", got ", num_rows, " * ", stride);
}

Scoring check_topk_experts(const Tensor& logits, int64_t k, const std::optional<Tensor>& bias,
                           const std::string& score_function, bool normalize, double scale) {
  const char* op = "topk_experts";
  const Scoring scoring = checked_scoring(op, logits, k, score_function, normalize, scale);
  if (!bias) return scoring;
  check_tensor(op, "expert_bias", *bias, 1, ScalarType::Float, "logits", logits);
  check_same(op, "E", "expert_bias", bias->size(0), "logits", logits.size(1));
  return scoring;
}

Scoring check_topk_experts_grad(const Tensor& d_weights, const Tensor& logits,
                                const Tensor& experts, const std::string& score_function,
                                bool normalize, double scale) {
  const char* op = "topk_experts_grad";
  check_dim(op, "d_weights", d_weights, 2);
  check_dtype(op, "d_weights", d_weights, ScalarType::Float);
  const Scoring scoring =
      checked_scoring(op, logits, d_weights.size(1), score_function, normalize, scale);
  check_device(op, "logits", logits, "d_weights", d_weights);
  check_same(op, "T", "logits", logits.size(0), "d_weights", d_weights.size(0));
  check_tensor(op, "experts", experts, 2, ScalarType::Long, "d_weights", d_weights);
  check_same(op, "T", "experts", experts.size(0), "d_weights", d_weights.size(0));
  check_same(op, "k", "experts", experts.size(1), "d_weights", d_weights.size(1));
  return scoring;
}

void check_sort_by_expert(const Tensor& experts, int64_t num_experts) {
  const char* op = "sort_by_expert";
  check_dim(op, "experts", experts, 2);
  check_integer(op, "experts", experts.scalar_type());
  check_groups(op, num_experts);
  check_count(op, "experts", "choices", experts.size(0) * experts.size(1));
}

void check_gather_sum(const Tensor& y, const Tensor& rows, const std::optional<Tensor>& weight,
                      const std::optional<Tensor>& offs) {
  const char* op = "gather_sum";
  check_gathered(op, y, rows);
  if (offs) check_offs(op, *offs, "y", y);
  if (!weight) return;
  check_tensor(op, "weight", *weight, 2, ScalarType::Float, "y", y);
  check_same(op, "T", "weight", weight->size(0), "rows", rows.size(0));
  check_same(op, "C", "weight", weight->size(1), "rows", rows.size(1));
}

void check_gather_dot(const Tensor& a, const Tensor& y, const Tensor& rows) {
  const char* op = "gather_dot";
  check_gathered(op, y, rows);
  check_tensor(op, "a", a, 2, y.scalar_type(), "y", y);
  check_same(op, "T", "a", a.size(0), "rows", rows.size(0));
  check_same(op, "H", "a", a.size(1), "y", y.size(1));
}

void check_scatter_rows(const Tensor& x, const Tensor& rows, int64_t num_rows) {
  const char* op = "scatter_rows";
  check_dim(op, "x", x, 2);
  check_activation(op, "x", x.scalar_type());
  check_features(op, "H", x.size(1));
  check_rows(op, rows, 2, "x", x);
  check_same(op, "T", "rows", rows.size(0), "x", x.size(0));
  check(num_rows >= 0, op, ": num_rows must not be negative, got ", num_rows);
}

}  // namespace grouped_linear
