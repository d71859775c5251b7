// SPDX-License-Identifier: Apache-2.0
#include "experts.h"

#include "tensors.h"

namespace grouped_linear {

bool are_packed(const std::vector<Tensor>& experts) {
  if (experts.size() == 1) return true;
  const auto* next = static_cast<const char*>(experts[0].const_data_ptr());
  for (const Tensor& expert : experts) {
    if (!expert.is_contiguous() || expert.const_data_ptr() != next) return false;
    next += expert.numel() * static_cast<int64_t>(expert.element_size());
  }
  return true;
}

Tensor packed(const std::vector<Tensor>& experts) {
  const Tensor& first = experts[0];
  if (first.dim() == 3) return first;
  const auto E = static_cast<int64_t>(experts.size());
  const Shape shape{E, first.size(0), first.size(1)};
  const ScalarType dtype = first.scalar_type();
  if (E == 1) return torch::stable::unsqueeze(first, 0);
  if (are_packed(experts)) return tensor_over(first.data_ptr(), first, shape, dtype);
  const Tensor all = new_tensor(first, shape, dtype);
  for (int64_t e = 0; e < E; ++e) {
    Tensor slot = torch::stable::select(all, 0, e);
    torch::stable::copy_(slot, experts[e]);
  }
  return all;
}

}  // namespace grouped_linear
