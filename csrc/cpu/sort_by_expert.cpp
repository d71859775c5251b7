// SPDX-License-Identifier: Apache-2.0
// A stable counting sort of tokens' choices by expert.

#include <vector>

#include "checks.h"
#include "cpu/rows.h"
#include "ops.h"

namespace grouped_linear::cpu {

std::tuple<Tensor, Tensor, Tensor, Tensor> sort_by_expert(const Tensor& experts,
                                                          int64_t num_experts) {
  check_sort_by_expert(experts, num_experts);
  const int64_t T = experts.size(0), C = experts.size(1), R = T * C;
  const Tensor choice = new_tensor(experts, {R}, ScalarType::Int);
  const Tensor token = new_tensor(experts, {R}, ScalarType::Int);
  const Tensor row = new_tensor(experts, {T, C}, ScalarType::Int);
  const Tensor offs = new_tensor(experts, {num_experts}, ScalarType::Int);

  std::vector<int64_t> bins = row_numbers(experts);
  std::vector<int32_t> next(num_experts + 2);  // next[b + 1] counts bin b, then is where it begins
  for (int64_t& bin : bins) {
    if (bin < 0 || bin >= num_experts) bin = num_experts;
    ++next[bin + 1];
  }
  const auto numbers = [](const Tensor& t) { return t.mutable_data_ptr<int32_t>(); };
  int32_t *choices = numbers(choice), *tokens = numbers(token), *rows = numbers(row);
  int32_t* ends = numbers(offs);
  for (int64_t b = 0; b < num_experts; ++b) ends[b] = next[b + 1] += next[b];
  for (int64_t i = 0; i < R; ++i) {
    const int32_t at = next[bins[i]]++;
    choices[at] = static_cast<int32_t>(i);
    tokens[at] = static_cast<int32_t>(i / C);
    rows[i] = at;
  }
  return {choice, token, row, offs};
}

}  // namespace grouped_linear::cpu
