#include "checks.h"
#include "cuda/common/launch.h"
#include "cuda/common/operands.h"
#include "cuda/quantize/group_dequantize.cuh"
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
  Tensor x = new_tensor(q, {T, K}, dtype);

  if (T == 0) return x;

  const int64_t grid = std::min(ceil_div(T, kDequantizeThreads / 32),
                                kBlocksPerMultiprocessor * launch.multiprocessors());
  for_element(dtype, [&](auto output) {
    using Output = typename decltype(output)::type;
    launch.run(group_dequantize_kernel<Output>, static_cast<unsigned>(grid), kDequantizeThreads, 0,
               static_cast<const uint8_t*>(q.const_data_ptr()), q.stride(0), has_aligned_rows(q),
               scale.const_data_ptr<float>(), scale.stride(0), offs.const_data_ptr<int32_t>(),
               static_cast<int>(offs.size(0)), T, static_cast<int>(K),
               static_cast<Output*>(x.mutable_data_ptr()));
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
  Tensor x = new_tensor(q_t, {num_rows, K}, dtype);

  if (num_rows == 0) return x;

  const int64_t grid = std::min(q_t.size(0) * ceil_div(K, kBlock),
                                kBlocksPerMultiprocessor * launch.multiprocessors());
  for_element(dtype, [&](auto output) {
    using Output = typename decltype(output)::type;
    launch.run(group_dequantize_t_kernel<Output>, static_cast<unsigned>(grid), kDequantizeThreads,
               0, static_cast<const uint8_t*>(q_t.const_data_ptr()), is_aligned(q_t),
               scale_t.const_data_ptr<float>(), scale_t.stride(0), offs.const_data_ptr<int32_t>(),
               static_cast<int>(offs.size(0)), num_rows, static_cast<int>(K),
               static_cast<Output*>(x.mutable_data_ptr()));
  });
  return x;
}

}  // namespace grouped_linear::cuda
