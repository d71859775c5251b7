// SPDX-License-Identifier: Apache-2.0
#include "cpu/tiles.h"

namespace grouped_linear::cpu {

GroupedRows::GroupedRows(const char* op, const Tensor& x, const Tensor& offs)
    : values{with_dense_rows(x)},
      dtype(x.scalar_type()),
      element(element_size(dtype)),
      groups(offs.size(0)),
      features(x.size(1)),
      row_bytes(values[0].stride(0) * element),
      first{static_cast<const char*>(values[0].data_ptr())},
      blocks(row_blocks(group_starts(op, offs, x.size(0)))) {}

GroupedRows::GroupedRows(const std::vector<Tensor>& weight)
    : dtype(weight[0].scalar_type()), element(element_size(dtype)) {
  for (const Tensor& w : weight) values.push_back(as_dense(w));
  const bool packed = weight[0].dim() == 3;
  groups = packed ? weight[0].size(0) : static_cast<int64_t>(weight.size());
  expert_rows = weight[0].size(packed);
  features = weight[0].size(packed + 1);
  row_bytes = features * element;
  std::vector<int64_t> starts;
  for (int64_t e = 0; e <= groups; ++e) starts.push_back(e * expert_rows);
  blocks = row_blocks(starts);
  for (int64_t e = 0; e < groups; ++e)
    first.push_back(packed ? row_of(values[0], e) : static_cast<const char*>(values[e].data_ptr()));
}

}  // namespace grouped_linear::cpu
