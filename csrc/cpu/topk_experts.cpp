// The experts with the largest scores of each token.

#include <algorithm>
#include <cmath>
#include <numeric>
#include <vector>

#include "checks.h"
#include "cpu/rows.h"
#include "ops.h"

namespace grouped_linear::cpu {

Tensor topk_experts(const Tensor& scores_in, int64_t k) {
  check_topk_experts(scores_in, k);
  const Tensor scores = with_dense_rows(scores_in);
  const int64_t T = scores.size(0), E = scores.size(1);
  const Tensor out = new_tensor(scores, {T, k}, ScalarType::Long);
  auto* experts = out.mutable_data_ptr<int64_t>();
  torch::stable::parallel_for(0, T, 1, [&](int64_t begin, int64_t end) {
    std::vector<float> score(E);
    std::vector<int64_t> order(E);
    // NaN comes first. Equal scores are in the order of their experts.
    const auto before = [&](int64_t a, int64_t b) {
      const bool a_nan = std::isnan(score[a]), b_nan = std::isnan(score[b]);
      if (a_nan || b_nan) return a_nan && (!b_nan || a < b);
      return score[a] > score[b] || (score[a] == score[b] && a < b);
    };
    for (int64_t t = begin; t < end; ++t) {
      load_row(row_of(scores, t), scores.scalar_type(), E, score.data());
      std::iota(order.begin(), order.end(), int64_t{0});
      std::partial_sort(order.begin(), order.begin() + k, order.end(), before);
      std::copy_n(order.begin(), k, experts + t * k);
    }
  });
  return out;
}

}  // namespace grouped_linear::cpu
