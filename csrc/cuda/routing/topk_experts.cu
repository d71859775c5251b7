// SPDX-License-Identifier: Apache-2.0
#include "checks.h"
#include "cuda/common/launch.h"
#include "cuda/common/operands.h"
#include "cuda/routing/topk_experts.cuh"
#include "ops.h"

namespace grouped_linear::cuda {

std::tuple<Tensor, Tensor> topk_experts(const Tensor& logits_in, int64_t k,
                                        const std::optional<Tensor>& bias_in,
                                        const std::string& score_function, bool normalize,
                                        double scale) {
  const Scoring scoring =
      check_topk_experts(logits_in, k, bias_in, score_function, normalize, scale);

  const Launch launch("topk_experts", logits_in);
  const Tensor logits = with_dense_rows(logits_in);
  const std::optional<Tensor> bias = as_dense(bias_in);
  const int64_t T = logits.size(0), E = logits.size(1);
  const Tensor weights = new_tensor(logits, {T, k}, ScalarType::Float);
  const Tensor experts = new_tensor(logits, {T, k}, ScalarType::Long);
  if (T == 0) return {weights, experts};

  const auto blocks = static_cast<unsigned>(ceil_div(T, kTopkWarps));
  for_element(logits.scalar_type(), [&]<typename Element>(std::type_identity<Element>) {
    constexpr int few = 4, some = 8, many = 16, most = kMaxGroups / 32;
    const auto kernel = E <= 32 * few    ? topk_experts_kernel<Element, few>
                        : E <= 32 * some ? topk_experts_kernel<Element, some>
                        : E <= 32 * many ? topk_experts_kernel<Element, many>
                                         : topk_experts_kernel<Element, most>;
    launch.run(kernel, blocks, kTopkThreads, 0, data<Element>(logits), logits.stride(0),
               data_or_null<float>(bias), T, static_cast<int>(E), static_cast<int>(k), scoring,
               mutable_data<float>(weights), mutable_data<int64_t>(experts));
  });
  return {weights, experts};
}

Tensor topk_experts_grad(const Tensor& d_weights_in, const Tensor& logits_in,
                         const Tensor& experts_in, const std::string& score_function,
                         bool normalize, double scale) {
  const Scoring scoring = check_topk_experts_grad(d_weights_in, logits_in, experts_in,
                                                  score_function, normalize, scale);

  const Launch launch("topk_experts_grad", logits_in);
  const Tensor d_weights = as_dense(d_weights_in), experts = as_dense(experts_in);
  const Tensor logits = with_dense_rows(logits_in);
  const int64_t T = logits.size(0), E = logits.size(1), k = experts.size(1);
  const Tensor d_logits = new_tensor(logits, {T, E}, logits.scalar_type());
  if (T == 0) return d_logits;

  const auto blocks = static_cast<unsigned>(ceil_div(T, kTopkWarps));
  const int bytes = kTopkWarps * static_cast<int>(E * sizeof(float));
  for_element(logits.scalar_type(), [&]<typename Element>(std::type_identity<Element>) {
    launch.run(topk_experts_grad_kernel<Element>, blocks, kTopkThreads, bytes,
               data<float>(d_weights), data<Element>(logits), logits.stride(0),
               data<int64_t>(experts), T, static_cast<int>(E), static_cast<int>(k), scoring,
               mutable_data<Element>(d_logits));
  });
  return d_logits;
}

}  // namespace grouped_linear::cuda
