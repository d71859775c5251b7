// SPDX-License-Identifier: Apache-2.0
#include "cuda/gemm/simt/gemm.h"
#include "cuda/gemm/simt/gemm_float.cuh"

namespace grouped_linear::cuda::simt {
namespace {

template <Grouping grouping>
void launch_float(const Launch& launch, const FloatOperand& a, const FloatOperand& b,
                  const GroupedGemm& gemm) {
  launch.run(grouped_gemm_float_kernel<grouping>, 4 * launch.multiprocessors(), kThreads, 0, a, b,
             gemm.offs.const_data_ptr<int32_t>(), gemm.epilogue, gemm.shape);
}

}  // namespace

void run_grouped_gemm(const Launch& launch, const GroupedGemm& gemm) {
  const Tensor &a = gemm.a, &b = gemm.b;
  const float *a_data = a.const_data_ptr<float>(), *b_data = b.const_data_ptr<float>();
  const RowNumbers a_rows = row_numbers(gemm.a_rows, a), b_rows = row_numbers(gemm.b_rows, b);
  if (gemm.grouping == Grouping::kM)
    launch_float<Grouping::kM>(launch, {a_data, 0, a.stride(0), a.stride(1), a_rows},
                               {b_data, b.stride(0), b.stride(1), b.stride(2), b_rows}, gemm);
  else
    launch_float<Grouping::kK>(launch, {a_data, 0, a.stride(1), a.stride(0), a_rows},
                               {b_data, 0, b.stride(1), b.stride(0), b_rows}, gemm);
}

}  // namespace grouped_linear::cuda::simt
