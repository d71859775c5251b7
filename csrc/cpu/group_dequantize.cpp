// SPDX-License-Identifier: Apache-2.0
#include "checks.h"
#include "cpu/tile.h"
#include "ops.h"

namespace grouped_linear::cpu {

Tensor group_dequantize(const Tensor& q_in, const Tensor& scale_in, const Tensor& offs,
                        ScalarType dtype) {
  check_group_dequantize(q_in, scale_in, offs, dtype);
  const Tensor q = with_dense_rows(q_in), scale = with_dense_rows(scale_in);
  const int64_t T = q.size(0), K = q.size(1);
  const int64_t valid = group_starts("group_dequantize", offs, T).back();
  Tensor x = new_tensor(q, {T, K}, dtype);
  const float* scales = scale.const_data_ptr<float>();
  const int64_t scale_stride = scale.stride(0);

  torch::stable::parallel_for(0, valid, 16, [&](int64_t begin, int64_t end) {
    std::vector<float> row(K);
    for (int64_t t = begin; t < end; ++t) {
      dequantize_row(row_of(q, t), K, scales + t, scale_stride, row.data());
      store_row(row.data(), K, dtype, row_of(x, t));
    }
  });
  zero_rows(x, valid);
  return x;
}

Tensor group_dequantize_t(const Tensor& q_t_in, const Tensor& scale_t_in, const Tensor& offs,
                          int64_t num_rows, ScalarType dtype) {
  check_group_dequantize_t(q_t_in, scale_t_in, offs, num_rows, dtype);
  const Tensor q_t = as_dense(q_t_in), scale_t = with_dense_rows(scale_t_in);
  const int64_t K = q_t.size(1);
  const auto starts = group_starts("group_dequantize_t", offs, num_rows);
  const auto blocks = row_blocks(starts);
  Tensor x = new_tensor(q_t, {num_rows, K}, dtype);

  torch::stable::parallel_for(0, blocks.size(), 1, [&](int64_t begin, int64_t end) {
    std::vector<float> columns(K * kBlock), row(K);
    for (int64_t b = begin; b < end; ++b) {
      const auto* scales = reinterpret_cast<const float*>(row_of(scale_t, b));
      for (int64_t k = 0; k < K; ++k)
        dequantize_row(row_of(q_t, b) + k * kBlock, kBlock, scales + k, 1,
                       columns.data() + k * kBlock);
      for (int64_t t = blocks[b].begin; t < blocks[b].end; ++t) {
        for (int64_t k = 0; k < K; ++k) row[k] = columns[k * kBlock + t - blocks[b].begin];
        store_row(row.data(), K, dtype, row_of(x, t));
      }
    }
  });
  zero_rows(x, starts.back());
  return x;
}

}  // namespace grouped_linear::cpu
