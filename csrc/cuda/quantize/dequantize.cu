// SPDX-License-Identifier: Apache-2.0
// Block scaling undone, for tests and for users.
#include "checks.h"
#include "cuda/common/launch.h"
#include "cuda/common/operands.h"
#include "cuda/quantize/dequantize.cuh"
#include "ops.h"

namespace grouped_linear::cuda {
namespace {

constexpr int64_t kBlocksPerMultiprocessor = 2048 / kDequantizeThreads;

}  // namespace

Tensor group_dequantize(const Tensor& q_in, const Tensor& scale_in, const Tensor& offs_in,
                        ScalarType dtype) {
  check_group_dequantize(q_in, scale_in, offs_in, dtype);

  const Launch launch("group_dequantize", q_in);
  const Tensor q = with_dense_rows(q_in), scale = with_dense_rows(scale_in);
  const Tensor offs = as_dense(offs_in);
  const int64_t T = q.size(0), K = q.size(1);
  const Tensor x = new_tensor(q, {T, K}, dtype);

  if (T == 0) return x;

  const int64_t grid = std::min(ceil_div(T, kDequantizeThreads / 32),
                                kBlocksPerMultiprocessor * launch.multiprocessors());
  for_element(dtype, [&]<typename Output>(std::type_identity<Output>) {
    launch.run(group_dequantize_kernel<Output>, static_cast<unsigned>(grid), kDequantizeThreads, 0,
               data<uint8_t>(q), q.stride(0), has_aligned_rows(q), data<float>(scale),
               scale.stride(0), data<int32_t>(offs), static_cast<int>(offs.size(0)), T,
               static_cast<int>(K), mutable_data<Output>(x));
  });
  return x;
}

Tensor group_dequantize_t(const Tensor& q_t_in, const Tensor& scale_t_in, const Tensor& offs_in,
                          int64_t num_rows, ScalarType dtype) {
  check_group_dequantize_t(q_t_in, scale_t_in, offs_in, num_rows, dtype);

  const Launch launch("group_dequantize_t", q_t_in);
  const Tensor q_t = as_dense(q_t_in), scale_t = with_dense_rows(scale_t_in);
  const Tensor offs = as_dense(offs_in);
  const int64_t K = q_t.size(1);
  const Tensor x = new_tensor(q_t, {num_rows, K}, dtype);

  if (num_rows == 0) return x;

  const int64_t grid = std::min(q_t.size(0) * ceil_div(K, kBlock),
                                kBlocksPerMultiprocessor * launch.multiprocessors());
  for_element(dtype, [&]<typename Output>(std::type_identity<Output>) {
    launch.run(group_dequantize_t_kernel<Output>, static_cast<unsigned>(grid), kDequantizeThreads,
               0, data<uint8_t>(q_t), is_aligned(q_t), data<float>(scale_t), scale_t.stride(0),
               data<int32_t>(offs), static_cast<int>(offs.size(0)), num_rows, static_cast<int>(K),
               mutable_data<Output>(x));
  });
  return x;
}

}  // namespace grouped_linear::cuda
