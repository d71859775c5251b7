#include "checks.h"
#include "cuda/common/launch.h"
#include "cuda/common/operands.h"
#include "cuda/routing/topk_experts.cuh"
#include "ops.h"

namespace grouped_linear::cuda {

Tensor topk_experts(const Tensor& scores_in, int64_t k) {
  check_topk_experts(scores_in, k);

  const Launch launch("topk_experts", scores_in);
  const Tensor scores = with_dense_rows(scores_in);
  const int64_t T = scores.size(0), E = scores.size(1);
  const Tensor experts = new_tensor(scores, {T, k}, ScalarType::Long);
  if (T == 0) return experts;
  const auto blocks = static_cast<unsigned>(ceil_div(32 * T, kTopkThreads));
  for_element(scores.scalar_type(), [&]<typename Element>(std::type_identity<Element>) {
    constexpr int few = 4, some = 8, many = 16, most = kMaxGroups / 32;
    const auto kernel = E <= 32 * few    ? topk_experts_kernel<Element, few>
                        : E <= 32 * some ? topk_experts_kernel<Element, some>
                        : E <= 32 * many ? topk_experts_kernel<Element, many>
                                         : topk_experts_kernel<Element, most>;
    launch.run(kernel, blocks, kTopkThreads, 0, data<Element>(scores), scores.stride(0), T,
               static_cast<int>(E), static_cast<int>(k), mutable_data<int64_t>(experts));
  });
  return experts;
}

}  // namespace grouped_linear::cuda
