// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "checks.h"
#include "cuda/common/launch.h"
#include "cuda/common/operands.h"
#include "cuda/routing/sort_by_expert.cuh"
#include "ops.h"

namespace grouped_linear::cuda {

std::tuple<Tensor, Tensor, Tensor, Tensor> sort_by_expert(const Tensor& experts_in,
                                                          int64_t num_experts) {
  check_sort_by_expert(experts_in, num_experts);

  const Launch launch("sort_by_expert", experts_in);
  const Tensor experts = as_dense(experts_in);
  const int64_t T = experts.size(0), C = experts.size(1), R = T * C;
  Tensor choice = new_tensor(experts, {R}, ScalarType::Int);
  Tensor token = new_tensor(experts, {R}, ScalarType::Int);
  Tensor row = new_tensor(experts, {T, C}, ScalarType::Int);
  Tensor offs = new_tensor(experts, {num_experts}, ScalarType::Int);
  const int64_t blocks = std::clamp<int64_t>(ceil_div(R, kMinChoicesPerBlock), 1, kMaxSortBlocks);
  const int bytes = sort_shared_bytes(num_experts), E = static_cast<int>(num_experts);
  for_index(experts.scalar_type(), [&]<typename Expert>(std::type_identity<Expert>) {
    const auto* choices = data<Expert>(experts);
    std::optional<Tensor> counts;
    if (blocks > 1) {
      counts = new_tensor(experts, {blocks, num_experts + 1}, ScalarType::Int);
      launch.run(count_by_expert_kernel<Expert>, static_cast<unsigned>(blocks), kSortThreads, bytes,
                 choices, static_cast<int>(R), E, mutable_data<int32_t>(*counts));
    }
    const auto* block_counts = data_or_null<int32_t>(counts);
    launch.run(sort_by_expert_kernel<Expert>, static_cast<unsigned>(blocks), kSortThreads, bytes,
               choices, static_cast<int>(R), static_cast<int>(C), E, block_counts,
               mutable_data<int32_t>(choice), mutable_data<int32_t>(token),
               mutable_data<int32_t>(row), mutable_data<int32_t>(offs));
  });
  return {choice, token, row, offs};
}

}  // namespace grouped_linear::cuda
