// SPDX-License-Identifier: Apache-2.0
// A weight or its main_grad: one tensor [E, N, K], or E tensors [N, K] anywhere in memory.
#pragma once

#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <vector>

namespace grouped_linear {

using torch::stable::Tensor;

// Whether the experts are dense and adjacent in memory, as views of one tensor are.
bool are_packed(const std::vector<Tensor>& experts);

// The experts as one tensor [E, N, K]: a view if they are packed, else a dense copy. The result
// must not outlive them. Every call compares addresses, because the owner of a parameter may have
// moved it.
Tensor packed(const std::vector<Tensor>& experts);

// Calls run with the experts as one dense tensor [E, N, K], which run may read and write.
template <typename Run>
void write_packed(const std::vector<Tensor>& experts, const Run& run) {
  const Tensor all = packed(experts);
  run(all);
  if (are_packed(experts)) return;
  for (size_t e = 0; e < experts.size(); ++e) {
    Tensor expert = experts[e];
    torch::stable::copy_(expert, torch::stable::select(all, 0, static_cast<int64_t>(e)));
  }
}

}  // namespace grouped_linear
