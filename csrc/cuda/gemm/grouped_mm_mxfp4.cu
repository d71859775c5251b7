// SPDX-License-Identifier: Apache-2.0
#include "cuda/gemm/gemm.h"
#include "cuda/gemm/mxfp4_e4m3.cuh"
#include "gemm_ops.h"
#include "ops.h"

namespace grouped_linear::cuda {
namespace {

// The weight in e4m3 with the scales of its 128 x 128 blocks, as grouped_scaled_mm_nt reads them.
std::tuple<Tensor, Tensor> in_e4m3(const Launch& launch, const Tensor& b, const Tensor& scale_b,
                                   bool transpose_b) {
  const Tensor codes = vector_readable(as_dense(b), 2), scale = as_dense(scale_b);
  const int64_t E = codes.size(0), N = codes.size(1), K = 2 * codes.size(2);
  const int64_t row_blocks = ceil_div(N, kBlock), k_blocks = ceil_div(K, kBlock);
  const Tensor q =
      new_tensor(codes, transpose_b ? Shape{E, N, K} : Shape{E, K, N}, ScalarType::Float8_e4m3fn);
  const Tensor blocks = new_tensor(codes, {E, row_blocks, k_blocks}, ScalarType::Float);
  const dim3 grid(static_cast<unsigned>(row_blocks), static_cast<unsigned>(k_blocks),
                  static_cast<unsigned>(E));
  launch.run(transpose_b ? mxfp4_to_e4m3_kernel<false> : mxfp4_to_e4m3_kernel<true>, grid,
             kE4m3Threads, 0, codes.const_data_ptr<uint8_t>(), scale.const_data_ptr<uint8_t>(),
             static_cast<uint8_t*>(q.data_ptr()), static_cast<float*>(blocks.data_ptr()),
             static_cast<int>(N), static_cast<int>(K));
  return {q, transpose_b ? blocks : transposed(blocks)};
}

}  // namespace

Tensor grouped_mm_mxfp4(const Tensor& a, const Tensor& b, const Tensor& scale_b, const Tensor& offs,
                        const std::optional<Tensor>& bias_in, const std::optional<Tensor>& scale_a,
                        std::optional<ScalarType> out_dtype, bool transpose_b,
                        const std::optional<Tensor>& a_rows, const std::optional<Tensor>& a_low,
                        const std::optional<Tensor>& b_low) {
  const LowRank low = low_rank(a_low, b_low);
  const ScalarType dtype = mxfp4_out_dtype(a, out_dtype);
  check_grouped_mm_mxfp4(a, b, scale_b, offs, bias_in, scale_a, dtype, transpose_b, a_rows, low);

  const Launch launch("grouped_mm_mxfp4", a);
  const int64_t T = (a_rows ? *a_rows : a).size(0), cols = transpose_b ? b.size(1) : 2 * b.size(2);
  if (T == 0) return new_tensor(a, {T, cols}, dtype);
  // Kernels decode beside BF16 alone. Else a pass before the GEMM writes the weight in a's type.
  if (scale_a) {
    const auto [q, blocks] = in_e4m3(launch, b, scale_b, transpose_b);
    return grouped_scaled_mm_nt(a, q, *scale_a, blocks, offs, bias_in, dtype, a_rows, low);
  }
  if (a.scalar_type() != ScalarType::BFloat16) {
    const Tensor w = dequantize_mxfp4(b, scale_b, a.scalar_type());
    return grouped_mm_nt(a, transpose_b ? w : transposed(w), offs, bias_in, dtype, a_rows, low);
  }
  if (low.a && !adds_low_rank(launch, low)) {
    constexpr ScalarType sums = ScalarType::Float;
    const Tensor first = grouped_mm_mxfp4(a, b, scale_b, offs, converted(bias_in, sums), {}, sums,
                                          transpose_b, a_rows, {}, {});
    return low_rank_sum(launch, first, low, offs, dtype);
  }
  return m_grouped_result(launch, a, b, offs, bias_in, cols, dtype, a_rows, low,
                          [&](GroupedGemm& gemm) {
                            gemm.scale_b = scale_b;
                            run_mxfp4(launch, gemm, transpose_b ? Major::kK : Major::kMN);
                          });
}

}  // namespace grouped_linear::cuda
