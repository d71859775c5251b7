// A weight, or what its gradient is added to: one tensor [E, N, K], or E tensors [N, K] anywhere.
#pragma once

#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <vector>

namespace grouped_linear {

using torch::stable::Tensor;

// Whether the experts lie dense and one after the other in memory, as views of one tensor do.
bool are_packed(const std::vector<Tensor>& experts);

// The experts as one tensor [E, N, K]: their own memory where they are packed, else a dense copy.
// The result must not outlive them. Addresses are looked at in every call: the owner of a parameter
// may have moved it since the last one.
Tensor packed(const std::vector<Tensor>& experts);

// Calls run with the experts as one dense tensor [E, N, K], to be read and written.
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
