#include <type_traits>
#include <vector>

#include "../checks.h"
#include "../ops.h"
#include "kernels/group_dequantize.cuh"
#include "launch.h"

namespace grouped_linear::cuda {
namespace {

constexpr int64_t kBlocksPerMultiprocessor = 2048 / kDequantizeThreads;

// Calls run with the type that dtype names.
template <typename Run>
void for_output(ScalarType dtype, const Run& run) {
  switch (dtype) {
    case ScalarType::BFloat16: run(std::type_identity<__nv_bfloat16>()); break;
    case ScalarType::Half: run(std::type_identity<__half>()); break;
    default: run(std::type_identity<float>());
  }
}

Tensor inner_contiguous(const Tensor& t) {
  return t.stride(1) == 1 ? t : torch::stable::contiguous(t);
}

bool is_aligned(const Tensor& t, int64_t row_bytes) {
  return reinterpret_cast<uintptr_t>(t.const_data_ptr()) % 16 == 0 && row_bytes % 16 == 0;
}

}  // namespace

Tensor group_dequantize(const Tensor& q_in, const Tensor& scale_in, const Tensor& offs_in,
                        ScalarType dtype) {
  check_group_dequantize(q_in, scale_in, offs_in, dtype);

  const Launch launch("group_dequantize", q_in);
  const Tensor q = inner_contiguous(q_in), scale = inner_contiguous(scale_in);
  const Tensor offs = torch::stable::contiguous(offs_in);
  const int64_t T = q.size(0), K = q.size(1);
  Tensor x = torch::stable::new_empty(q, std::vector<int64_t>{T, K}, dtype);

  if (T == 0) return x;

  const int64_t grid = std::min(ceil_div(T, kDequantizeThreads / 32),
                                kBlocksPerMultiprocessor * launch.multiprocessors());
  for_output(dtype, [&](auto output) {
    using Output = typename decltype(output)::type;
    group_dequantize_kernel<Output>
        <<<static_cast<unsigned>(grid), kDequantizeThreads, 0, launch.stream()>>>(
            static_cast<const uint8_t*>(q.const_data_ptr()), q.stride(0),
            is_aligned(q, q.stride(0)), scale.const_data_ptr<float>(), scale.stride(0),
            offs.const_data_ptr<int32_t>(), static_cast<int>(offs.size(0)), T, static_cast<int>(K),
            static_cast<Output*>(x.mutable_data_ptr()));
  });
  launch.check_launched();
  return x;
}

Tensor group_dequantize_t(const Tensor& q_t_in, const Tensor& scale_t_in, const Tensor& offs_in,
                          int64_t num_rows, ScalarType dtype) {
  check_group_dequantize_t(q_t_in, scale_t_in, offs_in, num_rows, dtype);

  const Launch launch("group_dequantize_t", q_t_in);
  const Tensor q_t = torch::stable::contiguous(q_t_in), scale_t = inner_contiguous(scale_t_in);
  const Tensor offs = torch::stable::contiguous(offs_in);
  const int64_t K = q_t.size(1);
  Tensor x = torch::stable::new_empty(q_t, std::vector<int64_t>{num_rows, K}, dtype);

  if (num_rows == 0) return x;

  const int64_t grid = std::min(q_t.size(0) * ceil_div(K, kBlock),
                                kBlocksPerMultiprocessor * launch.multiprocessors());
  for_output(dtype, [&](auto output) {
    using Output = typename decltype(output)::type;
    group_dequantize_t_kernel<Output>
        <<<static_cast<unsigned>(grid), kDequantizeThreads, 0, launch.stream()>>>(
            static_cast<const uint8_t*>(q_t.const_data_ptr()), is_aligned(q_t, kBlock),
            scale_t.const_data_ptr<float>(), scale_t.stride(0), offs.const_data_ptr<int32_t>(),
            static_cast<int>(offs.size(0)), num_rows, static_cast<int>(K),
            static_cast<Output*>(x.mutable_data_ptr()));
  });
  launch.check_launched();
  return x;
}

}  // namespace grouped_linear::cuda
