#include "cuda/gemm/gemm.h"
#include "gemm_ops.h"
#include "ops.h"

namespace grouped_linear::cuda {

Tensor grouped_mm_mxfp4(const Tensor& a, const Tensor& b, const Tensor& scale_b, const Tensor& offs,
                        const std::optional<Tensor>& bias_in, const std::optional<Tensor>& scale_a,
                        std::optional<ScalarType> out_dtype, bool transpose_b,
                        const std::optional<Tensor>& a_rows, const std::optional<Tensor>& a_low,
                        const std::optional<Tensor>& b_low) {
  const LowRank low = low_rank(a_low, b_low);
  const ScalarType dtype = mxfp4_out_dtype(a, out_dtype);
  check_grouped_mm_mxfp4(a, b, scale_b, offs, bias_in, scale_a, dtype, transpose_b, a_rows, low);

  const Launch launch("grouped_mm_mxfp4", a);
  const int64_t T = (a_rows ? *a_rows : a).size(0);
  if (T > 0 && low.a && !adds_low_rank(launch, low)) {
    constexpr ScalarType sums = ScalarType::Float;
    const Tensor first = grouped_mm_mxfp4(a, b, scale_b, offs, converted(bias_in, sums), scale_a,
                                          sums, transpose_b, a_rows, {}, {});
    const Tensor second = grouped_mm_nt(*low.a, *low.b, offs, {}, sums, {}, {});
    return low_rank_sum(launch, first, second, dtype);
  }
  const int64_t N = b.size(1), K = 2 * b.size(2), cols = transpose_b ? N : K;
  Tensor y = new_tensor(a, {T, cols}, dtype);
  if (T == 0) return y;
  if (a.size(0) == 0) {  // no row to gather
    torch::stable::zero_(y);
    return y;
  }
  // Float32 has no tensor cores, and no kernel that decodes: its weight is dequantized.
  if (a.scalar_type() == ScalarType::Float) {
    const Tensor w = dequantize_mxfp4(b, scale_b, ScalarType::Float);
    return grouped_mm_nt(a, transpose_b ? w : transposed(w), offs, bias_in, dtype, a_rows, {});
  }

  const std::optional<Tensor> bias = with_dense_rows(bias_in);
  GroupedGemm gemm = m_grouped(launch, a, b, offs, cols, a_rows);
  gemm.scale_a = scale_a, gemm.scale_b = scale_b;
  gemm.epilogue = epilogue_arguments(y, bias, false, std::nullopt);
  gemm.low = low;
  run_mxfp4(launch, gemm, transpose_b ? Major::kK : Major::kMN);
  return y;
}

}  // namespace grouped_linear::cuda
